#include "model/tensor_parallel.h"

#include "absl/strings/str_cat.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"
#include "burst/sequence/head_exchange.h"

namespace burst {

TensorParallel::TensorParallel(Communicator* group, bool sequence_parallel)
    : ranks_(group->world_size()),
      rank_(group->rank()),
      sequence_parallel_(sequence_parallel),
      exchange_(group) {}

absl::Status TensorParallel::Check(absl::string_view name, const ModelConfig& given, int ranks) {
  const ModelConfig config = given.WithDefaults();
  BURST_RETURN_IF_ERROR(CheckHeadsDivide(name, config.heads, config.kv_heads, ranks));
  if (config.ffn % ranks == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": must be a divisor of the ", config.ffn,
                                                 " channels of the ffn; got ", ranks,
                                                 "; give one"));
}

// ---- Parameters.

ParameterSharding TensorParallel::Sharded(int axis, const std::vector<int64_t>& blocks,
                                          int64_t unit) const {
  ParameterSharding sharding;
  if (ranks_ == 1) return sharding;
  sharding.ranks = ranks_;
  sharding.rank = rank_;
  sharding.axis = axis;
  for (int r = 0; r < ranks_; ++r) {
    std::vector<ShardSlice>& part = sharding.shards.emplace_back();
    int64_t block_begin = 0;
    for (int64_t count : blocks) {
      const HeadExchange::Heads own = HeadExchange::HeadsOf(count, r, ranks_);
      const int replicas = count < ranks_ ? static_cast<int>(ranks_ / count) : 1;
      part.push_back({(block_begin + own.first) * unit, own.count * unit, replicas});
      block_begin += count;
    }
  }
  return sharding;
}

ParameterSharding TensorParallel::Replicated() const {
  ParameterSharding sharding;
  sharding.ranks = ranks_;
  sharding.rank = rank_;
  return sharding;
}

// Where every rank has all tokens, it computes the complete gradient as well.
ParameterSharding TensorParallel::ReplicatedInLayers() const {
  ParameterSharding sharding = Replicated();
  sharding.replicated_gradient = ranks_ > 1 && !sequence_parallel_;
  return sharding;
}

int64_t TensorParallel::LocalCount(int64_t count) const {
  return HeadExchange::HeadsOf(count, rank_, ranks_).count;
}

// ---- Transfers.

Tensor TensorParallel::Gather(Tape& tape, const TokenShard& shard, const Tensor& own) const {
  Tensor all;
  const absl::Status status = exchange_.Gather(shard, own, &all);
  if (status.ok()) return all;
  tape.Fail(status);
  return Tensor::Zeros({own.dim(0), shard.group_length(), own.dim(2)}, own.dtype(), own.device());
}

Tensor TensorParallel::ReduceScatter(Tape& tape, const TokenShard& shard, const Tensor& all) const {
  Tensor own;
  const absl::Status status = exchange_.ReduceScatter(shard, all, &own);
  if (status.ok()) return own;
  tape.Fail(status);
  const int64_t length = shard.local_length();
  return Tensor::Zeros({all.dim(0), length, all.dim(2)}, all.dtype(), all.device());
}

void TensorParallel::AllReduce(Tape& tape, const Tensor& numbers) const {
  const absl::Status status = exchange_.AllReduce(numbers);
  if (!status.ok()) tape.Fail(status);
}

// ---- Ops.

//   tp: y = all tokens of x;  dx = this rank's tokens of dy, which is complete on every rank
Variable TensorParallel::ToLayers(Tape& tape, const Shard& shard, const Variable& x) const {
  if (ranks_ == 1 || sequence_parallel_) return x;
  const Variable y = tape.Output(Gather(tape, *shard, x.value()), {x});
  if (tape.NeedsGrad({x})) {
    tape.Record("to_layers", {y}, [=] { x.AddGrad(TokenExchange::Own(*shard, y.grad())); });
  }
  return y;
}

//   tp: y = this rank's tokens of x;  dx = all tokens of dy
Variable TensorParallel::FromLayers(Tape& tape, const Shard& shard, const Variable& x) const {
  if (ranks_ == 1 || sequence_parallel_) return x;
  const Variable y = tape.Output(TokenExchange::Own(*shard, x.value()), {x});
  if (tape.NeedsGrad({x})) {
    tape.Record("from_layers", {y},
                [=, &tape] { x.AddGrad(Gather(tape, *shard, y.grad().Contiguous())); });
  }
  return y;
}

//   tp:     y = x               dx = all-reduce(dy)
//   tp+sp:  y = all-gather(x)   dx = reduce-scatter(dy)
//
// The backward posts the all-gather of y, computes dy and waits for the gather. Then it posts the
// reduction of dy, computes the gradient of the weights from y, and waits for the reduction.
TensorParallel::Columns TensorParallel::BeginColumns(Tape& tape, const Shard& shard,
                                                     const Variable& x) const {
  Columns columns;
  const Variable y =
      tape.Output(sequence_parallel_ ? Gather(tape, *shard, x.value()) : x.value(), {x}, x.scale());
  columns.x = y;
  if (!tape.NeedsGrad({x})) return columns;
  const auto pending = std::make_shared<TokenExchange::Pending>();
  columns.pending = pending;
  columns.dx_done = [=, &tape] {
    // Only one GEMM reads dy, so it may be reduced in place.
    const Tensor dy = y.grad().Contiguous();
    absl::Status status;
    if (!sequence_parallel_) {
      pending->result = dy;
      status = exchange_.PostAllReduce(dy);
    } else {
      status = exchange_.Wait();
      y.SetValue(status.ok() ? TokenExchange::Gathered(*shard, *pending)
                             : Tensor::Zeros(y.shape(), y.value().dtype(), dy.device()));
      if (status.ok()) status = exchange_.PostReduceScatter(*shard, dy, pending.get());
    }
    if (!status.ok()) tape.Fail(status);
  };
  tape.Record("columns", {y}, [=, &tape] {
    const absl::Status status = exchange_.Wait();
    if (!status.ok()) return tape.Fail(status);
    x.AddGrad(pending->result);
  });
  return columns;
}

void TensorParallel::EndColumns(Tape& tape, const Shard& shard, const Variable& x,
                                const Columns& columns) const {
  if (!sequence_parallel_ || !tape.NeedsGrad({x})) return;
  columns.x.ForgetValue();
  const auto pending = columns.pending;
  tape.OnBackward([=, &tape] {
    const absl::Status status = exchange_.PostGather(*shard, x.value(), pending.get());
    if (!status.ok()) tape.Fail(status);
  });
}

//   tp:     y = all-reduce(partial) + residual       dpartial = dy               dresidual = dy
//   tp+sp:  y = reduce-scatter(partial) + residual   dpartial = all-gather(dy)   dresidual = dy
Variable TensorParallel::SumRows(Tape& tape, const Shard& shard, const Variable& partial,
                                 const Variable& residual) const {
  Tensor sum = partial.value();
  if (sum.null()) {  // ResultUse::kUnread
    const int64_t length = sequence_parallel_ ? shard->local_length() : sum.dim(1);
    sum = Tensor::Null({sum.dim(0), length, sum.dim(2)}, sum.dtype(), sum.device());
  } else if (sequence_parallel_) {
    sum = ReduceScatter(tape, *shard, sum);
    partial.ForgetValue();  // no backward reads a GEMM's result
  } else {
    AllReduce(tape, sum);
  }
  if (residual.defined() && !sum.null()) sum.Add(residual.value());
  const Variable y = tape.Output(sum, {partial, residual});
  if (!tape.NeedsGrad({partial, residual})) return y;
  tape.Record("sum_rows", {y}, [=, &tape] {
    const Tensor dy = y.grad().Contiguous();
    if (residual.defined()) residual.AddGrad(dy);
    partial.AddGrad(sequence_parallel_ ? Gather(tape, *shard, dy) : dy);
  });
  return y;
}

Variable TensorParallel::ColumnParallel(Tape& tape, const Shard& shard, const Variable& x,
                                        const ColumnGemm& gemm) const {
  if (ranks_ == 1) return gemm(x, nullptr);
  const Columns columns = BeginColumns(tape, shard, x);
  const Variable y = gemm(columns.x, columns.dx_done);
  EndColumns(tape, shard, x, columns);
  return y;
}

Variable TensorParallel::RowParallel(Tape& tape, const Shard& shard, const Variable& bias,
                                     const Variable& residual, const RowGemm& gemm) const {
  if (ranks_ == 1) return gemm(bias, residual);
  const Variable partial = gemm(rank_ == 0 ? bias : Variable(), Variable());
  return SumRows(tape, shard, partial, residual);
}

Tensor TensorParallel::AttentionPositions(Tape& tape, const Shard& shard, const Tensor& own) const {
  if (ranks_ == 1) return own;
  Tensor all;
  const absl::Status status = exchange_.Gather(*shard, own, &all);
  if (status.ok()) return all;
  tape.Fail(status);
  return Tensor::Zeros({own.dim(0), shard->group_length()}, own.dtype(), own.device());
}

const std::vector<int32_t>& TensorParallel::StreamPositions(const TokenShard& shard) const {
  const bool all = ranks_ > 1 && !sequence_parallel_;
  return all ? shard.group_positions(shard.group_index()) : shard.local_positions();
}

}  // namespace burst
