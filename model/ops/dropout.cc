#include "model/ops/dropout.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "model/ops/add.h"

namespace burst {
namespace {

// The random words of channels 64 tile + [0, 64): channel 64 tile + 16 w + i takes word w of
// counter 16 tile + i, an order in which the loop vectorises without shuffles.
constexpr int64_t kChannels = 64;
constexpr uint64_t kKeyStream = uint64_t{0xd} << 60;  // apart from other uses of the seed
void RandomWords(uint64_t key, uint32_t row, uint32_t position, uint32_t tile, uint32_t* words) {
  for (uint32_t i = 0; i < 16; ++i) {
    const PhiloxCounter random = Philox(key, PhiloxCounter{16 * tile + i, position, row, 0});
    for (int w = 0; w < 4; ++w) words[16 * w + i] = random[w];
  }
}

// y = residual + mask x / (1 - rate). x, residual (may be null), y: [batch, length, width]
template <typename T>
void ApplyDropout(const DropoutSite& site, const Shape& shape, const T* x, const T* residual,
                  T* y) {
  const int64_t length = shape[1], width = shape[2];
  const PhiloxCounter mixed = Philox(site.key.seed, kKeyStream + site.site, site.key.step);
  const uint64_t key = uint64_t{mixed[0]} << 32 | mixed[1];
  // Dropped when the word is below; the rate in effect is the threshold's.
  const auto threshold = static_cast<uint32_t>(
      std::min<double>(std::round(site.rate * 0x1p32), std::numeric_limits<uint32_t>::max()));
  const T scale = static_cast<T>(1 / (1 - threshold * 0x1p-32));
  ParallelFor(shape[0] * length, 8, [&](int64_t begin, int64_t end) {
    uint32_t words[kChannels];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t channel = 0; channel < width; channel += kChannels) {
        RandomWords(key, t / length, (*site.positions)[t % length], channel / kChannels, words);
        const int64_t offset = t * width + channel, size = std::min(kChannels, width - channel);
        for (int64_t i = 0; i < size; ++i) {
          const T kept = words[i] < threshold ? T(0) : x[offset + i] * scale;
          y[offset + i] = residual == nullptr ? kept : residual[offset + i] + kept;
        }
      }
    }
  });
}

}  // namespace

Variable Dropout(Tape& tape, const Variable& x, const DropoutSite& site, const Variable& residual) {
  if (!site.active()) return residual.defined() ? Add(tape, residual, x) : x;
  BURST_CHECK(x.value().ndim() == 3 && x.value().is_contiguous());
  BURST_CHECK_EQ(static_cast<int64_t>(site.positions->size()), x.value().dim(1));
  if (residual.defined()) {
    BURST_CHECK(residual.shape() == x.shape() && residual.value().is_contiguous());
  }
  const Variable y = tape.Output(Tensor::EmptyLike(x.value()), {x, residual});
  DispatchFloat(x.value().dtype(), [&](auto zero) {
    using T = decltype(zero);
    ApplyDropout<T>(site, x.shape(), x.value().data<T>(),
                    residual.defined() ? residual.value().data<T>() : nullptr, y.value().data<T>());
  });
  if (!tape.NeedsGrad({x, residual})) return y;

  // dx = mask dy / (1 - rate), dresidual = dy
  tape.Record("dropout", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    DispatchFloat(dy.dtype(), [&](auto zero) {
      using T = decltype(zero);
      ApplyDropout<T>(site, dy.shape(), dy.data<T>(), nullptr, dx.data<T>());
    });
    x.AddGrad(dx);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

}  // namespace burst
