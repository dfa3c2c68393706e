#include "burst/attention/ulysses_attention.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

}  // namespace

absl::Status CheckHeadsDivide(absl::string_view name, int64_t num_heads, int64_t num_kv_heads,
                              int size) {
  if (HeadsDivide(num_heads, num_kv_heads, size)) return absl::OkStatus();
  std::vector<int64_t> valid;
  for (int64_t other = 1; other <= num_heads; ++other) {
    if (HeadsDivide(num_heads, num_kv_heads, other)) valid.push_back(other);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": must be ", absl::StrJoin(valid, ", "), " ranks to share ", num_heads,
                   " heads (", num_kv_heads, " KV heads); got ", size, "; give one of them"));
}

absl::StatusOr<std::unique_ptr<UlyssesAttention>> UlyssesAttention::Create(
    const BurstAttentionOptions& options, int size, Communicator* comm) {
  return CreateOver(options, size, std::make_shared<AttentionRanks>(comm));
}

absl::StatusOr<std::unique_ptr<UlyssesAttention>> UlyssesAttention::CreateOver(
    const BurstAttentionOptions& options, int size, std::shared_ptr<AttentionRanks> ranks) {
  if (size < 1 || ranks->size() % size != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("groups must divide the ", ranks->size(), " ranks; got groups of ", size));
  }
  const int per_node = options.ranks_per_node;
  if (per_node < 0 || (per_node > 0 && ranks->size() % per_node != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks_per_node: must divide the ", ranks->size(), " ranks; got ", per_node));
  }
  if (per_node % size != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks_per_node: must be a multiple of the group's ", size, " ranks; got ", per_node));
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

absl::Status UlyssesAttention::Check(const AttentionCall& call) const {
  const RankGroup& group = call.schedule->shard().group();
  const int size = group_->world_size();
  if (group.size != size || group.group_rank != group_->rank()) {
    return absl::InvalidArgumentError(absl::StrCat("schedule: must be for rank ", group_->rank(),
                                                   " of groups of ", size, "; got one for rank ",
                                                   group.group_rank, " of groups of ", group.size));
  }
  if (size == 1) return attention_->Check(call);
  BURST_RETURN_IF_ERROR(attention_->CheckTensors(call));
  BURST_RETURN_IF_ERROR(call.CheckLengths(call.schedule->shard().local_length(),
                                          call.schedule->key_shard().local_length()));
  return CheckHeadsDivide("ulysses", call.q.dim(2), call.k.dim(2), size);
}

// Queries and keys of two sequences take two exchanges.
absl::Status UlyssesAttention::GatherHeads(const AttentionCall& call,
                                           AttentionResult::Exchanged* exchanged) {
  const AttentionSchedule& schedule = *call.schedule;
  const HeadExchange::HeadTensors q = {Heads(call.q)}, kv = {Heads(call.k), Heads(call.v)};
  Tensors gathered;
  if (schedule.is_cross()) {
    Tensors gathered_kv;
    BURST_RETURN_IF_ERROR(exchange_->Gather(schedule.shard(), q, &gathered, &stats_.forward));
    BURST_RETURN_IF_ERROR(
        exchange_->Gather(schedule.key_shard(), kv, &gathered_kv, &stats_.forward));
    gathered.insert(gathered.end(), gathered_kv.begin(), gathered_kv.end());
  } else {
    BURST_RETURN_IF_ERROR(
        exchange_->Gather(schedule.shard(), {q[0], kv[0], kv[1]}, &gathered, &stats_.forward));
  }
  exchanged->q = gathered[0];
  exchanged->k = gathered[1];
  exchanged->v = gathered[2];
  return absl::OkStatus();
}

AttentionCall UlyssesAttention::RingCall(const AttentionCall& call,
                                         const AttentionResult::Exchanged& exchanged) const {
  AttentionCall ring = call;
  ring.q = exchanged.q;
  ring.k = exchanged.k;
  ring.v = exchanged.v;
  ring.sinks = OwnHeads(call.sinks);
  return ring;
}

// Exchanges q, k, v: this rank's tokens and all heads -> the group's tokens and this rank's heads.
// Then attention runs over the ring, and out and lse take the same exchange back.
absl::Status UlyssesAttention::Forward(const AttentionCall& call, AttentionResult* result) {
  BURST_RETURN_IF_ERROR(Check(call));
  if (group_->world_size() == 1) return attention_->Forward(call, result);
  BURST_RETURN_IF_ERROR(result->Prepare(call, /*with_lse=*/call.wants_lse));
  AttentionResult::Exchanged& exchanged = result->exchanged;
  BURST_RETURN_IF_ERROR(GatherHeads(call, &exchanged));
  AttentionResult ring;
  BURST_RETURN_IF_ERROR(attention_->Forward(RingCall(call, exchanged), &ring));
  exchanged.out = ring.out;
  exchanged.lse = ring.lse;
  Tensors heads = {ring.out};
  HeadExchange::HeadTensors own = {Heads(result->out)};
  if (call.wants_lse) {
    heads.push_back(ring.lse);
    own.push_back(LseHeads(result->lse));
  }
  BURST_RETURN_IF_ERROR(exchange_->Scatter(call.schedule->shard(), heads, own, &stats_.forward));
  if (!call.wants_max_logits) return absl::OkStatus();
  return GatherMaxLogits(ring.max_logits, result->max_logits);
}

Tensor UlyssesAttention::OwnHeads(const Tensor& sinks) const {
  if (sinks.null()) return sinks;
  const int64_t heads = sinks.dim(0) / group_->world_size();
  return sinks.Slice(0, group_->rank() * heads, heads);
}

absl::Status UlyssesAttention::GatherMaxLogits(const Tensor& own, const Tensor& all) const {
  const Tensor largest = Tensor::Empty(all.shape(), all.dtype());
  largest.Fill(-HUGE_VAL);
  largest.Slice(1, group_->rank() * own.dim(1), own.dim(1)).CopyFrom(own);
  BURST_RETURN_IF_ERROR(MaxOverRanks(group_, largest));
  all.CopyFrom(largest);
  return absl::OkStatus();
}

absl::Status UlyssesAttention::Backward(const AttentionCall& call, const AttentionResult& result,
                                        AttentionGradients* gradients) {
  BURST_RETURN_IF_ERROR(Check(call));
  if (group_->world_size() == 1) return attention_->Backward(call, result, gradients);
  BURST_RETURN_IF_ERROR(gradients->Prepare(call));
  const AttentionSchedule& schedule = *call.schedule;
  AttentionResult::Exchanged exchanged = result.exchanged;
  if (exchanged.out.null()) {
    BURST_RETURN_IF_ERROR(result.Check(call));
    Tensors heads;
    BURST_RETURN_IF_ERROR(exchange_->Gather(
        schedule.shard(), {Heads(result.out), LseHeads(result.lse)}, &heads, &stats_.backward));
    exchanged.out = heads[0];
    exchanged.lse = heads[1];
  }
  if (exchanged.q.null()) BURST_RETURN_IF_ERROR(GatherHeads(call, &exchanged));

  HeadExchange::HeadTensors own = {Heads(gradients->dout)};
  if (!gradients->dlse.null()) own.push_back(LseHeads(gradients->dlse));
  Tensors gathered;
  BURST_RETURN_IF_ERROR(exchange_->Gather(schedule.shard(), own, &gathered, &stats_.backward));
  AttentionGradients ring = {gathered[0]};
  if (gathered.size() > 1) ring.dlse = gathered[1];
  BURST_RETURN_IF_ERROR(
      attention_->Backward(RingCall(call, exchanged), {exchanged.out, exchanged.lse}, &ring));
  if (!call.sinks.null()) {  // the group's other ranks have the gradients of the other heads
    const int64_t heads = call.sinks.dim(0);
    gradients->dsinks = Tensor::Zeros({1, heads}, call.sinks.dtype(), call.sinks.device());
    OwnHeads(gradients->dsinks.View({heads})).CopyFrom(ring.dsinks.View({-1}));
  }
  const HeadExchange::HeadTensors dq = {Heads(gradients->dq)};
  const HeadExchange::HeadTensors dkv = {Heads(gradients->dk), Heads(gradients->dv)};
  if (!schedule.is_cross()) {
    return exchange_->Scatter(schedule.shard(), {ring.dq, ring.dk, ring.dv},
                              {dq[0], dkv[0], dkv[1]}, &stats_.backward);
  }
  BURST_RETURN_IF_ERROR(exchange_->Scatter(schedule.shard(), {ring.dq}, dq, &stats_.backward));
  return exchange_->Scatter(schedule.key_shard(), {ring.dk, ring.dv}, dkv, &stats_.backward);
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
