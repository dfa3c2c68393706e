// The all-to-all of DeepSpeed Ulysses (arXiv 2309.14509): between this rank's tokens with all
// heads, and the tokens of its whole group with a part of the heads. Knows tokens and heads,
// nothing of attention.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

// The bytes that one rank sent to others of its group.
struct ExchangeTraffic {
  int64_t messages = 0;
  int64_t bytes = 0;
};

class HeadExchange {
 public:
  // A tensor, with its axis of tokens and its axis of heads.
  struct HeadTensor {
    Tensor tensor;
    int token_axis, head_axis;
  };
  using HeadTensors = absl::InlinedVector<HeadTensor, 3>;

  // The heads that a rank of a group of `size` computes. Fewer heads than ranks: each is replicated
  // on size / num_heads of them.
  struct Heads {
    int64_t first, count;
  };
  static Heads HeadsOf(int64_t num_heads, int group_rank, int size);

  // `group` must outlive the object.
  explicit HeadExchange(Communicator* group) : group_(group) {}

  // This rank's tokens, all heads -> the group's tokens in order of position, this rank's heads.
  // The results are contiguous. `shard` is this rank's shard. The group's size divides the number
  // of heads, or the number of heads divides it.
  absl::Status Gather(const TokenShard& shard, const HeadTensors& own,
                      absl::InlinedVector<Tensor, 3>* gathered, ExchangeTraffic* traffic);

  // The reverse; assigns the tensors of `own`. If several ranks have a replicated head, their
  // values are summed in the order of the ranks and in SumDType, as gradients must be.
  absl::Status Scatter(const TokenShard& shard, const absl::InlinedVector<Tensor, 3>& gathered,
                       const HeadTensors& own, ExchangeTraffic* traffic);

 private:
  // Memory for the message to or from every other rank: a part of each tensor. Parts of one dtype
  // are one message.
  class Messages {
   public:
    // shape(i, peer): the shape of the part of tensor i for `peer`.
    Messages(int rank, int size, DeviceType device, const std::vector<DType>& dtypes,
             const std::function<Shape(size_t i, int peer)>& shape);
    const Tensor& part(size_t i, int peer) const { return parts_[i][peer]; }
    const std::vector<Tensor>& to(int peer) const { return messages_[peer]; }

   private:
    std::vector<std::vector<Tensor>> parts_;     // [tensor][peer], slices of the messages
    std::vector<std::vector<Tensor>> messages_;  // by peer; none are empty
  };
  absl::Status Transfer(const Messages& sent, const Messages& received, ExchangeTraffic* traffic);

  Communicator* const group_;
};

}  // namespace burst
