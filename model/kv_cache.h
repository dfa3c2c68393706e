// The KV cache of a model that generates text: keys and values of all tokens so far, so that the
// next token costs the work of one token.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/tensor/tensor.h"
#include "model/config.h"

namespace burst {

class KvCache {
 public:
  // For `batch` sequences of one length. `window` is the attention window that the model was
  // trained with; 0: none.
  KvCache(const ModelConfig& config, int64_t batch, DType dtype, int64_t window = 0,
          DeviceType device = DeviceType::kCpu);

  int64_t batch() const { return batch_; }
  int64_t length() const { return length_; }  // tokens in the cache
  int64_t window() const { return window_; }
  void Clear() { length_ = 0; }

  // Used by Transformer::Decode. Append writes a layer's keys and values [batch, n, kv_heads,
  // head_dim] after the first length() tokens and returns all of them, [batch, length() + n,
  // kv_heads, head_dim]. Advance then adds n to length(), once for all layers.
  struct KeysAndValues {
    Tensor k, v;
  };
  KeysAndValues Append(int64_t layer, const Tensor& k, const Tensor& v);
  void Advance(int64_t n) { length_ += n; }

 private:
  const int64_t batch_;
  const int64_t kv_heads_;
  const int64_t head_dim_;
  const DType dtype_;
  const DeviceType device_;
  const int64_t window_;
  int64_t length_ = 0;
  std::vector<KeysAndValues> layers_;  // [batch, capacity, kv_heads, head_dim] each
};

}  // namespace burst
