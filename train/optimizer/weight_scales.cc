#include "train/optimizer/weight_scales.h"

#include <cstdint>
#include <vector>

#include "burst/base/status.h"
#include "burst/tensor/gpu_kernel.h"

namespace burst {
namespace {

Tensor Floats(int64_t count) { return Tensor::Empty({count}, DType::kFloat32, DeviceType::kCuda); }

}  // namespace

WeightScales::WeightScales(const ParameterList& parameters, Communicator* ranks)
    : parameters_(parameters),
      ranks_(ranks),
      own_(Floats(static_cast<int64_t>(parameters.float8_weights().size()))),
      of_ranks_(Floats(ranks->world_size() * own_.numel())),
      scales_(Floats(own_.numel() * cuda::kScaleRow)) {}

absl::Status WeightScales::Find() {
  int64_t slot = 0;
  for (const int weight : parameters_.float8_weights()) {
    BURST_GPU_KERNEL(LargestMagnitude, parameters_.OwnValue(weight), own_.Slice(0, slot++, 1));
  }
  const std::vector<int64_t> counts(ranks_->world_size(), own_.numel());
  BURST_RETURN_IF_ERROR(ranks_->PostAllGatherParts(own_, counts, of_ranks_));
  BURST_RETURN_IF_ERROR(ranks_->Wait(Channel::kCollective));
  BURST_GPU_KERNEL(ScalesOfRanks, of_ranks_, scales_);
  return absl::OkStatus();
}

}  // namespace burst
