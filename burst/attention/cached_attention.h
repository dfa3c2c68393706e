// Attention of the newest tokens of a sequence to the keys and values of all tokens so far, as in
// generation. The ranks of a group may share these keys. Every rank has the same queries, attends
// to the keys that it has, and receives the other ranks' results. The parts are merged by their lse
// (as in Flash-Decoding, Dao et al., 2023, where thread blocks share the keys).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {

class CachedAttention {
 public:
  // For queries at the positions [begin, begin + n) of a sequence. `positions`: the positions below
  // `begin` whose keys this rank has, increasing. With `has_newest` it also has the keys of the n
  // newest tokens. `window`: a query sees keys less than `window` positions away; 0: all. `softcap`
  // of the scores (ScoreOptions). `ranks`: the ranks that share the keys; null: this rank has all.
  CachedAttention(const std::vector<int32_t>& positions, bool has_newest, int64_t begin, int64_t n,
                  int64_t window, double softcap, DeviceType device, Communicator* ranks);

  // q: [batch, n, heads, head_dim]; k, v: [batch, keys of this rank, kv_heads, head_dim or
  // value_dim], in order of position. The sinks are [heads] (FlashForwardParams::sinks) of any
  // floating dtype, or null. The result is [batch, n, heads, value_dim], contiguous. Collective
  // with `ranks`: every rank sends batch * n * heads * (value_dim + 1) numbers of SumDType(dtype)
  // to every other one. All get the same bits (GPUs of one model). InvalidArgument for tensors, or
  // a softcap, that no kernel serves.
  absl::StatusOr<Tensor> Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& sinks = Tensor()) const;

 private:
  const double softcap_;
  Communicator* const ranks_;
  Tensor visible_;  // [2, n]: begin and end of the keys that each query sees, on the device
};

}  // namespace burst
