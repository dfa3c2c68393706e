#include "burst/base/parallel.h"
#include "burst/kernels/cpu/tile.h"
#include "burst/kernels/cpu/vector.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cpu {
namespace {

constexpr int64_t kGrain = 256;  // rows a thread takes at least

template <typename T>
T Dot(int64_t n, const T* a, const T* b) {
  Vec<T> sums = {};
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) sums += Load(a + i) * Load(b + i);
  T sum = HorizontalSum<T>(sums);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// delta = rowsum(dO * O) - dlse
template <typename T>
void Delta(const FlashDeltaParams& params) {
  const FlashAttentionShape& shape = params.shape;
  const T* dlse = static_cast<const T*>(params.dlse);
  T* delta = static_cast<T*>(params.delta);
  ParallelFor(shape.batch * shape.num_heads * shape.q_len, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t i = index % shape.q_len;
      const int64_t h = index / shape.q_len % shape.num_heads;
      const int64_t b = index / shape.q_len / shape.num_heads;
      const T* out = Head<T>(params.out, b, h).row(i);
      const T* dout = Head<T>(params.dout, b, h).row(i);
      delta[index] = Dot(shape.head_dim, out, dout) - (dlse == nullptr ? T{0} : dlse[index]);
    }
  });
}

}  // namespace
}  // namespace cpu

void FlashDeltaCpu(const FlashDeltaParams& params) {
  DispatchFloat(params.shape.dtype, [&](auto zero) { cpu::Delta<decltype(zero)>(params); });
}

}  // namespace burst
