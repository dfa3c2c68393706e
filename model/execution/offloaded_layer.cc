#include "model/execution/offloaded_layer.h"

#include <utility>

namespace burst {

OffloadedLayer::OffloadedLayer(HostCopies& copies, const Variable& x,
                               std::shared_ptr<KeptAttention> kept)
    : x_(x), kept_(std::move(kept)), stored_x_(copies.Store(x.value())) {
  if (kept_ == nullptr || kept_->out.null()) return;
  if (kept_->out.is_contiguous()) stored_out_ = copies.Store(kept_->out);
  for (const AttentionResult& result : kept_->results) {
    const Tensor& out = result.exchanged.out;
    const bool stores = !out.null() && out.is_contiguous();
    stored_exchanged_.push_back(stores ? copies.Store(out) : nullptr);
  }
}

void OffloadedLayer::Release() {
  x_.ForgetValue();
  stored_x_->Release();
  if (stored_out_ != nullptr) {
    kept_->out = Tensor();
    stored_out_->Release();
  }
  for (size_t i = 0; i < stored_exchanged_.size(); ++i) {
    if (stored_exchanged_[i] == nullptr) continue;
    kept_->results[i].exchanged.out = Tensor();
    stored_exchanged_[i]->Release();
  }
  released_ = true;
}

void OffloadedLayer::Fetch() {
  stored_x_->Fetch();
  if (stored_out_ != nullptr) stored_out_->Fetch();
  for (const auto& stored : stored_exchanged_) {
    if (stored != nullptr) stored->Fetch();
  }
}

void OffloadedLayer::Restore() {
  if (!released_) return;
  x_.SetValue(stored_x_->Take());
  if (stored_out_ != nullptr) kept_->out = stored_out_->Take();
  for (size_t i = 0; i < stored_exchanged_.size(); ++i) {
    if (stored_exchanged_[i] != nullptr)
      kept_->results[i].exchanged.out = stored_exchanged_[i]->Take();
  }
}

}  // namespace burst
