#include <map>
#include <mutex>

#include "absl/status/status.h"
#include "benchmarks/study/study.h"
#include "burst/base/check.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"

namespace burst {
namespace {

class Tiled : public AttentionKernels {
 public:
  explicit Tiled(int64_t tile_keys) : tile_keys_(tile_keys) { BURST_CHECK_GT(tile_keys, 0); }
  absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const override {
    if (device != DeviceType::kCpu) {
      return absl::InvalidArgumentError(
          "a choice is there on the CPU only; GPU kernels are compiled for their tiles: in "
          "bfloat16 of 128, 176 or 192 keys on Hopper and of 64 or 128 elsewhere, in float32 of 32 "
          "or 64, in float64 of 16 or 32");
    }
    return KernelsOf(device).Check(device, dtype, widths);
  }
  bool TakesBlocks(DType, const HeadWidths&) const override { return true; }
  void Forward(const FlashForwardParams& params) const override {
    cpu::Forward(params, tile_keys_);
  }
  void Delta(const FlashDeltaParams& params) const override { cpu::Delta(params); }
  void Backward(const FlashBackwardParams& params) const override {
    cpu::Backward(params, tile_keys_);
  }

 private:
  const int64_t tile_keys_;
};

}  // namespace

// Returns the object of a size, which is kept until the program ends.
const AttentionKernels& TiledKernels(int64_t tile_keys) {
  static std::mutex mutex;
  static auto& by_size = *new std::map<int64_t, Tiled>();
  const std::lock_guard<std::mutex> lock(mutex);
  return by_size.try_emplace(tile_keys, tile_keys).first->second;
}

}  // namespace burst
