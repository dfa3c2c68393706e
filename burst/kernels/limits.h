// The widths of heads that the GPU's attention kernels serve, one row for each kind of input. All
// checks, and the simulated GPU, read these rows.
#pragma once

#include <cstdint>
#include <string>

namespace burst {

// The columns of a head: head_dim of q and k, value_dim of v and out. They differ in multi-head
// latent attention (DeepSeek-V2, arXiv 2405.04434).
struct HeadWidths {
  int64_t head_dim, value_dim;

  constexpr HeadWidths(int64_t head_dim, int64_t value_dim)
      : head_dim(head_dim), value_dim(value_dim) {}
  constexpr HeadWidths(int64_t both) : HeadWidths(both, both) {}  // NOLINT: most heads have one
  constexpr bool equal() const { return head_dim == value_dim; }
};

// Returns the widths as errors name them.
inline std::string ToString(const HeadWidths& widths) {
  const std::string text = "head_dim " + std::to_string(widths.head_dim);
  return widths.equal() ? text : text + " and value_dim " + std::to_string(widths.value_dim);
}

struct HeadDims {
  int64_t least, most, multiple;

  constexpr bool Has(int64_t head_dim) const {
    return least <= head_dim && head_dim <= most && head_dim % multiple == 0;
  }
};

inline constexpr HeadDims kWideHeadDims = {1, 256, 1};   // float32 and float64, both widths
inline constexpr HeadDims k16BitHeadDims = {8, 256, 8};  // bfloat16 and float16, one width
// bfloat16 and float16 where v has another width than q and k, by Hopper's kernels.
inline constexpr HeadDims kHeadDimsOfTwo = {8, 192, 8}, kValueDimsOfTwo = {8, 128, 8};
// Heads of 64 and less would gain little in fp8: exponentials take most of their time.
inline constexpr HeadDims kFp8HeadDims = {72, 128, 8};  // the forward in 8 bits, on Hopper GPUs

// Whether kernels of float32 and float64 serve these widths.
constexpr bool WideKernelsServe(const HeadWidths& widths) {
  return kWideHeadDims.Has(widths.head_dim) && kWideHeadDims.Has(widths.value_dim);
}
// Whether Hopper's kernels of 16 bits serve these widths.
constexpr bool HopperKernelsServe(const HeadWidths& widths) {
  if (widths.equal()) return k16BitHeadDims.Has(widths.head_dim);
  return kHeadDimsOfTwo.Has(widths.head_dim) && kValueDimsOfTwo.Has(widths.value_dim);
}
// Whether the forward in 8 bits serves these widths.
constexpr bool Fp8KernelsServe(const HeadWidths& widths) {
  return widths.equal() && kFp8HeadDims.Has(widths.head_dim);
}

}  // namespace burst
