#include "model/kv_cache.h"

#include <algorithm>

#include "burst/base/check.h"

namespace burst {

KvCache::KvCache(const ModelConfig& config, int64_t batch, DType dtype, int64_t window,
                 DeviceType device)
    : batch_(batch),
      kv_heads_(config.WithDefaults().kv_heads),
      head_dim_(config.WithDefaults().head_dim),
      dtype_(dtype),
      device_(device),
      window_(window),
      layers_(config.layers) {
  const Tensor empty = Tensor::Empty({batch_, 0, kv_heads_, head_dim_}, dtype_, device_);
  for (KeysAndValues& layer : layers_) layer = {empty, empty};
}

KvCache::KeysAndValues KvCache::Append(int64_t layer, const Tensor& k, const Tensor& v) {
  constexpr int64_t kMinCapacity = 64;
  const int64_t n = k.dim(1), length = length_ + n;
  const auto append = [&](Tensor& all, const Tensor& added) {
    BURST_CHECK(added.shape() == Shape({batch_, n, kv_heads_, head_dim_}));
    if (all.dim(1) < length) {
      const int64_t capacity = std::max({kMinCapacity, 2 * all.dim(1), length});
      const Tensor larger =
          Tensor::Empty({batch_, capacity, kv_heads_, head_dim_}, dtype_, device_);
      larger.Slice(1, 0, length_).CopyFrom(all.Slice(1, 0, length_));
      all = larger;
    }
    all.Slice(1, length_, n).CopyFrom(added);
    return all.Slice(1, 0, length);
  };
  KeysAndValues& stored = layers_[layer];
  return {append(stored.k, k), append(stored.v, v)};
}

}  // namespace burst
