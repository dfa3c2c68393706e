#include "burst/attention/burst_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "burst/attention/ring/balance.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr EnumName<BackwardDirection> kBackwardDirections[] = {{BackwardDirection::kAuto, "auto"},
                                                               {BackwardDirection::kBurst, "burst"},
                                                               {BackwardDirection::kRing, "ring"}};
constexpr EnumName<RingGradDType> kRingGradDTypes[] = {{RingGradDType::kFp32, "fp32"},
                                                       {RingGradDType::kBf16, "bf16"}};

constexpr char kSlicesAreTheMask[] = "slices are the whole mask";

// A part of a mask, which is one call of the kernels: of intervals, or of blocks.
struct MaskPart {
  const VisibleKeys* keys;
  const VisibleBlocks* blocks;
};

// takes_blocks: whether the kernels do.
absl::InlinedVector<MaskPart, 4> PartsOf(const BlockMask& mask, bool takes_blocks) {
  absl::InlinedVector<MaskPart, 4> parts;
  if (!mask.blocks.none() && takes_blocks) parts.push_back({nullptr, &mask.blocks});
  if (!mask.blocks.none() && !takes_blocks) {
    for (const VisibleKeys& keys : mask.blocks.parts()) parts.push_back({&keys, nullptr});
  }
  for (const VisibleKeys& keys : mask.parts) parts.push_back({&keys, nullptr});
  return parts;
}

// Without a mask.
FlashAttentionShape KernelShape(const BurstAttentionOptions& options, const Tensor& q,
                                const Tensor& k) {
  FlashAttentionShape shape;
  shape.batch = q.dim(0);
  shape.q_len = q.dim(1);
  shape.k_len = k.dim(1);
  shape.num_heads = q.dim(2);
  shape.num_kv_heads = k.dim(2);
  shape.head_dim = q.dim(3);
  shape.softmax_scale = options.softmax_scale != 0 ? options.softmax_scale
                                                   : 1 / std::sqrt(static_cast<double>(q.dim(3)));
  shape.dtype = q.dtype();
  return shape;
}

void SetMask(const MaskPart& part, DeviceType device, FlashAttentionShape* shape) {
  shape->visible = part.keys != nullptr ? part.keys->ranges(device) : KeyRanges();
  shape->blocks = part.blocks != nullptr ? part.blocks->lists(device) : KeyBlocks();
}

constexpr int kSeqAxis = 1, kHeadAxis = 2;        // of [batch, seqlen, heads, head_dim]
constexpr int kLseSeqAxis = 2, kLseHeadAxis = 1;  // of [batch, heads, seqlen]

// The rows of a block that a ring sends, in contiguous memory.
Tensor TakeRows(const Tensor& block, int axis, const std::vector<BlockRows>& rows) {
  Shape shape = block.shape();
  shape[axis] = 0;
  for (const BlockRows& range : rows) shape[axis] += range.count;
  const Tensor taken = Tensor::Empty(shape, block.dtype(), block.device());
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (const BlockRows& range : rows) {
    copies.push_back(
        {block.Slice(axis, range.begin, range.count), taken.Slice(axis, at, range.count)});
    at += range.count;
  }
  CopyAll(copies);
  return taken;
}

// Adds to those rows of a block.
void AddToRows(const Tensor& addend, const Tensor& block, int axis,
               const std::vector<BlockRows>& rows) {
  const Tensor sum = TakeRows(block, axis, rows);
  sum.Add(addend);
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (const BlockRows& range : rows) {
    copies.push_back(
        {sum.Slice(axis, at, range.count), block.Slice(axis, range.begin, range.count)});
    at += range.count;
  }
  CopyAll(copies);
}

// The heads that belong to a part of a block's work: whole groups of query heads that share a KV
// head; where there is one KV head, some of its query heads (their gradients add up). A division by
// tokens would cost more: every key tile would be loaded, and its gradients stored, twice.
struct Heads {
  int64_t first, count, first_kv, kv_count;

  Tensor OfQueries(const Tensor& t) const { return t.Slice(kHeadAxis, first, count); }
  Tensor OfKeys(const Tensor& t) const { return t.Slice(kHeadAxis, first_kv, kv_count); }
  // Of lse or delta. The kernels read them contiguous; they are small.
  Tensor OfRows(const Tensor& t) const { return t.Slice(kLseHeadAxis, first, count).Contiguous(); }
};

// In a flat ring the two parts are equal. Between nodes the last transfer of the gradients takes
// longer, and the second part, which it runs beside, is three quarters.
Heads HeadsOf(Ring::Part part, bool flat, int64_t num_heads, int64_t num_kv_heads) {
  if (part == Ring::Part::kWhole) return {0, num_heads, 0, num_kv_heads};
  const int64_t groups = num_kv_heads > 1 ? num_kv_heads : num_heads;
  const int64_t cut = groups / (flat ? 2 : 4);
  const int64_t first = part == Ring::Part::kFirst ? 0 : cut;
  const int64_t count = part == Ring::Part::kFirst ? cut : groups - cut;
  const int64_t heads = num_heads / groups;
  if (num_kv_heads == 1) return {first, count, 0, 1};
  return {first * heads, count * heads, first, count};
}

}  // namespace

absl::StatusOr<BackwardDirection> ParseBackwardDirection(absl::string_view name) {
  return ParseName("backward", name, kBackwardDirections);
}
const char* Name(BackwardDirection direction) { return NameOf(direction, kBackwardDirections); }

absl::StatusOr<RingGradDType> ParseRingGradDType(absl::string_view name) {
  return ParseName("ring gradient dtype", name, kRingGradDTypes);
}
const char* Name(RingGradDType dtype) { return NameOf(dtype, kRingGradDTypes); }

BurstAttention::BurstAttention(const BurstAttentionOptions& options, Communicator* comm,
                               std::unique_ptr<Communicator> between_nodes, const RankGroup& group)
    : options_(options),
      comm_(comm),
      group_(group),
      between_nodes_(std::move(between_nodes)),
      ring_(std::make_unique<Ring>(comm, between_nodes_.get())) {}

BurstAttention::~BurstAttention() = default;

absl::StatusOr<std::unique_ptr<BurstAttention>> BurstAttention::Create(
    const BurstAttentionOptions& options, Communicator* comm, const RankGroup& group) {
  if (options.mask.window < 0) {
    return absl::InvalidArgumentError(absl::StrCat("window ", options.mask.window, " is negative"));
  }
  if (!std::isfinite(options.softmax_scale)) {
    return absl::InvalidArgumentError("softmax_scale is not finite");
  }
  BURST_RETURN_IF_ERROR(CheckScoreOptions(options.scores));
  const int world_size = comm == nullptr ? 1 : comm->world_size();
  const int per_node = options.ranks_per_node;
  if (per_node < 0 || (per_node > 0 && world_size % per_node != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks_per_node: ", per_node, " does not divide the ", world_size,
                     world_size == 1 ? " rank" : " ranks", " of the ring"));
  }
  std::unique_ptr<Communicator> between_nodes;
  if (per_node > 0 && per_node < world_size) {
    BURST_ASSIGN_OR_RETURN(between_nodes, comm->Split(/*color=*/0, /*key=*/comm->rank()));
  }
  return std::unique_ptr<BurstAttention>(
      new BurstAttention(options, comm, std::move(between_nodes), group));
}

absl::StatusOr<RingSchedule> BurstAttention::Schedule(int64_t seqlen,
                                                      const DocumentStarts& documents,
                                                      const Spans& spans) const {
  const bool balanced = options_.layout == Layout::kBalanced && !documents.empty() && seqlen > 0 &&
                        seqlen < INT32_MAX;
  BURST_ASSIGN_OR_RETURN(TokenShard shard, balanced ? BalancedShard(seqlen, documents)
                                                    : Shard(options_.layout, seqlen));
  return RingSchedule::Create(std::move(shard), options_.mask, documents, options_.ranks_per_node,
                              spans);
}

absl::StatusOr<TokenShard> BurstAttention::BalancedShard(int64_t seqlen,
                                                         const DocumentStarts& documents) const {
  BURST_RETURN_IF_ERROR(CheckDocuments(seqlen, documents));
  const int groups = comm_ == nullptr ? 1 : comm_->world_size();
  return Shard(BalancedPositions(options_.mask, documents, seqlen, groups, group_.size));
}

absl::Status BurstAttention::CheckFullMask(absl::string_view reason) const {
  if (!options_.mask.causal && options_.mask.window == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(reason, ": mask must be neither causal nor a window"));
}

absl::StatusOr<RingSchedule> BurstAttention::SlicedSchedule(int64_t seqlen,
                                                            const MaskSlices& slices) const {
  BURST_RETURN_IF_ERROR(CheckFullMask(kSlicesAreTheMask));
  BURST_ASSIGN_OR_RETURN(TokenShard shard, Shard(options_.layout, seqlen));
  return RingSchedule::CreateSliced(std::move(shard), slices, options_.ranks_per_node);
}

absl::StatusOr<RingSchedule> BurstAttention::SlicedSchedule(
    const std::vector<std::vector<int32_t>>& positions, const MaskSlices& slices) const {
  BURST_RETURN_IF_ERROR(CheckFullMask(kSlicesAreTheMask));
  BURST_ASSIGN_OR_RETURN(TokenShard shard, Shard(positions));
  return RingSchedule::CreateSliced(std::move(shard), slices, options_.ranks_per_node);
}

absl::StatusOr<RingSchedule> BurstAttention::CrossSchedule(int64_t q_seqlen, int64_t k_seqlen,
                                                           std::optional<Layout> k_layout) const {
  BURST_RETURN_IF_ERROR(CheckFullMask("cross-attention has no order between queries and keys"));
  BURST_ASSIGN_OR_RETURN(TokenShard queries, Shard(options_.layout, q_seqlen));
  BURST_ASSIGN_OR_RETURN(TokenShard keys, Shard(k_layout.value_or(options_.layout), k_seqlen));
  return RingSchedule::CreateCross(std::move(queries), std::move(keys), options_.ranks_per_node);
}

absl::StatusOr<TokenShard> BurstAttention::Shard(Layout layout, int64_t seqlen) const {
  return TokenShard::Create(comm_ == nullptr ? 0 : comm_->rank(),
                            comm_ == nullptr ? 1 : comm_->world_size(), layout, seqlen, group_);
}

absl::StatusOr<TokenShard> BurstAttention::Shard(
    const std::vector<std::vector<int32_t>>& positions) const {
  return TokenShard::Create(comm_ == nullptr ? 0 : comm_->rank(),
                            comm_ == nullptr ? 1 : comm_->world_size(), positions, group_);
}

absl::StatusOr<RingSchedule> BurstAttention::Schedule(
    const std::vector<std::vector<int32_t>>& positions, const DocumentStarts& documents,
    const Spans& spans) const {
  BURST_ASSIGN_OR_RETURN(TokenShard shard, Shard(positions));
  return RingSchedule::Create(std::move(shard), options_.mask, documents, options_.ranks_per_node,
                              spans);
}

const AttentionKernels& BurstAttention::KernelsFor(const Tensor& q) const {
  return options_.kernels != nullptr ? *options_.kernels : KernelsOf(q.device());
}

bool BurstAttention::TakesBlocks(const Tensor& q) const {
  const AttentionKernels& kernels = KernelsFor(q);
  return kernels.TakesBlocks(q.dtype(), q.dim(3)) &&
         (!options_.scores.any() || kernels.ChangesScoresOfBlocks());
}

absl::Status BurstAttention::CheckInputs(const RingSchedule& schedule, const Tensor& q,
                                         const Tensor& k, const Tensor& v) const {
  BURST_RETURN_IF_ERROR(CheckAttentionInputs(q, k, v));
  BURST_RETURN_IF_ERROR(KernelsFor(q).Check(q.device(), q.dtype(), q.dim(3)));
  if (options_.ring_grad_dtype == RingGradDType::kBf16 && q.dtype() != DType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("ring_grad_dtype: bf16 is for bfloat16 tensors, these are ", Name(q.dtype())));
  }
  if (options_.fp8_forward && options_.scores.any()) {
    return absl::InvalidArgumentError(absl::StrCat("fp8_forward: ", NameOfFirst(options_.scores),
                                                   " needs the forward of 16 bits or more"));
  }
  if (options_.fp8_forward) {
    BURST_RETURN_IF_ERROR(KernelsFor(q).CheckFp8(q.device(), q.dtype(), q.dim(3)));
  }
  const int rank = comm_ == nullptr ? 0 : comm_->rank();
  const int world_size = comm_ == nullptr ? 1 : comm_->world_size();
  if (schedule.chunks() != nullptr) {
    return absl::InvalidArgumentError("the schedule is one in chunks, not that of a ring");
  }
  if (schedule.shard().group_index() != rank || schedule.shard().num_groups() != world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the schedule is for rank ", schedule.shard().group_index(), " of ",
                     schedule.shard().num_groups(), ", this is rank ", rank, " of ", world_size));
  }
  if (schedule.ranks_per_node() < world_size && between_nodes_ == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the schedule is for ", schedule.ranks_per_node(), " ranks per node, this ring is flat"));
  }
  if (q.dim(1) != schedule.shard().group_length()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " has ",
                                                   schedule.shard().group_length(),
                                                   " tokens of this schedule, q has ", q.dim(1)));
  }
  if (k.dim(1) != schedule.key_shard().group_length()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank, " has ", schedule.key_shard().group_length(),
        schedule.is_cross() ? " keys" : " tokens", " of this schedule, k has ", k.dim(1)));
  }
  if (schedule.rows() > 1 && schedule.rows() != q.dim(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "documents, spans or slices of ", schedule.rows(), " rows for a batch of ", q.dim(0)));
  }
  return CheckScores(options_.scores, schedule, q.dim(2) * group_.size, KernelsFor(q));
}

absl::Status BurstAttention::CheckSaved(const Saved& saved) const {
  const Tensor& q = saved.q;
  const auto like = [&](const Tensor& tensor, const Shape& shape, DType dtype) {
    return tensor.shape() == shape && tensor.dtype() == dtype && tensor.device() == q.device();
  };
  const DType sum_dtype = SumDType(q.dtype());
  if (!like(saved.out, q.shape(), q.dtype()) || !like(saved.dout, q.shape(), q.dtype()) ||
      !like(saved.lse, LseShape(q), sum_dtype) ||
      (!saved.dlse.null() && !like(saved.dlse, LseShape(q), sum_dtype))) {
    return absl::InvalidArgumentError(
        absl::StrCat("out ", ToString(saved.out.shape()), " ", Name(saved.out.dtype()), ", dout ",
                     ToString(saved.dout.shape()), " ", Name(saved.dout.dtype()), ", lse ",
                     ToString(saved.lse.shape()), " ", Name(saved.lse.dtype()), " do not fit q ",
                     ToString(q.shape()), " ", Name(q.dtype()), " on ", Name(q.device())));
  }
  return absl::OkStatus();
}

BurstAttention::BytesSent BurstAttention::bytes_sent() const {
  const RingTraffic &forward = stats_.forward, &backward = stats_.backward;
  return {forward.bytes(), backward.bytes(), forward.bytes(Link::kInter),
          backward.bytes(Link::kInter)};
}

// Contiguous, which is what a ring sends: the tensors, or some rows of them.
Ring::Block BurstAttention::ForSending(Ring::Block block,
                                       const std::vector<BlockRows>* rows) const {
  if (comm_ == nullptr || comm_->world_size() == 1) return block;
  absl::InlinedVector<TensorCopy, 4> copies;
  for (Ring::BlockTensor& own : block) {
    if (rows != nullptr) {
      own.tensor = TakeRows(own.tensor, own.length_axis, *rows);
    } else if (!own.tensor.is_contiguous()) {
      copies.push_back({own.tensor, Tensor::EmptyLike(own.tensor)});
      own.tensor = copies.back().to;
    }
  }
  CopyAll(copies);
  return block;
}

absl::Status BurstAttention::Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                                     const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) {
  Tensor own_lse;
  if (lse == nullptr) lse = &own_lse;
  const DType sum_dtype = SumDType(q.dtype());
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, k, v));
  BURST_RETURN_IF_ERROR(EnsureOutput("out", q.shape(), q.dtype(), q.device(), out));
  BURST_RETURN_IF_ERROR(EnsureOutput("lse", LseShape(q), sum_dtype, q.device(), lse));
  if (!lse->is_contiguous()) return absl::InvalidArgumentError("lse must be contiguous");
  BURST_RETURN_IF_ERROR(CheckSinks(sinks(), q));

  // Q stays, K and V visit the ranks. In each round, and for each part of its mask:
  // (O, lse) <- merge((O, lse), attention(Q, K, V)). The first call counts the sinks in. Where O is
  // accumulated in another dtype, the last call converts it.
  const RingRoute& route = schedule.kv_route();
  const int rank = schedule.shard().group_index();
  const AttentionKernels& kernels = KernelsFor(q);
  const bool takes_blocks = TakesBlocks(q);
  const auto parts_of = [&](int source) {
    return PartsOf(schedule.for_keys_of(source), takes_blocks);
  };
  size_t calls_left = parts_of(rank).size();
  for (size_t i = 1; i < route.rounds.size(); ++i) {
    const RingRound& round = route.rounds[i];
    if (round.compute) calls_left += parts_of(round.source).size();
  }
  const bool in_place = calls_left == 1 || q.dtype() == sum_dtype;
  const Tensor sum = in_place ? *out : Tensor::Empty(q.shape(), sum_dtype, q.device());
  const Ring::Block block = ForSending({{k, kSeqAxis}, {v, kSeqAxis}}, schedule.key_rows());
  RankScores scores(options_.scores, dropout(), group_, q.dim(kHeadAxis), q.device());
  max_logits_ = Tensor();
  if (options_.scores.max_logits) {
    max_logits_ = Tensor::Empty({q.dim(0), q.dim(kHeadAxis)}, DType::kFloat32, q.device());
    max_logits_.Fill(-HUGE_VAL);
  }
  bool merge = false;
  BURST_RETURN_IF_ERROR(ring_->Run(
      route, block, /*gradients=*/nullptr,
      [&](int source, Ring::Part, const Ring::Tensors& visiting, const Ring::Tensors&) {
        const bool own_rows = source == rank && schedule.key_rows() != nullptr;
        const Ring::Tensors kv = own_rows ? Ring::Tensors{k, v} : visiting;
        FlashForwardParams params;
        params.q = Operand(q);
        params.k = Operand(kv[0]);
        params.v = Operand(kv[1]);
        params.lse = lse->raw_data();
        params.non_persistent = comm_ != nullptr && comm_->messages_are_kernels();
        params.shape = KernelShape(options_, q, kv[0]);
        params.fp8 = options_.fp8_forward;
        if (!max_logits_.null()) params.max_logits = static_cast<float*>(max_logits_.raw_data());
        params.shape.scores = scores.For(
            schedule.shard().group_positions(rank),
            own_rows ? schedule.key_shard().group_positions(rank) : schedule.keys_sent_by(source),
            /*first_head=*/0);
        for (const MaskPart& part : parts_of(source)) {
          const Tensor& result = --calls_left == 0 ? *out : sum;
          SetMask(part, q.device(), &params.shape);
          params.out = Operand(result);
          params.out_dtype = result.dtype();
          params.merge = merge;
          params.sinks = merge || sinks().null() ? nullptr : sinks().raw_data();
          if (merge && !in_place) params.sum = Operand(sum);
          kernels.Forward(params);
          merge = true;
        }
      },
      &stats_.forward));
  if (!max_logits_.null()) {
    max_logits_ = max_logits_.To(DeviceType::kCpu);
    BURST_RETURN_IF_ERROR(MaxOverRanks(comm_, max_logits_));
  }
  if (saved != nullptr) {
    *saved = {q, k, v, *out, *lse, {}, {}, /*num_kv_heads=*/0, dropout(), sinks()};
  }
  return absl::OkStatus();
}

DType BurstAttention::RingGradDTypeOf(DType dtype) const {
  return options_.ring_grad_dtype == RingGradDType::kBf16 ? DType::kBFloat16 : SumDType(dtype);
}

BackwardDirection BurstAttention::Direction(const RingSchedule& schedule, int64_t num_heads,
                                            int64_t num_kv_heads, int64_t head_dim,
                                            DType dtype) const {
  if (options_.backward != BackwardDirection::kAuto) return options_.backward;
  const int64_t q_bytes = num_heads * head_dim * SizeOf(dtype);
  const int64_t k_bytes = num_kv_heads * head_dim * SizeOf(dtype);
  const int64_t row_bytes = num_heads * SizeOf(SumDType(dtype));  // lse, or delta
  const int64_t gradient_size = SizeOf(RingGradDTypeOf(dtype));
  const int64_t dq_bytes = num_heads * head_dim * gradient_size;
  const int64_t dk_bytes = num_kv_heads * head_dim * gradient_size;
  const RingRoute& queries = schedule.query_route();
  const RingRoute& keys = schedule.kv_route();
  const int64_t burst = queries.block_tokens.total() * (2 * q_bytes + 2 * row_bytes) +
                        queries.gradient_tokens.total() * dq_bytes;  // Q, dO, lse, delta; dQ
  const int64_t ring = keys.block_tokens.total() * 2 * k_bytes +
                       keys.gradient_tokens.total() * 2 * dk_bytes;  // K, V; dK, dV
  return burst <= ring ? BackwardDirection::kBurst : BackwardDirection::kRing;
}

absl::Status BurstAttention::Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq,
                                      Tensor* dk, Tensor* dv, Tensor* dsinks) {
  const Tensor& q = saved.q;
  const DType sum_dtype = SumDType(q.dtype());
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, saved.k, saved.v));
  BURST_RETURN_IF_ERROR(CheckSaved(saved));
  BURST_RETURN_IF_ERROR(EnsureOutput("dq", q.shape(), q.dtype(), q.device(), dq));
  BURST_RETURN_IF_ERROR(EnsureOutput("dk", saved.k.shape(), q.dtype(), q.device(), dk));
  BURST_RETURN_IF_ERROR(EnsureOutput("dv", saved.v.shape(), q.dtype(), q.device(), dv));

  // delta = rowsum(dO * O) - dlse, once, so that O need not be sent.
  const Tensor delta = Tensor::Empty(LseShape(q), sum_dtype, q.device());
  const Tensor dlse = saved.dlse.null() ? Tensor() : saved.dlse.Contiguous();
  FlashDeltaParams delta_params;
  delta_params.shape = KernelShape(options_, q, saved.k);
  delta_params.out = Operand(saved.out);
  delta_params.dout = Operand(saved.dout);
  delta_params.dlse = dlse.null() ? nullptr : dlse.raw_data();
  delta_params.delta = delta.raw_data();
  const AttentionKernels& kernels = KernelsFor(q);
  const bool takes_blocks = TakesBlocks(q);
  kernels.Delta(delta_params);
  if (dsinks != nullptr) {
    BURST_RETURN_IF_ERROR(CheckSinks(saved.sinks, q, /*needed=*/true));
    *dsinks = Tensor::Empty({1, q.dim(2)}, sum_dtype, q.device());
    FlashSinkGrads(saved.lse.Contiguous(), delta, saved.sinks, dsinks->View({q.dim(2)}));
  }

  // One rank and one part: one call that assigns the gradients where they belong. Else they are
  // accumulated over the calls, in place where dtype and strides allow.
  const bool assign = schedule.shard().num_groups() == 1 &&
                      PartsOf(schedule.for_keys_of(0), takes_blocks).size() == 1;
  const auto sum_of = [&](const Tensor& gradient) {
    if (assign) return gradient;
    const Tensor sum = gradient.dtype() == sum_dtype && gradient.is_contiguous()
                           ? gradient
                           : Tensor::Empty(gradient.shape(), sum_dtype, gradient.device());
    sum.Fill(0);
    return sum;
  };
  const Tensor dq_sum = sum_of(*dq), dk_sum = sum_of(*dk), dv_sum = sum_of(*dv);

  RankScores scores(options_.scores, saved.dropout, group_, q.dim(kHeadAxis), q.device());
  using Positions = std::vector<int32_t>;
  const auto kernel = [&](Ring::Part part, const BlockMask& mask, const Positions& q_positions,
                          const Positions& k_positions, const Ring::Tensors& queries,
                          const Ring::Tensors& keys, const Tensor& dq, const Tensor& dk,
                          const Tensor& dv) {
    const Heads heads = HeadsOf(part, schedule.ranks_per_node() == schedule.shard().num_groups(),
                                q.dim(kHeadAxis), saved.k.dim(kHeadAxis));
    if (heads.count == 0) return;
    const Tensor their_q = heads.OfQueries(queries[0]), their_k = heads.OfKeys(keys[0]);
    const Tensor lse = heads.OfRows(queries[2]), delta = heads.OfRows(queries[3]);
    FlashBackwardParams params;
    params.q = Operand(their_q);
    params.dout = Operand(heads.OfQueries(queries[1]));
    params.lse = lse.raw_data();
    params.delta = delta.raw_data();
    params.k = Operand(their_k);
    params.v = Operand(heads.OfKeys(keys[1]));
    params.dq = Operand(heads.OfQueries(dq));
    params.dk = Operand(heads.OfKeys(dk));
    params.dv = Operand(heads.OfKeys(dv));
    params.assign = assign;
    params.deterministic = options_.deterministic;
    params.shape = KernelShape(options_, their_q, their_k);
    params.shape.scores = scores.For(q_positions, k_positions, heads.first);
    for (const MaskPart& visible : PartsOf(mask, takes_blocks)) {
      SetMask(visible, q.device(), &params.shape);
      kernels.Backward(params);
    }
  };
  const bool burst = Direction(schedule, q.dim(2), saved.k.dim(2), q.dim(3), q.dtype()) ==
                     BackwardDirection::kBurst;
  Ring::BlockGradients gradients;
  gradients.in_transit = RingGradDTypeOf(q.dtype());
  // Of a block of which only some rows are sent, the gradients that come back are of those, and are
  // added to the others at the end.
  const std::vector<BlockRows>* const rows = burst ? schedule.query_rows() : schedule.key_rows();
  Ring::Block own_sums;
  if (burst) {
    own_sums = {{dq_sum, kSeqAxis}};
  } else {
    own_sums = {{dk_sum, kSeqAxis}, {dv_sum, kSeqAxis}};
  }
  gradients.own = own_sums;
  if (rows != nullptr) {
    for (Ring::BlockTensor& own : gradients.own) {
      Shape shape = own.tensor.shape();
      shape[kSeqAxis] = (burst ? schedule.query_route() : schedule.kv_route())
                            .lengths[schedule.shard().group_index()];
      own.tensor = Tensor::Zeros(shape, own.tensor.dtype(), own.tensor.device());
    }
  }
  const int rank = schedule.shard().group_index();
  const auto is_own = [&](int source) { return rows != nullptr && source == rank; };
  const Positions& own_q_positions = schedule.shard().group_positions(rank);
  const Positions& own_k_positions = schedule.key_shard().group_positions(rank);
  const Tensor row_lse = saved.lse.Contiguous();
  if (burst) {
    // K, V, dK, dV stay. Q, dO, lse, delta visit the ranks, and dQ follows them.
    const Ring::Tensors own_keys = {saved.k, saved.v};
    const Ring::Tensors own_queries = {q, saved.dout, row_lse, delta};
    const Ring::Block block = ForSending(
        {{q, kSeqAxis}, {saved.dout, kSeqAxis}, {row_lse, kLseSeqAxis}, {delta, kLseSeqAxis}},
        rows);
    BURST_RETURN_IF_ERROR(ring_->Run(
        schedule.query_route(), block, &gradients,
        [&](int source, Ring::Part part, const Ring::Tensors& visiting, const Ring::Tensors& dq) {
          const bool own = is_own(source);
          kernel(part, schedule.for_queries_of(source),
                 own ? own_q_positions : schedule.queries_sent_by(source), own_k_positions,
                 own ? own_queries : visiting, own_keys, own ? dq_sum : dq[0], dk_sum, dv_sum);
        },
        &stats_.backward));
  } else {
    // Q, dO, lse, delta, dQ stay. K and V visit the ranks, and dK and dV follow them.
    const Ring::Tensors own_queries = {q, saved.dout, row_lse, delta};
    const Ring::Tensors own_keys = {saved.k, saved.v};
    const Ring::Block block = ForSending({{saved.k, kSeqAxis}, {saved.v, kSeqAxis}}, rows);
    BURST_RETURN_IF_ERROR(ring_->Run(
        schedule.kv_route(), block, &gradients,
        [&](int source, Ring::Part part, const Ring::Tensors& visiting, const Ring::Tensors& dkv) {
          const bool own = is_own(source);
          kernel(part, schedule.for_keys_of(source), own_q_positions,
                 own ? own_k_positions : schedule.keys_sent_by(source), own_queries,
                 own ? own_keys : visiting, dq_sum, own ? dk_sum : dkv[0], own ? dv_sum : dkv[1]);
        },
        &stats_.backward));
  }
  if (rows != nullptr) {
    for (size_t i = 0; i < own_sums.size(); ++i) {
      const Tensor& returned = gradients.own[i].tensor;
      if (!gradients.last.empty()) returned.Add(gradients.last[i]);
      if (returned.numel() > 0) AddToRows(returned, own_sums[i].tensor, kSeqAxis, *rows);
    }
    gradients.last.clear();
  }
  const auto finish = [](const Tensor& sum, const Tensor& gradient, const Tensor& last) {
    if (sum.raw_data() != gradient.raw_data()) {
      FlashConvert(sum, gradient, last);
    } else if (!last.null()) {
      sum.Add(last);
    }
  };
  const Ring::Tensors& last = gradients.last;  // of dQ, or of dK and dV; or empty
  const bool arrived = !last.empty();
  finish(dq_sum, *dq, arrived && burst ? last[0] : Tensor());
  finish(dk_sum, *dk, arrived && !burst ? last[0] : Tensor());
  finish(dv_sum, *dv, arrived && !burst ? last[1] : Tensor());
  return absl::OkStatus();
}

}  // namespace burst
