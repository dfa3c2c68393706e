#include "burst/attention/burst_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"
#include "burst/sequence/balance.h"

namespace burst {
namespace {

constexpr EnumName<BackwardDirection> kBackwardDirections[] = {{BackwardDirection::kAuto, "auto"},
                                                               {BackwardDirection::kBurst, "burst"},
                                                               {BackwardDirection::kRing, "ring"}};
constexpr EnumName<RingGradDType> kRingGradDTypes[] = {{RingGradDType::kFp32, "fp32"},
                                                       {RingGradDType::kBf16, "bf16"}};

// Returns the elements from a tensor's first to its last.
int64_t Extent(const Tensor& tensor) {
  int64_t extent = 1;
  for (int axis = 0; axis < tensor.ndim(); ++axis) {
    if (tensor.dim(axis) == 0) return 0;
    extent += (tensor.dim(axis) - 1) * tensor.stride(axis);
  }
  return extent;
}

}  // namespace

absl::StatusOr<BackwardDirection> ParseBackwardDirection(absl::string_view name) {
  return ParseName(name, kBackwardDirections);
}
const char* Name(BackwardDirection direction) { return NameOf(direction, kBackwardDirections); }

absl::StatusOr<RingGradDType> ParseRingGradDType(absl::string_view name) {
  return ParseName(name, kRingGradDTypes);
}
const char* Name(RingGradDType dtype) { return NameOf(dtype, kRingGradDTypes); }

BurstAttention::BurstAttention(const BurstAttentionOptions& options,
                               std::shared_ptr<AttentionRanks> ranks, Ring* ring,
                               const RankGroup& group)
    : options_(options),
      ranks_(std::move(ranks)),
      comm_(ranks_->comm()),
      ring_(ring),
      group_(group) {}

BurstAttention::~BurstAttention() = default;

absl::StatusOr<std::unique_ptr<BurstAttention>> BurstAttention::Create(
    const BurstAttentionOptions& options, Communicator* comm, const RankGroup& group) {
  return CreateOver(options, std::make_shared<AttentionRanks>(comm), group);
}

absl::StatusOr<std::unique_ptr<BurstAttention>> BurstAttention::CreateOver(
    const BurstAttentionOptions& options, std::shared_ptr<AttentionRanks> ranks,
    const RankGroup& group) {
  if (!std::isfinite(options.softmax_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("softmax_scale: must be finite; got ", options.softmax_scale));
  }
  BURST_RETURN_IF_ERROR(CheckScoreOptions(options.scores));
  const int world_size = ranks->size();
  const int per_node = options.ranks_per_node;
  if (per_node < 0 || (per_node > 0 && world_size % per_node != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("ranks_per_node: must divide the ", world_size,
                                                   world_size == 1 ? " rank" : " ranks",
                                                   " of the ring; got ", per_node));
  }
  BURST_ASSIGN_OR_RETURN(Ring* const ring, ranks->RingOf(per_node));
  return std::unique_ptr<BurstAttention>(
      new BurstAttention(options, std::move(ranks), ring, group));
}

absl::StatusOr<AttentionSchedule> BurstAttention::Schedule(const Sequences& sequences,
                                                           const Mask& mask) const {
  const int per_node = options_.ranks_per_node;
  BURST_ASSIGN_OR_RETURN(TokenShard queries, QueryShard(sequences, mask));
  if (!sequences.keys.has_value()) {
    BURST_ASSIGN_OR_RETURN(RingSchedule made,
                           RingSchedule::Create(std::move(queries), mask, per_node));
    return AttentionSchedule(std::move(made));
  }
  BURST_ASSIGN_OR_RETURN(TokenShard keys, Shard(sequences.keys->layout.value_or(options_.layout),
                                                sequences.keys->seqlen));
  BURST_ASSIGN_OR_RETURN(RingSchedule made,
                         RingSchedule::Create(std::move(queries), std::move(keys), mask, per_node));
  return AttentionSchedule(std::move(made));
}

absl::StatusOr<TokenShard> BurstAttention::QueryShard(const Sequences& sequences,
                                                      const Mask& mask) const {
  if (sequences.positions.has_value()) return Shard(*sequences.positions);
  const int64_t seqlen = sequences.seqlen;
  const Mask spread = sequences.spread_by.value_or(mask);
  const IntervalMask* const intervals = spread.intervals();
  const bool has_documents = intervals != nullptr && !intervals->documents.empty();
  const bool balanced = options_.layout == Layout::kBalanced && has_documents &&
                        !sequences.keys.has_value() && seqlen > 0 && seqlen < INT32_MAX;
  if (!balanced) return Shard(options_.layout, seqlen);
  BURST_RETURN_IF_ERROR(spread.CheckForSequence(seqlen));
  return Shard(BalancedPositions(spread, seqlen, ranks_->size(), group_.size));
}

absl::StatusOr<TokenShard> BurstAttention::Shard(Layout layout, int64_t seqlen) const {
  return TokenShard::Create(comm_ == nullptr ? 0 : comm_->rank(), ranks_->size(), layout, seqlen,
                            group_);
}

absl::StatusOr<TokenShard> BurstAttention::Shard(
    const std::vector<std::vector<int32_t>>& positions) const {
  return TokenShard::Create(comm_ == nullptr ? 0 : comm_->rank(), ranks_->size(), positions,
                            group_);
}

const AttentionKernels& BurstAttention::KernelsFor(const Tensor& q) const {
  return options_.kernels != nullptr ? *options_.kernels : KernelsOf(q.device());
}

bool BurstAttention::TakesBlocks(const AttentionCall& call) const {
  const AttentionKernels& kernels = KernelsFor(call.q);
  return kernels.TakesBlocks(call.q.dtype(), call.widths()) &&
         (NameOfFirst(options_.scores, call.wants_max_logits) == nullptr ||
          kernels.ChangesScoresOfBlocks());
}

absl::Status BurstAttention::CheckTensors(const AttentionCall& call) const {
  const Tensor& q = call.q;
  const AttentionKernels& kernels = KernelsFor(q);
  BURST_RETURN_IF_ERROR(call.Check(kernels));
  if (options_.ring_grad_dtype == RingGradDType::kBf16 && q.dtype() != DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat("ring_grad_dtype: must be fp32 for tensors of ",
                                                   Name(q.dtype()), "; got bf16"));
  }
  if (options_.fp8_forward) {
    const char* const changed = NameOfFirst(options_.scores, call.wants_max_logits);
    if (changed != nullptr) {
      return absl::InvalidArgumentError(absl::StrCat("fp8_forward: must be off with ", changed,
                                                     ", which needs a forward of 16 bits or more"));
    }
    BURST_RETURN_IF_ERROR(kernels.CheckFp8(q.device(), q.dtype(), call.widths()));
  }
  return CheckScoreKernels(options_.scores, call.wants_max_logits, kernels, q.dtype(),
                           call.widths());
}

absl::Status BurstAttention::Check(const AttentionCall& call) const {
  BURST_RETURN_IF_ERROR(CheckTensors(call));
  const RingSchedule* const schedule = call.schedule->ring();
  if (schedule == nullptr) {
    return absl::InvalidArgumentError("schedule: must be of a ring; got one of exact attention");
  }
  const int rank = comm_ == nullptr ? 0 : comm_->rank();
  const int world_size = comm_ == nullptr ? 1 : comm_->world_size();
  const TokenShard& shard = schedule->shard();
  if (shard.group_index() != rank || shard.num_groups() != world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("schedule: must be for rank ", rank, " of ", world_size, "; got one for rank ",
                     shard.group_index(), " of ", shard.num_groups()));
  }
  const bool flat = options_.ranks_per_node == 0 || options_.ranks_per_node == world_size;
  if (schedule->ranks_per_node() < world_size && flat) {
    return absl::InvalidArgumentError(
        absl::StrCat("schedule: must be for a flat ring; got one for ", schedule->ranks_per_node(),
                     " ranks a node"));
  }
  BURST_RETURN_IF_ERROR(
      call.CheckLengths(shard.group_length(), schedule->key_shard().group_length()));
  return CheckScores(options_.scores, schedule->is_cross(), call.q.dim(2) * group_.size);
}

BurstAttention::BytesSent BurstAttention::bytes_sent() const {
  const RingTraffic &forward = stats_.forward, &backward = stats_.backward;
  return {forward.bytes(), backward.bytes(), forward.bytes(Link::kInter),
          backward.bytes(Link::kInter)};
}

FlashForwardParams BurstAttention::ForwardParams(const AttentionCall& call, const Tensor& lse,
                                                 const Tensor& largest) const {
  FlashForwardParams params;
  params.q = Operand(call.q);
  params.lse = lse.raw_data();
  params.fp8 = options_.fp8_forward;
  if (!largest.null()) params.max_logits = static_cast<float*>(largest.raw_data());
  return params;
}

ScoreChanges BurstAttention::ScoresOf(const AttentionCall& call, int queries, int keys,
                                      int64_t first_head) const {
  const ScoreOptions& options = options_.scores;
  const DeviceType device = call.q.device();
  ScoreChanges changes;
  changes.softcap = options.softcap;
  changes.dropout = call.dropout.enabled ? options.dropout : 0;
  changes.seed = call.dropout.seed;
  changes.first_row = call.dropout.first_row;
  changes.first_head =
      call.dropout.first_head + group_.group_rank * call.q.dim(kHeadAxis) + first_head;
  const bool has_slopes = !options.alibi_slopes.empty();
  if (has_slopes) {
    changes.alibi_slopes = slopes_.On(device, options.alibi_slopes) + changes.first_head;
  }
  if (has_slopes || changes.dropout != 0) {
    changes.q_positions = call.schedule->ring()->query_positions(queries, device);
    changes.k_positions = call.schedule->ring()->key_positions(keys, device);
  }
  return changes;
}

absl::Status BurstAttention::Forward(const AttentionCall& call, AttentionResult* result) {
  BURST_RETURN_IF_ERROR(Check(call));
  BURST_RETURN_IF_ERROR(result->Prepare(call));
  const RingSchedule& schedule = *call.schedule->ring();
  const Tensor &q = call.q, &k = call.k, &v = call.v, &out = result->out;

  // Q stays, K and V visit the ranks. In each round, and for each part of its mask: (O, lse) <-
  // merge((O, lse), attention(Q, K, V)). The first call counts the sinks in. If O is accumulated in
  // another dtype, the last call that reaches a row converts it (RowCalls).
  const int64_t num_heads = q.dim(kHeadAxis);
  const CallPlan& plan =
      schedule.calls({RingPass::kForward, TakesBlocks(call), num_heads, k.dim(kHeadAxis)});
  const DType sum_dtype = SumDType(q.dtype());
  const bool in_place = plan.one_call || q.dtype() == sum_dtype;
  const Tensor sum = in_place ? Tensor() : Tensor::Empty({Extent(out)}, sum_dtype, q.device());
  Ring::Block block = {{k, kSeqAxis}, {v, kSeqAxis}};
  if (schedule.shard().num_groups() > 1) block = BlockForSending(block, schedule.key_rows());
  Tensor largest;
  if (call.wants_max_logits) {
    largest = Tensor::Empty(result->max_logits.shape(), DType::kFloat32, q.device());
    largest.Fill(-HUGE_VAL);
  }

  FlashForwardParams params = ForwardParams(call, result->lse, largest);
  const int rank = schedule.shard().group_index();
  params.out = Operand(out);
  params.out_dtype = out.dtype();
  if (!in_place) {
    params.sum = params.out;
    params.sum.data = sum.raw_data();
  }
  const bool messages_are_kernels =
      comm_ != nullptr && comm_->messages_are_kernels(call.k.size_bytes());
  int32_t number = 0;
  auto step = plan.steps.begin();
  const auto compute = [&](int source, Ring::Part, const Ring::Tensors& visiting,
                           const Ring::Sums&) {
    BURST_CHECK_EQ(source, step->source);
    const bool own_rows = source == rank && schedule.key_rows() != nullptr;
    const Ring::Tensors kv = own_rows ? Ring::Tensors{k, v} : visiting;
    params.k = Operand(kv[0]);
    params.v = Operand(kv[1]);
    params.shape = KernelShape(options_.softmax_scale, q, kv[0], kv[1]);
    params.shape.scores = ScoresOf(call, rank, source, /*first_head=*/0);
    params.non_persistent = messages_are_kernels && MovesBlocksFrom(schedule.kv_route(), source);
    for (const PlannedCall& planned : step->calls) {
      planned.part.SetMask(schedule.for_keys_of(source), q.device(), &params.shape);
      params.sinks = params.merge || call.sinks.null() ? nullptr : call.sinks.raw_data();
      if (!in_place) params.rows = plan.RowsOf(number++, planned, q.device());
      KernelsFor(q).Forward(params);
      params.merge = true;
    }
    ++step;
  };
  BURST_RETURN_IF_ERROR(
      ring_->Run(schedule.kv_route(), block, /*gradients=*/nullptr, compute, &stats_.forward));
  if (largest.null()) return absl::OkStatus();
  largest = largest.To(DeviceType::kCpu);
  BURST_RETURN_IF_ERROR(MaxOverRanks(comm_, largest));
  result->max_logits.CopyFrom(largest);
  return absl::OkStatus();
}

}  // namespace burst
