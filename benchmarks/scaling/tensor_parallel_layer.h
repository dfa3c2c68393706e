// Runs the work and the messages of tensor parallelism for one attention. This part of a layer is
// compared with other ways to spread attention over ranks.
//
// In tensor parallelism attention itself sends nothing: a rank has its heads on all tokens. The
// products around attention send. Their GEMMs cost the same with every strategy, so they are left
// out, as if their weights were identities. The queries are the layer's input x [batch, tokens,
// heads, head_dim], and its output y is attention's. The exchanges of [tokens, width] are the real
// ones:
//
//   tp     forward: attention, all-reduce of y;       backward: attention, all-reduce of dx
//   tp+sp  forward: all-gather of x, attention, reduce-scatter of y
//          backward: all-gather of dy and of x (which was not kept), attention, reduce-scatter of
//          dx
#pragma once

#include "absl/status/status.h"
#include "benchmarks/scaling/problem.h"
#include "burst/attention/attention_call.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_exchange.h"

namespace burst {

// The work of a rank that an experiment measures.
class AttentionWork {
 public:
  virtual ~AttentionWork() = default;
  virtual absl::Status Forward() = 0;
  virtual absl::Status Backward() = 0;  // must follow Forward
};

class TensorParallelLayer : public AttentionWork {
 public:
  // A rank's inputs. Tensors x and dy have all heads of all tokens (tp) or of the tokens of
  // shard().local_positions() (tp+sp). Tensors k and v have all tokens and this rank's KV heads.
  struct Inputs {
    Tensor x, k, v, dy;
  };
  // `attention` is made by CreateAttentionOf. It and `comm` must outlive the object.
  TensorParallelLayer(Megatron megatron, const AttentionProblem& problem,
                      SequenceParallelAttention& attention, AttentionSchedule schedule,
                      Communicator* comm);

  const TokenShard& shard() const { return schedule_.shard(); }
  Shape InputShape() const;  // the shape of x, dy, y and dx
  Shape KeyShape() const;    // the shape of k, v, dk and dv
  void SetInputs(const Inputs& inputs) { inputs_ = inputs; }

  absl::Status Forward() override;
  absl::Status Backward() override;

  struct Results {
    Tensor y, dx, dk, dv;
  };
  const Results& results() const { return results_; }

 private:
  // Returns this rank's heads as a slice of a tensor of all heads.
  Tensor OwnHeads(const Tensor& all) const;
  absl::Status Whole(const Tensor& tensor, Tensor* whole) const;
  absl::Status Sum(const Tensor& partial, Tensor* sum) const;

  const bool spread_tokens_;
  const AttentionProblem problem_;
  SequenceParallelAttention& attention_;
  const AttentionSchedule schedule_;
  const int ranks_, rank_;
  const TokenExchange exchange_;
  Inputs inputs_;
  Results results_;
  AttentionCall call_;
  AttentionResult result_;
};

}  // namespace burst
