#include "model/kv_cache.h"

#include <algorithm>
#include <numeric>

#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {

KvCache::KvCache(const ModelConfig& config, int64_t batch, DType dtype, int64_t window,
                 DeviceType device, Communicator* ranks)
    : batch_(batch),
      kv_heads_(config.WithDefaults().kv_heads),
      head_dim_(config.WithDefaults().head_dim),
      dtype_(dtype),
      device_(device),
      window_(window),
      softcap_(config.attention_softcap),
      ranks_(ranks),
      lengths_(ranks == nullptr ? 1 : ranks->world_size()),
      layers_(config.layers) {
  const Tensor empty = Tensor::Empty({batch_, 0, kv_heads_, head_dim_}, dtype_, device_);
  for (KeysAndValues& layer : layers_) layer = {empty, empty};
}

void KvCache::Clear() {
  length_ = 0;
  std::fill(lengths_.begin(), lengths_.end(), 0);
  positions_.clear();
}

void KvCache::Grow(Tensor* all, int64_t capacity) const {
  const Tensor larger = Tensor::Empty({batch_, capacity, kv_heads_, head_dim_}, dtype_, device_);
  const int64_t length = static_cast<int64_t>(positions_.size());
  larger.Slice(1, 0, length).CopyFrom(all->Slice(1, 0, length));
  *all = larger;
}

void KvCache::Reserve(int64_t tokens) {
  for (KeysAndValues& layer : layers_) {
    for (Tensor* all : {&layer.k, &layer.v}) {
      if (all->dim(1) < tokens) Grow(all, tokens);
    }
  }
}

bool KvCache::KeepsNext() const {
  const auto fewest = std::min_element(lengths_.begin(), lengths_.end());
  return fewest - lengths_.begin() == (ranks_ == nullptr ? 0 : ranks_->rank());
}

CachedAttention KvCache::AttentionOfNext(int64_t n, bool full) const {
  return CachedAttention(positions_, KeepsNext(), length_, n, full ? 0 : window_, softcap_, device_,
                         ranks_);
}

KvCache::KeysAndValues KvCache::Append(int64_t layer, const Tensor& k, const Tensor& v) {
  constexpr int64_t kMinCapacity = 64;
  const int64_t n = k.dim(1), before = static_cast<int64_t>(positions_.size()), after = before + n;
  const auto append = [&](Tensor& all, const Tensor& added) {
    BURST_CHECK(added.shape() == Shape({batch_, n, kv_heads_, head_dim_}));
    if (all.dim(1) < after) Grow(&all, std::max({kMinCapacity, 2 * all.dim(1), after}));
    all.Slice(1, before, n).CopyFrom(added);
    return all.Slice(1, 0, after);
  };
  KeysAndValues& stored = layers_[layer];
  return {append(stored.k, k), append(stored.v, v)};
}

void KvCache::Advance(int64_t n) {
  if (KeepsNext()) {
    positions_.resize(positions_.size() + n);
    std::iota(positions_.end() - n, positions_.end(), static_cast<int32_t>(length_));
  }
  *std::min_element(lengths_.begin(), lengths_.end()) += n;
  length_ += n;
}

absl::Status KvCache::Advance(const TokenShard& shard) {
  BURST_CHECK(length_ == 0 &&
              shard.num_groups() * shard.group().size == static_cast<int>(lengths_.size()));
  lengths_ = {shard.local_length()};
  if (ranks_ != nullptr) {
    BURST_ASSIGN_OR_RETURN(const std::vector<double> all,
                           ranks_->AllGather(static_cast<double>(shard.local_length())));
    lengths_.assign(all.begin(), all.end());
  }
  length_ = shard.seqlen();
  positions_ = shard.local_positions();
  return absl::OkStatus();
}

}  // namespace burst
