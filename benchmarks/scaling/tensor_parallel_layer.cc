#include "benchmarks/scaling/tensor_parallel_layer.h"

#include <utility>

#include "burst/base/status.h"
#include "burst/sequence/head_exchange.h"

namespace burst {

TensorParallelLayer::TensorParallelLayer(Megatron megatron, const AttentionProblem& problem,
                                         SequenceParallelAttention& attention,
                                         AttentionSchedule schedule, Communicator* comm)
    : spread_tokens_(megatron == Megatron::kTpSp),
      problem_(problem),
      attention_(attention),
      schedule_(std::move(schedule)),
      ranks_(comm->world_size()),
      rank_(comm->rank()),
      exchange_(comm) {}

Shape TensorParallelLayer::InputShape() const {
  const int64_t local = shard().local_length();
  return {problem_.batch, spread_tokens_ ? local : problem_.seqlen, problem_.heads,
          problem_.head_dim};
}

Shape TensorParallelLayer::KeyShape() const {
  return {problem_.batch, problem_.seqlen,
          HeadExchange::HeadsOf(problem_.kv_heads, rank_, ranks_).count, problem_.head_dim};
}

Tensor TensorParallelLayer::OwnHeads(const Tensor& all) const {
  const HeadExchange::Heads own = HeadExchange::HeadsOf(problem_.heads, rank_, ranks_);
  return all.Slice(2, own.first, own.count);
}

// Gathers all tokens of a tensor that enters the layer.
absl::Status TensorParallelLayer::Whole(const Tensor& tensor, Tensor* whole) const {
  if (spread_tokens_) return exchange_.Gather(shard(), tensor, whole);
  *whole = tensor;
  return absl::OkStatus();
}

// Sums a tensor that leaves the layer over ranks, on the tokens that this rank keeps.
absl::Status TensorParallelLayer::Sum(const Tensor& partial, Tensor* sum) const {
  if (spread_tokens_) return exchange_.ReduceScatter(shard(), partial, sum);
  *sum = partial;
  return exchange_.AllReduce(*sum);
}

absl::Status TensorParallelLayer::Forward() {
  const Shape whole_shape = {problem_.batch, problem_.seqlen, problem_.heads, problem_.head_dim};
  call_ = {&schedule_, Tensor(), inputs_.k, inputs_.v};
  {
    Tensor x;
    BURST_RETURN_IF_ERROR(Whole(inputs_.x, &x));
    call_.q = OwnHeads(x).Clone();  // a product would make a copy, too, and not keep x
  }
  const Tensor partial = Tensor::Zeros(whole_shape, problem_.dtype, problem_.device);
  result_.out = OwnHeads(partial);
  BURST_RETURN_IF_ERROR(attention_.Forward(call_, &result_));
  result_.out = result_.out.Clone();
  return Sum(partial, &results_.y);
}

absl::Status TensorParallelLayer::Backward() {
  Tensor dy, x;
  BURST_RETURN_IF_ERROR(Whole(inputs_.dy, &dy));
  const Tensor partial = Tensor::Zeros(dy.shape(), dy.dtype(), dy.device());
  AttentionGradients gradients = {OwnHeads(dy), /*dlse=*/{}, OwnHeads(partial), results_.dk,
                                  results_.dv};
  BURST_RETURN_IF_ERROR(attention_.Backward(call_, result_, &gradients));
  results_.dk = gradients.dk;
  results_.dv = gradients.dv;
  BURST_RETURN_IF_ERROR(Whole(inputs_.x, &x));  // the weights' gradient would need it
  return Sum(partial, &results_.dx);
}

}  // namespace burst
