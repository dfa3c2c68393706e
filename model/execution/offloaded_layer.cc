#include "model/execution/offloaded_layer.h"

#include <utility>

namespace burst {

OffloadedLayer::OffloadedLayer(HostCopies& copies, const Variable& x,
                               std::shared_ptr<KeptAttention> kept)
    : x_(x), kept_(std::move(kept)), stored_x_(copies.Store(x.value())) {
  if (kept_ == nullptr || kept_->out.null()) return;
  if (kept_->out.is_contiguous()) stored_out_ = copies.Store(kept_->out);
  for (const SequenceParallelAttention::Saved& saved : kept_->saved) {
    const bool stores = !saved.out.null() && saved.out.is_contiguous();
    stored_saved_.push_back(stores ? copies.Store(saved.out) : nullptr);
  }
}

void OffloadedLayer::Release() {
  x_.ForgetValue();
  stored_x_->Release();
  if (stored_out_ != nullptr) {
    kept_->out = Tensor();
    stored_out_->Release();
  }
  for (size_t i = 0; i < stored_saved_.size(); ++i) {
    if (stored_saved_[i] == nullptr) continue;
    kept_->saved[i].out = Tensor();
    stored_saved_[i]->Release();
  }
  released_ = true;
}

void OffloadedLayer::Fetch() {
  stored_x_->Fetch();
  if (stored_out_ != nullptr) stored_out_->Fetch();
  for (const auto& stored : stored_saved_) {
    if (stored != nullptr) stored->Fetch();
  }
}

void OffloadedLayer::Restore() {
  if (!released_) return;
  x_.SetValue(stored_x_->Take());
  if (stored_out_ != nullptr) kept_->out = stored_out_->Take();
  for (size_t i = 0; i < stored_saved_.size(); ++i) {
    if (stored_saved_[i] != nullptr) kept_->saved[i].out = stored_saved_[i]->Take();
  }
}

}  // namespace burst
