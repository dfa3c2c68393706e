#include "train/optimizer/weight_amax.h"

#include <vector>

#include "burst/base/status.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/float8_weights.h"

namespace burst {

WeightAmax::WeightAmax(ParameterList* parameters, Communicator* ranks)
    : parameters_(*parameters), ranks_(ranks) {
  const auto count = static_cast<int64_t>(parameters->float8_weights().size());
  const auto floats = [](int64_t n) {
    return Tensor::Empty({n}, DType::kFloat32, DeviceType::kCuda);
  };
  own_ = floats(count);
  if (ranks == nullptr) return;
  of_ranks_ = floats(ranks->world_size() * count);
  amax_ = floats(count);
  scales_ = floats(count);
}

absl::Status WeightAmax::Find() {
  int64_t slot = 0;
  for (const int weight : parameters_.float8_weights()) {
    BURST_GPU_KERNEL(LargestMagnitude, parameters_.OwnValue(weight), own_.Slice(0, slot++, 1));
  }
  return Exchange();
}

absl::Status WeightAmax::Exchange() {
  if (ranks_ == nullptr) {
    parameters_.SetAmax(own_);
    return absl::OkStatus();
  }
  const std::vector<int64_t> counts(ranks_->world_size(), own_.numel());
  BURST_RETURN_IF_ERROR(ranks_->PostAllGatherParts(own_, counts, of_ranks_));
  BURST_RETURN_IF_ERROR(ranks_->Wait(Channel::kCollective));
  BURST_GPU_KERNEL(LargestOfRanks, of_ranks_, amax_, scales_);
  parameters_.SetAmax(amax_);
  return absl::OkStatus();
}

}  // namespace burst
