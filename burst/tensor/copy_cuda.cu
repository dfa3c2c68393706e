// Copies between tensors of any strides, many pairs in one kernel.
#include <algorithm>
#include <vector>

#include "burst/tensor/dispatch.cuh"
#include "burst/tensor/tensor_cuda.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWordsPerThread = 4;
constexpr uint32_t kWordsPerBlock = kThreads * kWordsPerThread;
constexpr int kMaxDims = 6;
constexpr int kMaxCopies = 24;  // Batch fits the 4 KiB of a kernel's arguments

// A copy, in words of 2, 4, 8 or 16 bytes.
struct Copy {
  const void* from;
  void* to;
  uint32_t words;
  uint32_t first_block;
  int word_bytes;
  int num_dims;
  uint32_t dims[kMaxDims];  // outermost first
  int64_t from_strides[kMaxDims], to_strides[kMaxDims];
};

struct Batch {
  int count;
  Copy copies[kMaxCopies];
};
static_assert(sizeof(Batch) <= 4096, "more than a kernel's arguments");

template <typename Word>
__device__ void CopyWords(const Copy& copy, uint32_t first) {
  Word words[kWordsPerThread];
  int64_t targets[kWordsPerThread];
#pragma unroll
  for (int w = 0; w < kWordsPerThread; ++w) {
    uint32_t rest = first + w * kThreads;
    if (rest >= copy.words) continue;
    int64_t from = 0, to = 0;
    for (int axis = copy.num_dims - 1; axis > 0; --axis) {
      const uint32_t outer = rest / copy.dims[axis], index = rest - outer * copy.dims[axis];
      from += index * copy.from_strides[axis];
      to += index * copy.to_strides[axis];
      rest = outer;
    }
    words[w] = static_cast<const Word*>(copy.from)[from + rest * copy.from_strides[0]];
    targets[w] = to + rest * copy.to_strides[0];
  }
#pragma unroll
  for (int w = 0; w < kWordsPerThread; ++w) {
    if (first + w * kThreads < copy.words) static_cast<Word*>(copy.to)[targets[w]] = words[w];
  }
}

__global__ __launch_bounds__(kThreads) void CopyKernel(const __grid_constant__ Batch batch) {
  int c = 0;
  while (c + 1 < batch.count && blockIdx.x >= batch.copies[c + 1].first_block) ++c;
  const Copy& copy = batch.copies[c];
  const uint32_t first = (blockIdx.x - copy.first_block) * kWordsPerBlock + threadIdx.x;
  switch (copy.word_bytes) {
    case 16:
      return CopyWords<uint4>(copy, first);
    case 8:
      return CopyWords<uint2>(copy, first);
    case 4:
      return CopyWords<uint32_t>(copy, first);
    default:
      return CopyWords<uint16_t>(copy, first);
  }
}

struct Dim {
  int64_t size, from, to;
};

// Returns the dimensions of a pair. Neighbors that are contiguous in both tensors become one.
std::vector<Dim> Dims(const TensorCopy& copy) {
  std::vector<Dim> dims;
  for (int64_t axis = 0; axis < copy.from.ndim(); ++axis) {
    const Dim dim = {copy.from.dim(axis), copy.from.stride(axis), copy.to.stride(axis)};
    if (dim.size == 1) continue;
    if (!dims.empty() && dims.back().from == dim.size * dim.from &&
        dims.back().to == dim.size * dim.to) {
      dims.back() = {dims.back().size * dim.size, dim.from, dim.to};
    } else {
      dims.push_back(dim);
    }
  }
  if (dims.empty()) dims.push_back({1, 1, 1});
  return dims;
}

// Returns the bytes of the widest words that both tensors' rows consist of, at least `element`.
int64_t WordBytes(const std::vector<Dim>& dims, int64_t element, const void* from, const void* to) {
  const auto fits = [&](int64_t bytes) {
    const int64_t factor = bytes / element;
    if (reinterpret_cast<uintptr_t>(from) % bytes != 0 ||
        reinterpret_cast<uintptr_t>(to) % bytes != 0 || dims.back().from != 1 ||
        dims.back().to != 1 || dims.back().size % factor != 0) {
      return false;
    }
    return std::all_of(dims.begin(), dims.end() - 1, [&](const Dim& dim) {
      return dim.from % factor == 0 && dim.to % factor == 0;
    });
  };
  int64_t bytes = 16;
  while (bytes > element && !fits(bytes)) bytes /= 2;
  return bytes;
}

class Copier {
 public:
  ~Copier() { Launch(); }

  void Add(const TensorCopy& copy) {
    if (copy.from.numel() == 0) return;
    std::vector<Dim> dims = Dims(copy);
    BURST_CHECK_LE(static_cast<int>(dims.size()), kMaxDims);
    const int64_t element = SizeOf(copy.from.dtype());
    const int64_t bytes = WordBytes(dims, element, copy.from.raw_data(), copy.to.raw_data());
    const int64_t factor = bytes / element, words = copy.from.numel() / factor;
    if (words >= int64_t{1} << 31) return AddHalves(copy);
    if (factor > 1) {
      for (Dim& dim : dims) dim = {dim.size, dim.from / factor, dim.to / factor};
      dims.back() = {dims.back().size / factor, 1, 1};
    }
    if (batch_.count == kMaxCopies) Launch();
    Copy& added = batch_.copies[batch_.count++];
    added.from = copy.from.raw_data();
    added.to = copy.to.raw_data();
    added.words = static_cast<uint32_t>(words);
    added.first_block = blocks_;
    added.word_bytes = static_cast<int>(bytes);
    added.num_dims = static_cast<int>(dims.size());
    for (size_t axis = 0; axis < dims.size(); ++axis) {
      added.dims[axis] = static_cast<uint32_t>(dims[axis].size);
      added.from_strides[axis] = dims[axis].from;
      added.to_strides[axis] = dims[axis].to;
    }
    blocks_ += (added.words + kWordsPerBlock - 1) / kWordsPerBlock;
  }

 private:
  // Splits a copy beyond 32-bit indices: halves the outermost dimension of more than one.
  void AddHalves(const TensorCopy& copy) {
    int64_t axis = 0;
    while (copy.from.dim(axis) == 1) ++axis;
    const int64_t size = copy.from.dim(axis), half = size / 2;
    Add({copy.from.Slice(axis, 0, half), copy.to.Slice(axis, 0, half)});
    Add({copy.from.Slice(axis, half, size - half), copy.to.Slice(axis, half, size - half)});
  }

  void Launch() {
    if (batch_.count == 0) return;
    CopyKernel<<<blocks_, kThreads, 0, CurrentStream()>>>(batch_);
    BURST_CUDA_CHECK_LAUNCH("Copy");
    batch_.count = 0;
    blocks_ = 0;
  }

  Batch batch_ = {};
  uint32_t blocks_ = 0;
};

}  // namespace

void CopyAll(absl::Span<const TensorCopy> copies) {
  if (copies.size() == 1 && copies[0].from.is_contiguous() && copies[0].to.is_contiguous()) {
    return CopyMemory(copies[0].to.raw_data(), DeviceType::kCuda, copies[0].from.raw_data(),
                      DeviceType::kCuda, copies[0].to.size_bytes());
  }
  Copier copier;
  for (const TensorCopy& copy : copies) copier.Add(copy);
}

}  // namespace cuda
}  // namespace burst
