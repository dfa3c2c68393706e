// The KV cache of a model that generates text. It holds keys and values of all tokens so far, so
// the next token costs the work of one token. Ranks may share it: each token's keys and values are
// on exactly one rank.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/attention/cached_attention.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"

namespace burst {

class KvCache {
 public:
  // For `batch` sequences of one length. `window` is the attention window that the model was
  // trained with; 0: none. `ranks`: the communicator of the ranks that share the cache; it must
  // outlive the cache. Null: no other rank.
  KvCache(const ModelConfig& config, int64_t batch, DType dtype, int64_t window = 0,
          DeviceType device = DeviceType::kCpu, Communicator* ranks = nullptr);

  int64_t batch() const { return batch_; }
  int64_t length() const { return length_; }  // tokens in the cache, of all ranks
  int64_t window() const { return window_; }
  void Clear();

  // Memory for `tokens` of this rank, so that it does not grow before there are more of them.
  void Reserve(int64_t tokens);

  // ---- Used by Transformer.

  // Whether this rank keeps the tokens that come next: it is the first one of those that have the
  // fewest.
  bool KeepsNext() const;
  // Attention of the n tokens that come next, in the model's full_layers or in the others; before
  // Advance.
  CachedAttention AttentionOfNext(int64_t n, bool full) const;

  struct KeysAndValues {
    Tensor k, v;  // [batch, tokens of this rank, kv_heads, head_dim]
  };
  // Writes a layer's keys and values [batch, n, kv_heads, head_dim] after those of this rank's
  // tokens and returns all of them. n = 0: only returns them.
  KeysAndValues Append(int64_t layer, const Tensor& k, const Tensor& v);
  // Counts the n tokens that every layer was given, on the rank that KeepsNext; on all ranks alike.
  void Advance(int64_t n);
  // Advances an empty cache by a whole sequence, of which every rank keeps its tokens. Collective.
  absl::Status Advance(const TokenShard& shard);

 private:
  void Grow(Tensor* all, int64_t capacity) const;

  const int64_t batch_;
  const int64_t kv_heads_;
  const int64_t head_dim_;
  const DType dtype_;
  const DeviceType device_;
  const int64_t window_;
  const double softcap_;
  Communicator* const ranks_;
  int64_t length_ = 0;
  std::vector<int64_t> lengths_;       // tokens of every rank
  std::vector<int32_t> positions_;     // this rank's tokens' positions, increasing
  std::vector<KeysAndValues> layers_;  // [batch, capacity, kv_heads, head_dim] each
};

}  // namespace burst
