#include "model/offloaded_layer.h"

#include <utility>

namespace burst {

OffloadedLayer::OffloadedLayer(HostCopies& copies, const Variable& x,
                               std::shared_ptr<KeptAttention> kept)
    : x_(x), kept_(std::move(kept)), stored_x_(copies.Store(x.value())) {
  if (kept_ == nullptr || kept_->out.null()) return;
  const Tensor &out = kept_->out, &saved = kept_->saved.out;
  saved_is_out_ = !saved.null() && saved.raw_data() == out.raw_data();
  if (out.is_contiguous()) stored_out_ = copies.Store(out);
  if (!saved_is_out_ && !saved.null() && saved.is_contiguous()) stored_saved_ = copies.Store(saved);
}

void OffloadedLayer::Release() {
  x_.ForgetValue();
  stored_x_->Release();
  if (stored_out_ != nullptr) {
    kept_->out = Tensor();
    if (saved_is_out_) kept_->saved.out = Tensor();
    stored_out_->Release();
  }
  if (stored_saved_ != nullptr) {
    kept_->saved.out = Tensor();
    stored_saved_->Release();
  }
  released_ = true;
}

void OffloadedLayer::Fetch() {
  stored_x_->Fetch();
  if (stored_out_ != nullptr) stored_out_->Fetch();
  if (stored_saved_ != nullptr) stored_saved_->Fetch();
}

void OffloadedLayer::Restore() {
  if (!released_) return;
  x_.SetValue(stored_x_->Take());
  if (stored_out_ != nullptr) {
    kept_->out = stored_out_->Take();
    if (saved_is_out_) kept_->saved.out = kept_->out;
  }
  if (stored_saved_ != nullptr) kept_->saved.out = stored_saved_->Take();
}

}  // namespace burst
