#include <cstring>

#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// y[t] = table[ids[t]]. ids: [tokens], table: [rows, width], y: [tokens, width]
void EmbeddingForward(const Tensor& ids, const Tensor& table, const Tensor& y) {
  const int64_t row = table.dim(1) * SizeOf(table.dtype());
  const auto* id = ids.data<int32_t>();
  const auto* from = static_cast<const char*>(table.raw_data());
  auto* to = static_cast<char*>(y.raw_data());
  ParallelFor(ids.numel(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) std::memcpy(to + t * row, from + id[t] * row, row);
  });
}

// dtable[ids[t]] += dy[t]. Threads take ranges of channels, so that every sum runs over the tokens
// in order, whatever the number of threads.
template <typename T>
void EmbeddingBackward(int64_t tokens, int64_t width, const int32_t* ids, const T* dy, T* dtable) {
  ParallelFor(width, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < tokens; ++t) {
      AsArray(dtable + ids[t] * width + begin, end - begin) +=
          AsArray(dy + t * width + begin, end - begin);
    }
  });
}

// Both forms of the op on a GPU. Without positions, their tensor is null and their table undefined.
Variable EmbeddingOnGpu(Tape& tape, const Tensor& ids, const Variable& table,
                        const Tensor& positions, const Variable& position_table) {
  BURST_CHECK(ids.is_contiguous() && table.value().is_contiguous());
  if (position_table.defined()) {
    BURST_CHECK(positions.shape() == ids.shape() && positions.is_contiguous() &&
                position_table.value().dim(1) == table.value().dim(1));
  }
  Shape shape = ids.shape();
  shape.push_back(table.value().dim(1));
  const Variable y = tape.Output(
      Tensor::Empty(shape, table.value().dtype(), table.value().device()), {table, position_table});
  const Tensor places = position_table.defined() ? position_table.value() : Tensor();
  BURST_GPU_KERNEL(EmbeddingForward, ids, table.value(), positions, places, y.value());
  if (!tape.NeedsGrad({table, position_table})) return y;

  tape.Record("embedding", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    if (table.requires_grad()) {
      BURST_GPU_KERNEL(EmbeddingBackward, ids, dy, table.MutableGrad());
    }
    if (position_table.defined() && position_table.requires_grad()) {
      BURST_GPU_KERNEL(EmbeddingBackward, positions, dy, position_table.MutableGrad());
    }
  });
  return y;
}

}  // namespace

Variable Embedding(Tape& tape, const Tensor& ids, const Variable& table) {
  if (table.value().device() == DeviceType::kCuda) {
    return EmbeddingOnGpu(tape, ids, table, Tensor(), Variable());
  }
  const int64_t rows = table.value().dim(0), width = table.value().dim(1), tokens = ids.numel();
  BURST_CHECK(ids.is_contiguous());
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t id = ids.data<int32_t>()[t];
    BURST_CHECK(id >= 0 && id < rows) << "id " << id << " of a table of " << rows << " rows";
  }
  Shape shape = ids.shape();
  shape.push_back(width);
  const Variable y =
      tape.Output(Tensor::Empty(shape, table.value().dtype(), table.value().device()), {table});
  EmbeddingForward(ids, table.value(), y.value());
  if (!tape.NeedsGrad({table})) return y;

  tape.Record("embedding", {y}, [=] {
    const Tensor dy = y.grad().Contiguous();
    DispatchComputed(dy.dtype(), [&](auto zero) {
      using T = decltype(zero);
      EmbeddingBackward<T>(tokens, width, ids.data<int32_t>(), ReadAs<T>(dy),
                           UpdateAs<T>(table.MutableGrad()));
    });
  });
  return y;
}

Variable Embedding(Tape& tape, const Tensor& ids, const Variable& table, const Tensor& positions,
                   const Variable& position_table) {
  if (table.value().device() == DeviceType::kCuda) {
    return EmbeddingOnGpu(tape, ids, table, positions, position_table);
  }
  return Add(tape, Embedding(tape, ids, table), Embedding(tape, positions, position_table));
}

}  // namespace burst
