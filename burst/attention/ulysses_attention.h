// UlyssesAttention: each rank of a group gets the tokens of the whole group for a part of the
// heads, computes their attention, and gives every rank its tokens back.
//
// Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509). With a group of all the ranks, the kernel
// sees the whole sequence and the all-to-alls are all there is to send. With smaller groups it is
// the hybrid of Fang and Zhao, "USP" (arXiv 2405.07719): member m of every group forms a ring with
// the members m of the others, and BurstAttention runs over it. Groups are neighbouring ranks,
// where the links are fastest: rank = ring rank * size + member.
//
// Bytes a rank sends to the other members of its group of U, with l tokens of each of B sequences
// on every rank, H heads (K key heads) of D elements of s bytes, and t bytes an element of
// SumDType: (U-1)/U of
//   forward   B l D s (H + 2 K')  q, k, v in    + B l D s H          out back   (+ B l H t, lse)
//   backward  B l D s H           dout in       + B l D s (H + 2 K') dq, dk, dv (+ B l H t, dlse)
// with K' = max(K, U): fewer key heads than members are replicated, and their gradients summed. The
// ring's bytes come on top, those of H / U heads on U l tokens.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/sequence/head_exchange.h"
#include "burst/tensor/tensor.h"

namespace burst {

// InvalidArgument, with the group sizes that would do, unless heads can be shared by a group of
// `size` ranks: size divides num_heads, and of size and num_kv_heads one divides the other.
absl::Status CheckHeadsDivide(int64_t num_heads, int64_t num_kv_heads, int size);

class UlyssesAttention : public SequenceParallelAttention {
 public:
  // Collective in `comm`, which must outlive the object, in groups of `size` ranks. `options` are
  // those of the ring's attention; its ranks_per_node counts the ranks of `comm`, and is a multiple
  // of size. InvalidArgument for bad options or a size that does not divide the number of ranks.
  static absl::StatusOr<std::unique_ptr<UlyssesAttention>> Create(
      const BurstAttentionOptions& options, int size, Communicator* comm);

  absl::StatusOr<RingSchedule> Schedule(int64_t seqlen,
                                        const DocumentStarts& documents = {}) const override;

  // The heads must divide (CheckHeadsDivide). `saved` holds what was gathered, so that Backward
  // need not gather it again.
  absl::Status Forward(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                       const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) override;
  absl::Status Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq, Tensor* dk,
                        Tensor* dv) override;
  // `saved` has out and lse of this rank's heads; q, k, v are gathered again.
  absl::Status Restore(const RingSchedule& schedule, const Tensor& q, const Tensor& k,
                       const Tensor& v, Saved* saved) override;

  // Traffic of the all-to-alls; the ring's is ring().stats().
  struct Stats {
    ExchangeTraffic forward, backward;
  };
  const Stats& stats() const { return stats_; }
  BytesSent bytes_sent() const override;  // both together
  void ResetStats() override;

  const BurstAttention& ring() const { return *attention_; }

 private:
  UlyssesAttention() = default;
  absl::Status CheckSchedule(const RingSchedule& schedule) const;

  BurstAttentionOptions options_;
  std::unique_ptr<Communicator> group_, ring_;
  std::unique_ptr<HeadExchange> exchange_;
  std::unique_ptr<BurstAttention> attention_;  // over the ring
  Stats stats_;
};

}  // namespace burst
