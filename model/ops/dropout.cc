#include <algorithm>
#include <cmath>
#include <limits>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// The random words of channels 64 tile + [0, 64): channel 64 tile + 16 w + i takes word w of
// counter 16 tile + i, an order in which the loop vectorizes without shuffles.
constexpr int64_t kChannels = 64;
// These streams differ from each other and from other uses of the seed.
constexpr uint64_t kKeyStream = uint64_t{0xd} << 60, kAttentionStream = uint64_t{0xa} << 60;
void RandomWords(uint64_t key, uint32_t row, uint32_t position, uint32_t tile, uint32_t* words) {
  for (uint32_t i = 0; i < 16; ++i) {
    const PhiloxCounter random = Philox(key, PhiloxCounter{16 * tile + i, position, row, 0});
    for (int w = 0; w < 4; ++w) words[16 * w + i] = random[w];
  }
}

// Returns the key of a place in a forward pass, by the place's number.
uint64_t KeyOf(const DropoutKey& key, uint64_t place) {
  const PhiloxCounter mixed = Philox(key.seed, place, key.step);
  return uint64_t{mixed[0]} << 32 | mixed[1];
}

// The rate in effect is what the threshold gives.
DropoutMask MaskOf(const DropoutSite& site) {
  DropoutMask mask;
  mask.key = KeyOf(site.key, kKeyStream + site.site);
  mask.threshold = static_cast<uint32_t>(
      std::min<double>(std::round(site.rate * 0x1p32), std::numeric_limits<uint32_t>::max()));
  mask.scale = 1 / (1 - mask.threshold * 0x1p-32);
  mask.first_row = static_cast<uint32_t>(site.key.first_row);
  return mask;
}

// y = residual + mask x / (1 - rate). x, residual (may be null), y: [batch, length, width]
template <typename T>
void ApplyOnCpu(const DropoutMask& mask, const int32_t* positions, const Shape& shape, const T* x,
                const T* residual, T* y) {
  const int64_t length = shape[1], width = shape[2];
  const T scale = static_cast<T>(mask.scale);
  ParallelFor(shape[0] * length, 8, [&](int64_t begin, int64_t end) {
    uint32_t words[kChannels];
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t channel = 0; channel < width; channel += kChannels) {
        RandomWords(mask.key, mask.first_row + t / length, positions[t % length],
                    channel / kChannels, words);
        const int64_t offset = t * width + channel, size = std::min(kChannels, width - channel);
        for (int64_t i = 0; i < size; ++i) {
          const T kept = words[i] < mask.threshold ? T(0) : x[offset + i] * scale;
          y[offset + i] = residual == nullptr ? kept : residual[offset + i] + kept;
        }
      }
    }
  });
}

void Apply(const DropoutSite& site, const Tensor& x, const Tensor& residual, const Tensor& y) {
  const DropoutMask mask = MaskOf(site);
  if (x.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(DropoutApply, mask, site.positions, x, residual, y);
    return;
  }
  DispatchComputed(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    ApplyOnCpu<T>(mask, site.positions.data<int32_t>(), x.shape(), ReadAs<T>(x),
                  ReadAs<T>(residual), WriteAs<T>(y));
  });
}

}  // namespace

uint64_t AttentionDropoutSeed(const DropoutKey& key, int64_t layer) {
  return KeyOf(key, kAttentionStream + layer);
}

Variable Dropout(Tape& tape, const Variable& x, const DropoutSite& site, const Variable& residual) {
  if (!site.active()) return residual.defined() ? Add(tape, residual, x) : x;
  BURST_CHECK(x.value().ndim() == 3 && x.value().is_contiguous());
  BURST_CHECK(site.positions.numel() == x.value().dim(1) && site.positions.is_contiguous() &&
              site.positions.device() == x.value().device());
  if (residual.defined()) {
    BURST_CHECK(residual.shape() == x.shape() && residual.value().is_contiguous());
  }
  const Variable y = tape.Output(Tensor::EmptyLike(x.value()), {x, residual});
  Apply(site, x.value(), residual.defined() ? residual.value() : Tensor(), y.value());
  if (!tape.NeedsGrad({x, residual})) return y;

  // dx = mask dy / (1 - rate), dresidual = dy
  tape.Record("dropout", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    Apply(site, dy, Tensor(), dx);
    x.AddGrad(dx);
    if (residual.defined()) residual.AddGrad(dy);
  });
  return y;
}

}  // namespace burst
