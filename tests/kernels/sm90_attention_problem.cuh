// Makes the problems for tests of the Hopper kernels: device buffers, masks and inputs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <utility>
#include <vector>

#include "burst/kernels/flash_attention.h"
#include "tests/kernels/sm90_attention_reference.cuh"

namespace burst {
namespace sm90 {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) : size_(size) {
    if (size > 0 && cudaMalloc(&data_, size * sizeof(T)) != cudaSuccess) std::abort();
    Fill(0xFF);  // NaN in every format
  }
  explicit Buffer(const std::vector<T>& host) : Buffer(static_cast<int64_t>(host.size())) {
    cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~Buffer() { cudaFree(data_); }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  void Fill(int byte) { cudaMemset(data_, byte, size_ * sizeof(T)); }
  std::vector<T> ToHost() const {
    std::vector<T> host(size_);
    cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost);
    return host;
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

inline unsigned Grid(int64_t items) {
  return static_cast<unsigned>(std::max<int64_t>(1, (items + 63) / 64));
}

struct Mask {
  std::vector<int32_t> begin, end;  // [batch or 1, q_len]; empty: every key
};

inline Mask Causal(int64_t q_len, int64_t k_len) {
  Mask mask;
  for (int64_t i = 0; i < q_len; ++i) {
    mask.begin.push_back(0);
    mask.end.push_back(static_cast<int32_t>(std::max<int64_t>(0, i + 1 + k_len - q_len)));
  }
  return mask;
}

inline Mask Window(int64_t q_len, int64_t k_len, int64_t size) {
  Mask mask = Causal(q_len, k_len);
  for (int64_t i = 0; i < q_len; ++i) {
    mask.begin[i] = static_cast<int32_t>(std::max<int64_t>(0, mask.end[i] - size));
  }
  return mask;
}

inline Mask Documents(const std::vector<int>& lengths) {
  Mask mask;
  int start = 0;
  for (int length : lengths) {
    for (int i = 0; i < length; ++i) {
      mask.begin.push_back(start);
      mask.end.push_back(start + i + 1);
    }
    start += length;
  }
  return mask;
}

// Makes a random mask: any two non-decreasing sequences are one. Some rows see nothing, and some
// ends lie beyond k_len.
inline Mask RandomRanges(int64_t batch, int64_t q_len, int64_t k_len, uint32_t seed) {
  std::mt19937 random(seed);
  Mask mask;
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<int32_t> begin(q_len), end(q_len);
    for (int32_t& x : begin) x = static_cast<int32_t>(random() % (k_len + 1));
    for (int32_t& x : end) x = static_cast<int32_t>(random() % (k_len + 30));
    std::sort(begin.begin(), begin.end());
    std::sort(end.begin(), end.end());
    mask.begin.insert(mask.begin.end(), begin.begin(), begin.end());
    mask.end.insert(mask.end.end(), end.begin(), end.end());
  }
  return mask;
}

// Returns a packed operand [batch, seqlen, num_heads, head_dim + padding].
inline AttentionOperand Packed(void* data, int64_t seqlen, int64_t heads, int64_t row) {
  return {data, seqlen * heads * row, heads * row, row};
}

// One problem: inputs, our results, the truth and the yardstick.
struct Problem {
  Problem(int64_t batch, int64_t q_len, int64_t k_len, int64_t heads, int64_t kv_heads,
          int64_t head_dim, const Mask& mask = {}, int64_t padding = 0)
      : begin(mask.begin), end(mask.end) {
    shape.batch = batch;
    shape.q_len = q_len;
    shape.k_len = k_len;
    shape.num_heads = heads;
    shape.num_kv_heads = kv_heads;
    shape.head_dim = shape.value_dim = head_dim;
    shape.softmax_scale = 1 / std::sqrt(static_cast<float>(head_dim));
    shape.dtype = DType::kBFloat16;
    if (!mask.begin.empty()) {
      shape.visible.begin = begin.data();
      shape.visible.end = end.data();
      shape.visible.batch_stride = static_cast<int64_t>(mask.begin.size()) > q_len ? q_len : 0;
    }
    const int64_t row = head_dim + padding;
    q_data = Randn(batch * q_len * heads * row, 1);
    k_data = Randn(batch * k_len * kv_heads * row, 2);
    v_data = Randn(batch * k_len * kv_heads * row, 3);
    dout_data = Randn(batch * q_len * heads * row, 4);
    q = Packed(q_data.data(), q_len, heads, row);
    k = Packed(k_data.data(), k_len, kv_heads, row);
    v = Packed(v_data.data(), k_len, kv_heads, row);
    dout = Packed(dout_data.data(), q_len, heads, row);
    lse = Buffer<float>(batch * heads * q_len);
    delta = Buffer<float>(batch * heads * q_len);
  }

  static Buffer<bf16> Randn(int64_t size, uint32_t seed) {
    Buffer<bf16> data(size);
    if (size > 0) FillRandn<<<1024, 256>>>(data.data(), size, 3.0f, seed);
    return data;
  }

  int64_t QSize() const { return shape.batch * shape.q_len * shape.num_heads * shape.head_dim; }
  int64_t KSize() const { return shape.batch * shape.k_len * shape.num_kv_heads * shape.head_dim; }
  AttentionOperand LikeQ(void* data) const {
    return Packed(data, shape.q_len, shape.num_heads, shape.head_dim);
  }
  AttentionOperand LikeK(void* data) const {
    return Packed(data, shape.k_len, shape.num_kv_heads, shape.head_dim);
  }

  FlashAttentionShape shape;
  Buffer<int32_t> begin, end;
  Buffer<bf16> q_data, k_data, v_data, dout_data;
  AttentionOperand q, k, v, dout;
  Buffer<float> lse, delta;
};

}  // namespace sm90
}  // namespace burst
