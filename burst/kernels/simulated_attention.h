// Attention on a simulated GPU (burst/device/simulated_gpu.h): the scratch memory of the GPU's
// kernels (gpu/flash_attention_gpu.cc), and the time of the visible pairs.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {

// Returns the pairs of kListBlock queries and kListBlock keys of which some see each other, over
// `rows` batch rows of `q_len` queries. The ranges are in the host's memory. Ranges on a simulated
// GPU may have this number as their note, and nothing else (SimulatedGpu::SetNote).
int64_t VisibleTiles(const KeyRanges& ranges, int64_t rows, int64_t q_len);

class SimulatedAttentionKernels : public AttentionKernels {
 public:
  absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const override;
  bool TakesBlocks(DType dtype, const HeadWidths&) const override { return Is16Bit(dtype); }
  // In the time of calls that do not.
  bool ChangesScores(DType dtype, const HeadWidths& widths) const override {
    return !Is16Bit(dtype) || widths.equal();
  }
  absl::Status CheckFp8(DeviceType device, DType dtype, const HeadWidths& widths) const override;
  void Forward(const FlashForwardParams& params) const override;
  void Delta(const FlashDeltaParams& params) const override;
  void Backward(const FlashBackwardParams& params) const override;
};

}  // namespace burst
