#include <cub/device/device_radix_sort.cuh>

#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Sets y[t] = table[ids[t]] (+ position_table[positions[t]]). A thread takes the same N channels of
// kTokens tokens, whose rows it loads together.
constexpr int kTokens = 4;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    EmbeddingForwardKernel(int64_t tokens, int width, int table_rows,
                           const int32_t* __restrict__ ids, const T* __restrict__ table,
                           const int32_t* __restrict__ positions,
                           const T* __restrict__ position_table, T* __restrict__ y) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x, vecs = width / N;
  const int64_t token = index / vecs * int64_t{kTokens};
  const int channel = index % vecs * N;
  if (token >= tokens) return;

  int32_t id[kTokens], position[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int64_t at = min(token + t, tokens - 1);
    id[t] = ids[at];
    if (static_cast<uint32_t>(id[t]) >= static_cast<uint32_t>(table_rows)) __trap();
    position[t] = positions == nullptr ? 0 : positions[at];
  }
  Words<T, N> rows[kTokens], places[kTokens];
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    rows[t] = Load<N>(table + id[t] * int64_t{width} + channel);
    if (positions != nullptr) {
      places[t] = Load<N>(position_table + position[t] * int64_t{width} + channel);
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (token + t >= tokens) break;
    if (positions != nullptr) {
      Accumulator<T> sum[N];
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = rows[t][j] + places[t][j];
      rows[t] = ToWords<T, N>(sum);
    }
    Store(rows[t], y + (token + t) * width + channel);
  }
}

// --- The backward sorts the tokens by their id, keeping their order, and sums runs of one id. Runs
// differ in length by orders of magnitude, so the sorted tokens are cut into chunks. A run within a
// chunk is added to its row of the table. A run over several chunks leaves partial sums. A second
// kernel adds them up in order.

constexpr int kChunk = 32;  // tokens
constexpr int kChunkThreads = 128;

__global__ void IotaKernel(int n, int32_t* out) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < n) out[i] = i;
}

struct SortedTokens {
  int count = 0;
  const int32_t* ids = nullptr;     // [count], increasing
  const int32_t* tokens = nullptr;  // [count], increasing among equal ids
};

// Computes row[0...N) += sum. The gradient buffer may have another type than dy.
template <typename G, int N, typename A>
__device__ inline void AddToRow(G* row, const A* sum) {
  constexpr int M = N < kVecSize<G> ? N : kVecSize<G>;
#pragma unroll
  for (int i = 0; i < N; i += M) {
    const Words<G, M> before = Load<M>(row + i);
    A after[M];
#pragma unroll
    for (int j = 0; j < M; ++j) after[j] = before[j] + sum[i + j];
    StoreRounded<G, M>(after, row + i);
  }
}

// partials, [chunks, 2, width], has two sums of each chunk. The first is of the run of its first
// token, if that run leaves the chunk at either end. The second is of the run of its last token, if
// that is another run and goes on. blockIdx: (chunk, slice of the channels).
template <typename T, typename G, int N>
__global__ void __launch_bounds__(kChunkThreads)
    SumRunsKernel(SortedTokens sorted, int width, const T* __restrict__ dy, G* dtable,
                  Accumulator<T>* __restrict__ partials) {
  using A = Accumulator<T>;
  __shared__ int32_t ids[kChunk + 2], tokens[kChunk];  // ids with a neighbor on each side
  const int begin = blockIdx.x * kChunk, size = min(kChunk, sorted.count - begin);
  for (int i = threadIdx.x; i < size + 2; i += kChunkThreads) {
    const int at = begin + i - 1;
    ids[i] = at >= 0 && at < sorted.count ? sorted.ids[at] : -1;
    if (i < size) tokens[i] = sorted.tokens[begin + i];
  }
  __syncthreads();
  const int channel = (blockIdx.y * kChunkThreads + threadIdx.x) * N;
  if (channel >= width) return;

  A sum[N] = {};
  int run = 0;  // where the current run begins in this chunk
  for (int first = 0; first < size; first += kTokens) {
    Words<T, N> grads[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      grads[t] = Load<N>(dy + tokens[min(first + t, size - 1)] * int64_t{width} + channel);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int i = first + t;
      if (i >= size) break;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += grads[t][j];
      const int32_t id = ids[i + 1];
      if (i + 1 < size && ids[i + 2] == id) continue;  // the run goes on in this chunk
      const bool from_before = run == 0 && ids[0] == id;
      const bool goes_on = i + 1 == size && ids[i + 2] == id;
      if (from_before || goes_on) {
        const int64_t slot = int64_t{blockIdx.x} * 2 + (run == 0 ? 0 : 1);
        StoreNumbers<N>(sum, partials + slot * width + channel);
      } else {
        AddToRow<G, N>(dtable + id * int64_t{width} + channel, sum);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = 0;
      run = i + 1;
    }
  }
}

// Adds up the partials of a run over several chunks, in the block of the chunk where it begins.
template <typename T, typename G>
__global__ void __launch_bounds__(kChunkThreads)
    AddPartialsKernel(SortedTokens sorted, int width, G* dtable,
                      const Accumulator<T>* __restrict__ partials) {
  using A = Accumulator<T>;
  const int begin = blockIdx.x * kChunk, last = begin + kChunk - 1;
  if (last + 1 >= sorted.count) return;
  const int32_t id = sorted.ids[last];
  if (sorted.ids[last + 1] != id) return;  // no run goes on after this chunk
  const bool whole = sorted.ids[begin] == id;
  if (whole && begin > 0 && sorted.ids[begin - 1] == id) return;  // the run began earlier
  const int channel = blockIdx.y * kChunkThreads + threadIdx.x;
  if (channel >= width) return;
  A sum = partials[(int64_t{blockIdx.x} * 2 + (whole ? 0 : 1)) * width + channel];
  // Loads several partials at a time, so that a long run does not wait for memory at each chunk.
  constexpr int kBatch = 16;
  bool more = true;
  for (int64_t chunk = blockIdx.x + 1; more; chunk += kBatch) {
    A parts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t first = (chunk + i) * kChunk;
      more = first < sorted.count && sorted.ids[first] == id;
      parts[i] = more ? partials[(chunk + i) * 2 * width + channel] : A(0);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += parts[i];
  }
  G& element = dtable[id * int64_t{width} + channel];
  element = ConvertTo<G>(ConvertTo<A>(element) + sum);
}

// Sorts the tokens by id; ids are below `rows`. `memory` owns what SortedTokens points to.
SortedTokens SortTokens(const Tensor& ids, int64_t rows, Tensor* memory) {
  const int n = static_cast<int>(ids.numel());
  int bits = 1;
  while ((int64_t{1} << bits) < rows) ++bits;
  size_t work_bytes = 0;
  const auto sort = [&](void* work, const int32_t* order, int32_t* sorted, int32_t* tokens) {
    BURST_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(work, work_bytes, Data<int32_t>(ids), sorted,
                                                     order, tokens, n, 0, bits, CurrentStream()));
  };
  sort(nullptr, nullptr, nullptr, nullptr);
  // Three arrays of n, at multiples of 256 bytes, and the sort's own memory.
  const int64_t stride = (n + 63) / 64 * 64, work = static_cast<int64_t>(work_bytes + 3) / 4;
  *memory = Tensor::Empty({3 * stride + work}, DType::kInt32, DeviceType::kCuda);
  int32_t* const base = Data<int32_t>(*memory);
  IotaKernel<<<BlocksFor(n, kThreads), kThreads, 0, CurrentStream()>>>(n, base);
  BURST_CUDA_CHECK_LAUNCH("Iota");
  sort(base + 3 * stride, base, base + stride, base + 2 * stride);
  return {n, base + stride, base + 2 * stride};
}

}  // namespace

void EmbeddingForward(const Tensor& ids, const Tensor& table, const Tensor& positions,
                      const Tensor& position_table, const Tensor& y) {
  const int64_t width = table.dim(1);
  if (y.numel() == 0) return;
  const bool vectorized = FitsVectors(width, {table, position_table, y});
  DispatchVectors(y.dtype(), vectorized, [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    const int64_t tokens = ids.numel();
    const int64_t threads = (tokens + kTokens - 1) / kTokens * (width / N);
    EmbeddingForwardKernel<T, N><<<BlocksFor(threads, kThreads), kThreads, 0, CurrentStream()>>>(
        tokens, static_cast<int>(width), static_cast<int>(table.dim(0)), Data<int32_t>(ids),
        Data<T>(table), Data<int32_t>(positions), Data<T>(position_table), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("EmbeddingForward");
}

void EmbeddingBackward(const Tensor& ids, const Tensor& dy, const Tensor& dtable) {
  const int64_t width = dtable.dim(1), tokens = ids.numel();
  BURST_CHECK_LE(tokens, int64_t{1} << 30);
  if (dy.numel() == 0) return;
  Tensor memory;
  const SortedTokens sorted = SortTokens(ids, dtable.dim(0), &memory);
  const int64_t chunks = (tokens + kChunk - 1) / kChunk;
  DispatchVectors(dy.dtype(), FitsVectors(width, {dy, dtable}), [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    using A = Accumulator<T>;
    constexpr int N = decltype(vec_size)::value;
    const Tensor partials =
        Tensor::Empty({chunks, 2, width}, SumDType(dy.dtype()), DeviceType::kCuda);
    const auto grid = [&](int channels) {
      return dim3(static_cast<unsigned>(chunks), BlocksFor(width, channels));
    };
    DispatchGrad<T>(dtable.dtype(), [&](auto grad) {
      using G = decltype(grad);
      SumRunsKernel<T, G, N><<<grid(kChunkThreads * N), kChunkThreads, 0, CurrentStream()>>>(
          sorted, static_cast<int>(width), Data<T>(dy), Data<G>(dtable), Data<A>(partials));
      BURST_CUDA_CHECK_LAUNCH("EmbeddingBackward");
      AddPartialsKernel<T><<<grid(kChunkThreads), kChunkThreads, 0, CurrentStream()>>>(
          sorted, static_cast<int>(width), Data<G>(dtable), Data<A>(partials));
      BURST_CUDA_CHECK_LAUNCH("EmbeddingBackward");
    });
  });
}

}  // namespace cuda
}  // namespace burst
