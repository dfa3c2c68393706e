// Runs the work and the messages of tensor parallelism for one attention: the part of a layer that
// is compared with other ways to spread attention over ranks.
//
// Attention itself sends nothing there: a rank has its heads on all tokens. What is sent belongs to
// the products around it, which cost the same with every strategy otherwise. So they are left out,
// as if their weights were identities: the queries are the layer's input x [batch, tokens, heads,
// head_dim], and its output y is attention's. The exchanges of [tokens, width] are the real ones:
//
//   tp     forward: attention, all-reduce of y;       backward: attention, all-reduce of dx
//   tp+sp  forward: all-gather of x, attention, reduce-scatter of y
//          backward: all-gather of dy and, as it was not kept, of x, attention, reduce-scatter of
//          dx
#pragma once

#include "absl/status/status.h"
#include "benchmarks/scaling/problem.h"
#include "burst/attention/attention_schedule.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_exchange.h"

namespace burst {

// A rank's work that an experiment measures.
class AttentionWork {
 public:
  virtual ~AttentionWork() = default;
  virtual absl::Status Forward() = 0;
  virtual absl::Status Backward() = 0;  // after Forward
};

class TensorParallelLayer : public AttentionWork {
 public:
  // A rank's inputs. x and dy: of all tokens (tp) or shard().local_positions() (tp+sp) and all
  // heads; k and v: of all tokens and this rank's KV heads.
  struct Inputs {
    Tensor x, k, v, dy;
  };
  // `attention` is CreateAttentionOf's; it and `comm` must outlive the object.
  TensorParallelLayer(Megatron megatron, const AttentionProblem& problem,
                      SequenceParallelAttention& attention, AttentionSchedule schedule,
                      Communicator* comm);

  const TokenShard& shard() const { return schedule_.shard(); }
  Shape InputShape() const;  // of x, dy, y and dx
  Shape KeyShape() const;    // of k, v, dk and dv
  void SetInputs(const Inputs& inputs) { inputs_ = inputs; }

  absl::Status Forward() override;
  absl::Status Backward() override;

  struct Results {
    Tensor y, dx, dk, dv;
  };
  const Results& results() const { return results_; }

 private:
  // This rank's heads of a tensor of all heads, a slice.
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
