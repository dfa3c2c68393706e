#include "model/ops/rope.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "burst/base/parallel.h"
#include "model/ops/arrays.h"

namespace burst {
namespace {

// y1 = x1 cos - sign x2 sin, y2 = x2 cos + sign x1 sin, where x1, x2 are the halves of a head.
// sign = 1 rotates by the position's angle, sign = -1 back; heads behind the first `rotated` are
// copied. x, y: [tokens, heads, head_dim]
template <typename T>
void Rotate(const RopeTable& table, int64_t heads, int64_t rotated, T sign, const T* x, T* y) {
  const int64_t half = table.cos.dim(1);
  const int32_t* positions = table.positions.data<int32_t>();
  ParallelFor(table.positions.numel(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const auto cos = AsArray(table.cos.data<T>() + positions[t] * half, half);
      const auto sin = AsArray(table.sin.data<T>() + positions[t] * half, half) * sign;
      for (int64_t head = t * heads; head < t * heads + rotated; ++head) {
        const auto x1 = AsArray(x + head * 2 * half, half);
        const auto x2 = AsArray(x + head * 2 * half + half, half);
        AsArray(y + head * 2 * half, half) = x1 * cos - x2 * sin;
        AsArray(y + head * 2 * half + half, half) = x2 * cos + x1 * sin;
      }
      const int64_t rest = (t * heads + rotated) * 2 * half, size = (heads - rotated) * 2 * half;
      AsArray(y + rest, size) = AsArray(x + rest, size);
    }
  });
}

}  // namespace

std::shared_ptr<const RopeTable> MakeRopeTable(const Tensor& positions, int64_t head_dim,
                                               double theta, DType dtype) {
  const int64_t half = head_dim / 2, tokens = positions.numel();
  BURST_CHECK(head_dim % 2 == 0 && positions.is_contiguous());
  const int32_t* position = positions.data<int32_t>();
  std::vector<char> present;
  for (int64_t t = 0; t < tokens; ++t) {
    BURST_CHECK_GE(position[t], 0);
    if (position[t] >= static_cast<int64_t>(present.size())) present.resize(position[t] + 1);
    present[position[t]] = 1;
  }
  std::vector<double> frequency(half);
  for (int64_t i = 0; i < half; ++i) frequency[i] = std::pow(theta, -2.0 * i / head_dim);

  auto table = std::make_shared<RopeTable>();
  const int64_t rows = static_cast<int64_t>(present.size());
  table->positions = positions;
  table->cos = Tensor::Empty({rows, half}, dtype, positions.device());
  table->sin = Tensor::EmptyLike(table->cos);
  DispatchFloat(dtype, [&](auto zero) {
    using T = decltype(zero);
    ParallelFor(rows, 64, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (!present[row]) continue;
        for (int64_t i = 0; i < half; ++i) {
          table->cos.data<T>()[row * half + i] = static_cast<T>(std::cos(row * frequency[i]));
          table->sin.data<T>()[row * half + i] = static_cast<T>(std::sin(row * frequency[i]));
        }
      }
    });
  });
  return table;
}

Variable Rope(Tape& tape, const Variable& x, std::shared_ptr<const RopeTable> table,
              int64_t rotated_heads) {
  BURST_CHECK(x.value().is_contiguous() && x.value().ndim() == 4 &&
              x.value().dim(0) * x.value().dim(1) == table->positions.numel() &&
              x.value().dim(3) == 2 * table->cos.dim(1));
  const int64_t heads = x.value().dim(2), rotated = rotated_heads < 0 ? heads : rotated_heads;
  BURST_CHECK_LE(rotated, heads);
  const auto rotate = [table, heads, rotated](double sign, const Tensor& from) {
    const Tensor to = Tensor::EmptyLike(from);
    DispatchFloat(from.dtype(), [&](auto zero) {
      using T = decltype(zero);
      Rotate<T>(*table, heads, rotated, static_cast<T>(sign), from.data<T>(), to.data<T>());
    });
    return to;
  };
  const Variable y = tape.Output(rotate(1, x.value()), {x});
  // A rotation's transpose turns back.
  if (tape.NeedsGrad({x})) {
    tape.Record("rope", {y}, [=] { x.AddGrad(rotate(-1, y.grad().Contiguous())); });
  }
  return y;
}

}  // namespace burst
