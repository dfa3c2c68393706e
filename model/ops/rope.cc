#include <algorithm>
#include <cmath>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// y1 = x1 cos - sign x2 sin, y2 = x2 cos + sign x1 sin, where x1, x2 are the halves of the channels
// that turn. sign = 1 rotates by the position's angle, and sign = -1 rotates back. The channels
// behind them, and the heads after the first `rotated`, are copied. x, y: [tokens, heads, head_dim]
template <typename T>
void Rotate(const RopeTable& table, int64_t heads, int64_t head_dim, int64_t rotated, T sign,
            const T* x, T* y) {
  const int64_t half = table.cos.dim(1);
  const auto copy = [=](int64_t first, int64_t size) {
    AsArray(y + first, size) = AsArray(x + first, size);
  };
  ParallelFor(table.cos.dim(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto cos = AsArray(table.cos.data<T>() + t * half, half);
      const auto sin = AsArray(table.sin.data<T>() + t * half, half) * sign;
      for (int64_t head = t * heads; head < t * heads + rotated; ++head) {
        const int64_t first = head * head_dim, second = first + half;
        const auto x1 = AsArray(x + first, half), x2 = AsArray(x + second, half);
        AsArray(y + first, half) = x1 * cos - x2 * sin;
        AsArray(y + second, half) = x2 * cos + x1 * sin;
        copy(second + half, head_dim - 2 * half);
      }
      copy((t * heads + rotated) * head_dim, (heads - rotated) * head_dim);
    }
  });
}

// Computes the angles of every position once. Tokens that share a position copy them.
template <typename T>
void FillTable(const Tensor& positions, const RopeAngles& angles, const RopeTable& table) {
  const std::vector<double>& frequencies = angles.frequencies;
  const int64_t tokens = positions.numel(), half = static_cast<int64_t>(frequencies.size());
  const int32_t* position = positions.data<int32_t>();
  T* cos = table.cos.data<T>();
  T* sin = table.sin.data<T>();
  std::vector<int64_t> first;  // token at a position, or -1
  for (int64_t t = 0; t < tokens; ++t) {
    BURST_CHECK_GE(position[t], 0);
    if (position[t] >= static_cast<int64_t>(first.size())) first.resize(position[t] + 1, -1);
    if (first[position[t]] < 0) first[position[t]] = t;
  }
  const auto for_tokens = [&](auto&& body) {
    ParallelFor(tokens, 64, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) body(t, first[position[t]]);
    });
  };
  for_tokens([&](int64_t t, int64_t source) {
    if (t != source) return;
    for (int64_t i = 0; i < half; ++i) {
      const double angle = position[t] * frequencies[i];
      cos[t * half + i] = static_cast<T>(angles.amplitude * std::cos(angle));
      sin[t * half + i] = static_cast<T>(angles.amplitude * std::sin(angle));
    }
  });
  for_tokens([&](int64_t t, int64_t source) {
    if (t == source) return;
    std::copy_n(cos + source * half, half, cos + t * half);
    std::copy_n(sin + source * half, half, sin + t * half);
  });
}

}  // namespace

std::shared_ptr<const RopeTable> MakeRopeTable(const Tensor& positions, const RopeAngles& angles,
                                               DType dtype) {
  const int64_t half = static_cast<int64_t>(angles.frequencies.size());
  BURST_CHECK(positions.is_contiguous());
  auto table = std::make_shared<RopeTable>();
  table->cos = Tensor::Empty({positions.numel(), half}, SumDType(dtype), positions.device());
  table->sin = Tensor::EmptyLike(table->cos);
  if (positions.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(RopeCosSin, positions, angles.frequencies, angles.amplitude, table->cos,
                     table->sin);
  } else {
    DispatchFloat(table->cos.dtype(),
                  [&](auto zero) { FillTable<decltype(zero)>(positions, angles, *table); });
  }
  return table;
}

Variable Rope(Tape& tape, const Variable& x, std::shared_ptr<const RopeTable> table,
              int64_t rotated_heads, LinearPrecision maker) {
  BURST_CHECK(x.value().is_contiguous() && x.value().ndim() == 4 &&
              x.value().dim(0) * x.value().dim(1) == table->cos.dim(0) &&
              x.value().dim(3) % 2 == 0 && x.value().dim(3) >= 2 * table->cos.dim(1));
  const int64_t heads = x.value().dim(2), rotated = rotated_heads < 0 ? heads : rotated_heads;
  BURST_CHECK_LE(rotated, heads);
  const auto rotate = [table, rotated](double sign, const Tensor& from, const Tensor& amax) {
    const Tensor to = Tensor::EmptyLike(from);
    if (from.device() == DeviceType::kCuda) {
      BURST_GPU_KERNEL(RopeRotate, from, table->cos, table->sin, rotated, sign, to, amax);
      return to;
    }
    DispatchComputed(from.dtype(), [&](auto zero) {
      using T = decltype(zero);
      Rotate<T>(*table, from.dim(2), from.dim(3), rotated, static_cast<T>(sign), ReadAs<T>(from),
                WriteAs<T>(to));
    });
    return to;
  };
  const Variable y = tape.Output(rotate(1, x.value(), Tensor()), {x});
  // The gradient applies the transpose: it rotates back, with the same scale.
  if (tape.NeedsGrad({x})) {
    tape.Record("rope", {y}, [=] {
      const Tensor amax = maker == LinearPrecision::kFloat8
                              ? Tensor::Empty({1}, DType::kFloat32, x.value().device())
                              : Tensor();
      x.AddGrad(rotate(-1, y.grad().Contiguous(), amax), amax);
    });
  }
  return y;
}

}  // namespace burst
