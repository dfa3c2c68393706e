#include "burst/kernels/simulated_attention.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/device/simulated_gpu.h"
#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/limits.h"

namespace burst {
namespace {

// Constants measured on the GPU's kernels (benchmarks/results/attention_h200.json).
constexpr int64_t kTile = 128;  // queries or keys of a tile, which is computed as a whole
// The start and end of a tile of queries (forward) or keys (backward) take as long as this number
// of tiles.
constexpr double kForwardEnds = 0.7, kBackwardEnds = 2.2;
// The share of the rate that heads of at most 64 channels reach.
constexpr double kNarrowForward = 0.75, kNarrowBackward = 0.9;
// The gain of fp8, which doubles the rate of matrix products but not of exponentials.
constexpr double kFp8 = 1.1;

int64_t Tiles(int64_t n) { return (n + kTile - 1) / kTile; }

// Returns the pairs of a tile of queries and a tile of keys of which some see each other, over
// batch and heads.
double VisibleTilesOf(const FlashAttentionShape& s) {
  const int64_t all_heads = s.batch * s.num_heads;
  if (s.blocks.key_begin != nullptr) {
    static_assert(kTile == kListBlock, "");
    const int64_t rows = s.blocks.key_stride == 0 ? 1 : s.batch;
    const int32_t listed = s.blocks.key_begin[rows * (Tiles(s.q_len) + 1) - 1];
    return static_cast<double>(listed) * all_heads / rows;
  }
  if (s.visible.begin == nullptr) return 1.0 * all_heads * Tiles(s.q_len) * Tiles(s.k_len);
  const int64_t rows = s.visible.batch_stride == 0 ? 1 : s.batch;
  const std::optional<int64_t> counted = SimulatedGpu::Current()->Note(s.visible.begin);
  const int64_t tiles = counted ? *counted : VisibleTiles(s.visible, rows, s.q_len);
  return static_cast<double>(tiles) * all_heads / rows;
}

// What a kernel does over one of a head's widths.
struct Work {
  int products;       // matrix products for a pair of tiles
  int queries, keys;  // how often it reads or writes a tensor of all queries, of all keys
};

// Simulates a kernel, whose products have `rate` FLOP/s in 16 bits. `scores` is what it does over
// head_dim (q, k and their gradients), `values` over value_dim (v, out and their gradients).
void Run(const FlashAttentionShape& s, double tiles, double rate, const Work& scores,
         const Work& values) {
  SimulatedGpu& gpu = *SimulatedGpu::Current();
  double flops = 0, bytes = 0;
  const auto add = [&](const Work& work, int64_t columns) {
    flops += 2.0 * work.products * tiles * kTile * kTile * columns;
    bytes += 1.0 * s.batch * columns * SizeOf(s.dtype) *
             (work.queries * s.q_len * s.num_heads + work.keys * s.k_len * s.num_kv_heads);
  };
  add(scores, s.head_dim);
  add(values, s.value_dim);
  gpu.RunKernel(bytes, flops / (Is16Bit(s.dtype) ? rate : gpu.model().fp32));
}

bool IsNarrow(const FlashAttentionShape& s) { return s.head_dim <= 64; }

}  // namespace

int64_t VisibleTiles(const KeyRanges& ranges, int64_t rows, int64_t q_len) {
  int64_t tiles = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* const begins = ranges.begin + row * ranges.batch_stride;
    const int32_t* const ends = ranges.end + row * ranges.batch_stride;
    for (int64_t first = 0; first < q_len; first += kTile) {
      const int64_t last = std::min(first + kTile, q_len) - 1;
      if (begins[first] < ends[last]) tiles += Tiles(ends[last]) - begins[first] / kTile;
    }
  }
  return tiles;
}

absl::Status SimulatedAttentionKernels::Check(DeviceType device, DType dtype,
                                              const HeadWidths& widths) const {
  const bool served = Is16Bit(dtype) ? HopperKernelsServe(widths) : WideKernelsServe(widths);
  if (device == DeviceType::kCuda && served) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("no attention kernel for ", Name(dtype), " with ",
                                                 ToString(widths), " on a GPU"));
}

absl::Status SimulatedAttentionKernels::CheckFp8(DeviceType device, DType dtype,
                                                 const HeadWidths& widths) const {
  BURST_RETURN_IF_ERROR(Check(device, dtype, widths));
  if (Is16Bit(dtype) && Fp8KernelsServe(widths)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("no attention in fp8 for ", Name(dtype), " with ", ToString(widths)));
}

void SimulatedAttentionKernels::Forward(const FlashForwardParams& params) const {
  const FlashAttentionShape& s = params.shape;
  const double ends = kForwardEnds * s.batch * s.num_heads * Tiles(s.q_len);
  double rate = SimulatedGpu::Current()->model().attention_forward;
  Tensor operands;
  if (params.fp8) {  // as in gpu/flash_attention_gpu.cc
    const int64_t rows = s.q_len * s.num_heads + 2 * s.k_len * s.num_kv_heads;
    operands = Tensor::Empty({s.batch * rows * kTile / 4}, DType::kInt32, DeviceType::kCuda);
    rate *= kFp8;
    const double row_bytes = 1.0 * s.batch * s.head_dim * SizeOf(s.dtype);
    SimulatedGpu::Current()->RunKernel(1.5 * row_bytes * rows, 0);
  }
  // S = Q K^T, O = P V; a merge also reads O, in fp32.
  Run(s, VisibleTilesOf(s) + ends, IsNarrow(s) ? kNarrowForward * rate : rate,
      /*scores=*/{1, 1, 1}, /*values=*/{1, params.merge ? 3 : 1, 1});
}

void SimulatedAttentionKernels::Delta(const FlashDeltaParams& params) const {
  Run(params.shape, /*tiles=*/0, /*rate=*/1, /*scores=*/{0, 0, 0}, /*values=*/{0, 2, 0});
}

void SimulatedAttentionKernels::Backward(const FlashBackwardParams& params) const {
  const FlashAttentionShape& s = params.shape;
  // This is as in gpu/flash_attention_gpu.cc.
  Tensor dq;
  if (params.dq.assigned() && Is16Bit(s.dtype)) {
    dq = Tensor::Empty({s.batch, s.q_len, s.num_heads, s.head_dim}, DType::kFloat32,
                       DeviceType::kCuda);
  }
  Tensor sums;
  const int64_t floats = Is16Bit(s.dtype) ? sm90::HeadSplitsOf(params).sum_floats : 0;
  if (floats > 0) sums = Tensor::Empty({floats}, DType::kFloat32, DeviceType::kCuda);
  const double ends = kBackwardEnds * s.batch * s.num_heads * Tiles(s.k_len);
  const double rate = SimulatedGpu::Current()->model().attention_backward;
  // S, dQ and dK; dP and dV. Sums in fp32 are read and written.
  const int keys = params.dk.assigned() ? 2 : 5;
  Run(s, VisibleTilesOf(s) + ends, IsNarrow(s) ? kNarrowBackward * rate : rate,
      /*scores=*/{3, dq.null() ? 5 : 8, keys}, /*values=*/{2, 1, keys});
}

}  // namespace burst
