#include "burst/attention/burst_attention.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

FlashAttentionShape KernelShape(const BurstAttentionOptions& options, const VisibleKeys& visible,
                                const Tensor& q, const Tensor& k) {
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
  shape.visible = visible.ranges();
  return shape;
}

// Makes *output a tensor of the given shape, or checks that it is one.
absl::Status EnsureOutput(const char* name, const Shape& shape, DType dtype, DeviceType device,
                          Tensor* output) {
  if (output->null()) *output = Tensor::Empty(shape, dtype, device);
  if (output->shape() != shape || output->dtype() != dtype || !output->is_contiguous()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " must be a contiguous ", Name(dtype), " tensor ", ToString(shape),
                     ", not ", Name(output->dtype()), " ", ToString(output->shape())));
  }
  return absl::OkStatus();
}

Shape LseShape(const Tensor& q) { return {q.dim(0), q.dim(2), q.dim(1)}; }

constexpr int kSeqAxis = 1;     // of [batch, seqlen, heads, head_dim]
constexpr int kLseSeqAxis = 2;  // of [batch, heads, seqlen]

}  // namespace

absl::StatusOr<BackwardDirection> ParseBackwardDirection(absl::string_view name) {
  for (BackwardDirection direction :
       {BackwardDirection::kAuto, BackwardDirection::kBurst, BackwardDirection::kRing}) {
    if (name == Name(direction)) return direction;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown backward '", name, "': use auto, burst or ring"));
}

const char* Name(BackwardDirection direction) {
  switch (direction) {
    case BackwardDirection::kAuto:
      return "auto";
    case BackwardDirection::kBurst:
      return "burst";
    case BackwardDirection::kRing:
      return "ring";
  }
  return "?";
}

BurstAttention::BurstAttention(const BurstAttentionOptions& options, Communicator* comm)
    : options_(options), comm_(comm), ring_(std::make_unique<Ring>(comm)) {}

BurstAttention::~BurstAttention() = default;

absl::StatusOr<std::unique_ptr<BurstAttention>> BurstAttention::Create(
    const BurstAttentionOptions& options, Communicator* comm) {
  if (options.mask.window < 0) {
    return absl::InvalidArgumentError(absl::StrCat("window ", options.mask.window, " is negative"));
  }
  if (!std::isfinite(options.softmax_scale)) {
    return absl::InvalidArgumentError("softmax_scale is not finite");
  }
  return std::unique_ptr<BurstAttention>(new BurstAttention(options, comm));
}

absl::StatusOr<RingSchedule> BurstAttention::Schedule(int64_t seqlen,
                                                      const DocumentStarts& documents) const {
  return RingSchedule::Create(comm_ == nullptr ? 0 : comm_->rank(),
                              comm_ == nullptr ? 1 : comm_->world_size(), options_.layout, seqlen,
                              options_.mask, documents);
}

absl::Status BurstAttention::CheckInputs(const RingSchedule& schedule, const Tensor& q,
                                         const Tensor& k, const Tensor& v) const {
  if (q.ndim() != 4 || k.ndim() != 4 || k.shape() != v.shape() || q.dim(0) != k.dim(0) ||
      q.dim(1) != k.dim(1) || q.dim(3) != k.dim(3) || q.dtype() != k.dtype() ||
      q.dtype() != v.dtype()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "q ", ToString(q.shape()), ", k ", ToString(k.shape()), ", v ", ToString(v.shape()),
        " do not fit: expected [batch, length, heads, head_dim] "
        "of one dtype"));
  }
  if (k.dim(2) == 0 || q.dim(2) % k.dim(2) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(k.dim(2), " key heads do not divide ", q.dim(2), " query heads"));
  }
  const int rank = comm_ == nullptr ? 0 : comm_->rank();
  const int world_size = comm_ == nullptr ? 1 : comm_->world_size();
  if (schedule.rank() != rank || schedule.world_size() != world_size) {
    return absl::InvalidArgumentError(absl::StrCat("the schedule is for rank ", schedule.rank(),
                                                   " of ", schedule.world_size(), ", this is rank ",
                                                   rank, " of ", world_size));
  }
  if (q.dim(1) != schedule.length()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " holds ", schedule.length(),
                                                   " tokens of this schedule, q has ", q.dim(1)));
  }
  if (schedule.document_rows() > 1 && schedule.document_rows() != q.dim(0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("documents of ", schedule.document_rows(), " rows for a batch of ", q.dim(0)));
  }
  return absl::OkStatus();
}

absl::Status BurstAttention::Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                                     const Tensor& v, Tensor* out, Tensor* lse) {
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, k, v));
  BURST_RETURN_IF_ERROR(EnsureOutput("out", q.shape(), q.dtype(), q.device(), out));
  BURST_RETURN_IF_ERROR(EnsureOutput("lse", LseShape(q), q.dtype(), q.device(), lse));

  // Q stays; K, V travel. (O, lse) <- merge((O, lse), attention(Q, K, V)).
  const Ring::Block block = {{k.Contiguous(), kSeqAxis}, {v.Contiguous(), kSeqAxis}};
  bool merge = false;
  return ring_->Run(
      schedule, schedule.key_pass(), block, /*gradients=*/{},
      [&](int source) -> const VisibleKeys& { return schedule.keys_of(source); },
      [&](int, const VisibleKeys& visible, const Ring::Tensors& kv, const Ring::Tensors&) {
        FlashForwardParams params;
        params.shape = KernelShape(options_, visible, q, kv[0]);
        params.q = Operand(q);
        params.k = Operand(kv[0]);
        params.v = Operand(kv[1]);
        params.out = Operand(*out);
        params.lse = lse->raw_data();
        params.merge = merge;
        FlashForward(q.device(), params);
        merge = true;
      },
      &stats_.forward);
}

BackwardDirection BurstAttention::Direction(const RingSchedule& schedule, int64_t num_heads,
                                            int64_t num_kv_heads, int64_t head_dim,
                                            DType dtype) const {
  if (options_.backward != BackwardDirection::kAuto) return options_.backward;
  const int64_t q_bytes = num_heads * head_dim * SizeOf(dtype);
  const int64_t k_bytes = num_kv_heads * head_dim * SizeOf(dtype);
  const int64_t row_bytes = num_heads * SizeOf(dtype);  // lse, or delta
  const RingPass& queries = schedule.query_pass();
  const RingPass& keys = schedule.key_pass();
  const int64_t burst = queries.block_tokens * (2 * q_bytes + 2 * row_bytes) +  // Q, dO, lse, delta
                        queries.gradient_tokens * q_bytes;                      // dQ
  const int64_t ring = keys.block_tokens * 2 * k_bytes +                        // K, V
                       keys.gradient_tokens * 2 * k_bytes;                      // dK, dV
  return burst <= ring ? BackwardDirection::kBurst : BackwardDirection::kRing;
}

absl::Status BurstAttention::Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq,
                                      Tensor* dk, Tensor* dv) {
  const Tensor& q = saved.q;
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, saved.k, saved.v));
  if (saved.out.shape() != q.shape() || saved.dout.shape() != q.shape() ||
      saved.lse.shape() != LseShape(q) ||
      (!saved.dlse.null() && saved.dlse.shape() != LseShape(q))) {
    return absl::InvalidArgumentError(
        absl::StrCat("out ", ToString(saved.out.shape()), ", dout ", ToString(saved.dout.shape()),
                     ", lse ", ToString(saved.lse.shape()), " do not fit q ", ToString(q.shape())));
  }
  BURST_RETURN_IF_ERROR(EnsureOutput("dq", q.shape(), q.dtype(), q.device(), dq));
  BURST_RETURN_IF_ERROR(EnsureOutput("dk", saved.k.shape(), q.dtype(), q.device(), dk));
  BURST_RETURN_IF_ERROR(EnsureOutput("dv", saved.v.shape(), q.dtype(), q.device(), dv));
  for (const Tensor* gradient : {dq, dk, dv}) gradient->Fill(0);

  // delta = rowsum(dO * O) - dlse, once, so that O stays at home.
  const Tensor delta = Tensor::Empty(LseShape(q), q.dtype(), q.device());
  const Tensor dlse = saved.dlse.null() ? Tensor() : saved.dlse.Contiguous();
  FlashDeltaParams delta_params;
  delta_params.shape = KernelShape(options_, VisibleKeys{{}, {}, 1, 0, 0, true}, q, saved.k);
  delta_params.out = Operand(saved.out);
  delta_params.dout = Operand(saved.dout);
  delta_params.dlse = dlse.null() ? nullptr : dlse.raw_data();
  delta_params.delta = delta.raw_data();
  FlashDelta(q.device(), delta_params);

  const auto kernel = [&](const VisibleKeys& visible, const Ring::Tensors& queries,
                          const Ring::Tensors& keys, const Tensor& dq, const Tensor& dk,
                          const Tensor& dv) {
    FlashBackwardParams params;
    params.shape = KernelShape(options_, visible, queries[0], keys[0]);
    params.q = Operand(queries[0]);
    params.dout = Operand(queries[1]);
    params.lse = queries[2].raw_data();
    params.delta = queries[3].raw_data();
    params.k = Operand(keys[0]);
    params.v = Operand(keys[1]);
    params.dq = Operand(dq);
    params.dk = Operand(dk);
    params.dv = Operand(dv);
    FlashBackward(q.device(), params);
  };
  const Ring::Tensors own_queries = {q.Contiguous(), saved.dout.Contiguous(),
                                     saved.lse.Contiguous(), delta};
  const Ring::Tensors own_keys = {saved.k.Contiguous(), saved.v.Contiguous()};

  if (Direction(schedule, q.dim(2), saved.k.dim(2), q.dim(3), q.dtype()) ==
      BackwardDirection::kBurst) {
    // K, V, dK, dV stay; Q, dO, lse, delta travel, and dQ follows them.
    const Ring::Block block = {{own_queries[0], kSeqAxis},
                               {own_queries[1], kSeqAxis},
                               {own_queries[2], kLseSeqAxis},
                               {own_queries[3], kLseSeqAxis}};
    return ring_->Run(
        schedule, schedule.query_pass(), block, {{*dq, kSeqAxis}},
        [&](int source) -> const VisibleKeys& { return schedule.seen_by(source); },
        [&](int, const VisibleKeys& visible, const Ring::Tensors& queries,
            const Ring::Tensors& gradients) {
          kernel(visible, queries, own_keys, gradients[0], *dk, *dv);
        },
        &stats_.backward);
  }
  // Q, dO, lse, delta, dQ stay; K, V travel, and dK, dV follow them.
  const Ring::Block block = {{own_keys[0], kSeqAxis}, {own_keys[1], kSeqAxis}};
  return ring_->Run(
      schedule, schedule.key_pass(), block, {{*dk, kSeqAxis}, {*dv, kSeqAxis}},
      [&](int source) -> const VisibleKeys& { return schedule.keys_of(source); },
      [&](int, const VisibleKeys& visible, const Ring::Tensors& keys,
          const Ring::Tensors& gradients) {
        kernel(visible, own_queries, keys, *dq, gradients[0], gradients[1]);
      },
      &stats_.backward);
}

Variable BurstAttentionOp(Tape& tape, BurstAttention& attention,
                          std::shared_ptr<const RingSchedule> schedule, const Variable& q,
                          const Variable& k, const Variable& v, Variable* lse) {
  Tensor out_value, lse_value;
  const absl::Status status =
      attention.Forward(*schedule, q.value(), k.value(), v.value(), &out_value, &lse_value);
  if (!status.ok()) {
    tape.Fail(status);
    out_value = Tensor::ZerosLike(q.value());
    lse_value = Tensor::Zeros(LseShape(q.value()), q.value().dtype(), q.value().device());
  }
  const Variable out = tape.Output(out_value, {q, k, v});
  const Variable lse_out = tape.Output(lse_value, {q, k, v});
  if (lse != nullptr) *lse = lse_out;
  if (!tape.NeedsGrad({q, k, v})) return out;

  std::vector<Variable> outputs = {out};
  if (lse != nullptr) outputs.push_back(lse_out);
  const bool with_lse = lse != nullptr;
  tape.Record("burst_attention", outputs,
              [&tape, &attention, schedule, q, k, v, out, lse_out, with_lse] {
                BurstAttention::Saved saved;
                saved.q = q.value();
                saved.k = k.value();
                saved.v = v.value();
                saved.out = out.value();
                saved.lse = lse_out.value();
                saved.dout = out.grad().null() ? Tensor::ZerosLike(out.value()) : out.grad();
                if (with_lse) saved.dlse = lse_out.grad();
                Tensor dq, dk, dv;
                const absl::Status status = attention.Backward(*schedule, saved, &dq, &dk, &dv);
                if (!status.ok()) return tape.Fail(status);
                q.AddGrad(dq);
                k.AddGrad(dk);
                v.AddGrad(dv);
              });
  return out;
}

}  // namespace burst
