// The CPU's attention kernels: float32, float64, bfloat16 and float16, heads of any widths.
// Elements of 16 bits become float32 where a tile is copied into cache. Results are rounded once.
#pragma once

#include <atomic>
#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cpu {

// `tile_keys`: keys of a tile. 0: the kernel's own, 96 forward and 128 backward. *pairs grows by
// the pairs of query and key whose scores are computed. Null: they are not counted.
void Forward(const FlashForwardParams& params, int64_t tile_keys,
             std::atomic<int64_t>* pairs = nullptr);
void Delta(const FlashDeltaParams& params);
void Backward(const FlashBackwardParams& params, int64_t tile_keys,
              std::atomic<int64_t>* pairs = nullptr);

}  // namespace cpu

class CpuAttentionKernels : public AttentionKernels {
 public:
  absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const override;
  bool TakesBlocks(DType, const HeadWidths&) const override { return true; }
  bool ChangesScores(DType, const HeadWidths&) const override { return true; }
  bool ChangesScoresOfBlocks() const override { return true; }
  void Forward(const FlashForwardParams& params) const override { cpu::Forward(params, 0); }
  void Delta(const FlashDeltaParams& params) const override { cpu::Delta(params); }
  void Backward(const FlashBackwardParams& params) const override { cpu::Backward(params, 0); }
};

}  // namespace burst
