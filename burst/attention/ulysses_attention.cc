#include "burst/attention/ulysses_attention.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/attention/check_tensors.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

using Tensors = absl::InlinedVector<Tensor, 3>;

HeadExchange::HeadTensor Heads(const Tensor& tensor) { return {tensor, 1, 2}; }     // [B, l, H, D]
HeadExchange::HeadTensor LseHeads(const Tensor& tensor) { return {tensor, 2, 1}; }  // [B, H, l]

bool HeadsDivide(int64_t num_heads, int64_t num_kv_heads, int64_t size) {
  return num_heads % size == 0 && (num_kv_heads % size == 0 || size % num_kv_heads == 0);
}

// Checks that the tensors have all heads of this rank's tokens, and that groups of `size` ranks can
// divide the heads.
absl::Status CheckInputs(const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                         const Tensor& v, int size) {
  BURST_RETURN_IF_ERROR(CheckAttentionInputs(q, k, v));
  BURST_RETURN_IF_ERROR(CheckFitsSchedule(q, k, schedule.shard().local_length(),
                                          schedule.key_shard().local_length(), /*rows=*/1));
  return CheckHeadsDivide(q.dim(2), k.dim(2), size);
}

}  // namespace

absl::Status CheckHeadsDivide(int64_t num_heads, int64_t num_kv_heads, int size) {
  if (HeadsDivide(num_heads, num_kv_heads, size)) return absl::OkStatus();
  std::vector<int64_t> valid;
  for (int64_t other = 1; other <= num_heads; ++other) {
    if (HeadsDivide(num_heads, num_kv_heads, other)) valid.push_back(other);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(num_heads, " heads (", num_kv_heads, " KV heads) cannot be shared by groups of ",
                   size, " ranks; ", absl::StrJoin(valid, ", "), " would do"));
}

absl::StatusOr<std::unique_ptr<UlyssesAttention>> UlyssesAttention::Create(
    const BurstAttentionOptions& options, int size, Communicator* comm) {
  return CreateOver(options, size, std::make_shared<AttentionRanks>(comm));
}

absl::StatusOr<std::unique_ptr<UlyssesAttention>> UlyssesAttention::CreateOver(
    const BurstAttentionOptions& options, int size, std::shared_ptr<AttentionRanks> ranks) {
  if (size < 1 || ranks->size() % size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("groups of ", size, " ranks do not divide ", ranks->size(), " ranks"));
  }
  const int per_node = options.ranks_per_node;
  if (per_node < 0 || (per_node > 0 && ranks->size() % per_node != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks_per_node: ", per_node, " does not divide ", ranks->size(), " ranks"));
  }
  if (per_node % size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("ranks_per_node: a node of ", per_node,
                                                   " ranks does not hold whole groups of ", size));
  }
  std::unique_ptr<UlyssesAttention> attention(new UlyssesAttention);
  BURST_ASSIGN_OR_RETURN(const AttentionRanks::Groups* const groups, ranks->GroupsOf(size));
  attention->group_ = groups->within.get();
  attention->exchange_ = std::make_unique<HeadExchange>(attention->group_);
  BurstAttentionOptions of_ring = options;
  of_ring.ranks_per_node /= size;
  BURST_ASSIGN_OR_RETURN(
      attention->attention_,
      BurstAttention::CreateOver(of_ring, groups->ring, {size, attention->group_->rank()}));
  attention->ranks_ = std::move(ranks);
  return attention;
}

absl::Status UlyssesAttention::CheckSchedule(const AttentionSchedule& schedule) const {
  const RankGroup& group = schedule.shard().group();
  if (group.size == group_->world_size() && group.group_rank == group_->rank()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("the schedule is for rank ", group.group_rank,
                                                 " of groups of ", group.size, ", this is rank ",
                                                 group_->rank(), " of ", group_->world_size()));
}

// Queries and keys of two sequences take two exchanges.
absl::Status UlyssesAttention::GatherHeads(const AttentionSchedule& schedule, const Tensor& q,
                                           const Tensor& k, const Tensor& v, Tensors* qkv) {
  if (!schedule.is_cross()) {
    return exchange_->Gather(schedule.shard(), {Heads(q), Heads(k), Heads(v)}, qkv,
                             &stats_.forward);
  }
  Tensors kv;
  BURST_RETURN_IF_ERROR(exchange_->Gather(schedule.shard(), {Heads(q)}, qkv, &stats_.forward));
  BURST_RETURN_IF_ERROR(
      exchange_->Gather(schedule.key_shard(), {Heads(k), Heads(v)}, &kv, &stats_.forward));
  qkv->insert(qkv->end(), kv.begin(), kv.end());
  return absl::OkStatus();
}

// Exchanges q, k, v: this rank's tokens and all heads -> the group's tokens and this rank's heads.
// Then attention runs over the ring, and out and lse take the same exchange back.
absl::Status UlyssesAttention::Forward(const AttentionSchedule& schedule, const Tensor& q,
                                       const Tensor& k, const Tensor& v, Tensor* out, Tensor* lse,
                                       Saved* saved) {
  BURST_RETURN_IF_ERROR(CheckSchedule(schedule));
  attention_->SetDropout(dropout());
  if (group_->world_size() == 1) {
    attention_->SetSinks(sinks());
    const absl::Status status = attention_->Forward(schedule, q, k, v, out, lse, saved);
    max_logits_ = attention_->max_logits();
    return status;
  }
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, k, v, group_->world_size()));
  BURST_RETURN_IF_ERROR(CheckSinks(sinks(), q));
  attention_->SetSinks(OwnHeads(sinks()));
  BURST_RETURN_IF_ERROR(EnsureOutput("out", q.shape(), q.dtype(), q.device(), out));
  if (lse != nullptr) {
    BURST_RETURN_IF_ERROR(EnsureOutput("lse", LseShape(q), SumDType(q.dtype()), q.device(), lse));
  }

  Tensors qkv;
  BURST_RETURN_IF_ERROR(GatherHeads(schedule, q, k, v, &qkv));
  Tensor heads_out, heads_lse;
  BURST_RETURN_IF_ERROR(
      attention_->Forward(schedule, qkv[0], qkv[1], qkv[2], &heads_out, &heads_lse));
  Tensors results = {heads_out};
  HeadExchange::HeadTensors own = {Heads(*out)};
  if (lse != nullptr) {
    results.push_back(heads_lse);
    own.push_back(LseHeads(*lse));
  }
  BURST_RETURN_IF_ERROR(exchange_->Scatter(schedule.shard(), results, own, &stats_.forward));
  BURST_RETURN_IF_ERROR(GatherMaxLogits());
  if (saved != nullptr) {
    *saved = {qkv[0],    qkv[1], qkv[2], heads_out, heads_lse, {}, {}, /*num_kv_heads=*/k.dim(2),
              dropout(), sinks()};
  }
  return absl::OkStatus();
}

Tensor UlyssesAttention::OwnHeads(const Tensor& sinks) const {
  if (sinks.null()) return sinks;
  const int64_t heads = sinks.dim(0) / group_->world_size();
  return sinks.Slice(0, group_->rank() * heads, heads);
}

// Gathers the largest scores of all heads from the ranks.
absl::Status UlyssesAttention::GatherMaxLogits() {
  max_logits_ = Tensor();
  const Tensor& own = attention_->max_logits();
  if (own.null()) return absl::OkStatus();
  const int64_t heads = own.dim(1);
  max_logits_ = Tensor::Empty({own.dim(0), heads * group_->world_size()}, own.dtype());
  max_logits_.Fill(-HUGE_VAL);
  max_logits_.Slice(1, group_->rank() * heads, heads).CopyFrom(own);
  return MaxOverRanks(group_, max_logits_);
}

absl::Status UlyssesAttention::Restore(const AttentionSchedule& schedule, const Tensor& q,
                                       const Tensor& k, const Tensor& v, Saved* saved) {
  if (group_->world_size() == 1) return attention_->Restore(schedule, q, k, v, saved);
  Tensors qkv;
  BURST_RETURN_IF_ERROR(GatherHeads(schedule, q, k, v, &qkv));
  return attention_->Restore(schedule, qkv[0], qkv[1], qkv[2], saved);
}

absl::Status UlyssesAttention::Rebuild(const AttentionSchedule& schedule, const Tensor& q,
                                       const Tensor& k, const Tensor& v, const Tensor& out,
                                       const Tensor& lse, Saved* saved) {
  attention_->SetDropout(dropout());
  if (group_->world_size() == 1) return attention_->Rebuild(schedule, q, k, v, out, lse, saved);
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, k, v, group_->world_size()));
  BURST_RETURN_IF_ERROR(CheckTensor("out", out, q.shape(), q.dtype(), q.device()));
  BURST_RETURN_IF_ERROR(CheckTensor("lse", lse, LseShape(q), SumDType(q.dtype()), q.device()));
  Tensors results;
  BURST_RETURN_IF_ERROR(
      exchange_->Gather(schedule.shard(), {Heads(out), LseHeads(lse)}, &results, &stats_.backward));
  saved->out = results[0];
  saved->lse = results[1];
  saved->num_kv_heads = k.dim(2);
  saved->dropout = dropout();
  saved->sinks = sinks();
  return Restore(schedule, q, k, v, saved);
}

absl::Status UlyssesAttention::Backward(const AttentionSchedule& schedule, const Saved& saved,
                                        Tensor* dq, Tensor* dk, Tensor* dv, Tensor* dsinks) {
  BURST_RETURN_IF_ERROR(CheckSchedule(schedule));
  if (group_->world_size() == 1) return attention_->Backward(schedule, saved, dq, dk, dv, dsinks);
  const Tensor& dout = saved.dout;
  const int64_t num_heads = saved.q.dim(2) * group_->world_size();
  const int64_t length = schedule.shard().local_length();
  Shape shape = {saved.q.dim(0), length, num_heads, saved.q.dim(3)};
  const DType dtype = saved.q.dtype(), sum_dtype = SumDType(dtype);
  const DeviceType device = saved.q.device();
  BURST_RETURN_IF_ERROR(CheckTensor("dout", dout, shape, dtype, device));
  if (!saved.dlse.null()) {
    BURST_RETURN_IF_ERROR(CheckTensor("dlse", saved.dlse, LseShape(dout), sum_dtype, device));
  }
  BURST_RETURN_IF_ERROR(EnsureOutput("dq", shape, dtype, device, dq));
  shape[1] = schedule.key_shard().local_length();
  shape[2] = saved.num_kv_heads;
  BURST_RETURN_IF_ERROR(EnsureOutput("dk", shape, dtype, device, dk));
  BURST_RETURN_IF_ERROR(EnsureOutput("dv", shape, dtype, device, dv));

  HeadExchange::HeadTensors own = {Heads(dout)};
  if (!saved.dlse.null()) own.push_back(LseHeads(saved.dlse));
  Tensors gathered;
  BURST_RETURN_IF_ERROR(exchange_->Gather(schedule.shard(), own, &gathered, &stats_.backward));
  Saved heads = saved;
  heads.dout = gathered[0];
  if (!saved.dlse.null()) heads.dlse = gathered[1];
  heads.sinks = OwnHeads(saved.sinks);
  Tensors gradients(3);
  Tensor own_dsinks;
  BURST_RETURN_IF_ERROR(attention_->Backward(schedule, heads, &gradients[0], &gradients[1],
                                             &gradients[2],
                                             dsinks == nullptr ? nullptr : &own_dsinks));
  if (dsinks != nullptr) {  // the group's other ranks have the gradients of the other heads
    *dsinks = Tensor::Zeros({1, num_heads}, sum_dtype, device);
    OwnHeads(dsinks->View({num_heads})).CopyFrom(own_dsinks.View({-1}));
  }
  if (!schedule.is_cross()) {
    return exchange_->Scatter(schedule.shard(), gradients, {Heads(*dq), Heads(*dk), Heads(*dv)},
                              &stats_.backward);
  }
  BURST_RETURN_IF_ERROR(
      exchange_->Scatter(schedule.shard(), {gradients[0]}, {Heads(*dq)}, &stats_.backward));
  return exchange_->Scatter(schedule.key_shard(), {gradients[1], gradients[2]},
                            {Heads(*dk), Heads(*dv)}, &stats_.backward);
}

UlyssesAttention::BytesSent UlyssesAttention::bytes_sent() const {
  const BytesSent ring = attention_->bytes_sent();
  return {stats_.forward.bytes + ring.forward, stats_.backward.bytes + ring.backward,
          ring.forward_between_nodes, ring.backward_between_nodes};
}

void UlyssesAttention::ResetStats() {
  stats_ = Stats();
  attention_->ResetStats();
}

}  // namespace burst
