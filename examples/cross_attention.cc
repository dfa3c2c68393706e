// Computes cross-attention: each rank has some tokens of a long sequence, and some queries of a
// short one, which attend to all of the long one. Compares four ranks (threads of this process)
// with one, forward and backward. The tensors with fewer bytes go around the ring.
//
//   bazel run //examples:cross_attention

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace {

using namespace burst;  // NOLINT: an example reads better without prefixes

constexpr int64_t kHeads = 8, kKvHeads = 2, kHeadDim = 32;

// Returns standard normal numbers that depend on (stream, global position, channel) only.
Tensor RandomTokens(uint64_t stream, const std::vector<int32_t>& positions, int64_t heads) {
  const int64_t length = static_cast<int64_t>(positions.size());
  const Tensor tensor = Tensor::Empty({1, length, heads, kHeadDim}, DType::kFloat32);
  const int64_t channels = heads * kHeadDim;
  for (int64_t i = 0; i < length * channels; ++i) {
    const PhiloxCounter bits =
        Philox(/*key=*/1, stream, positions[i / channels] * channels + i % channels);
    tensor.data<float>()[i] = static_cast<float>(NormalFromBits(bits[0], bits[1])[0]);
  }
  return tensor;
}

struct Results {
  std::vector<float> dk;                   // for all keys, in order; each rank writes its part
  double forward_mb = 0, backward_mb = 0;  // sent by rank 0
  const char* direction = "";              // the direction of the backward
};

absl::Status Run(int ranks, int64_t queries, int64_t keys, Results* results) {
  results->dk.resize(keys * kKvHeads * kHeadDim);
  return RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = Layout::kContiguous;
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    // Two sequences have no common order, so a mask cannot be causal.
    BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                           attention->Schedule(Sequences::Cross(queries, keys), Mask::Full()));
    const std::vector<int32_t>& own_keys = schedule.key_shard().local_positions();

    const AttentionCall call = {
        &schedule, RandomTokens(0, schedule.shard().local_positions(), kHeads),
        RandomTokens(1, own_keys, kKvHeads), RandomTokens(2, own_keys, kKvHeads)};
    AttentionResult result;
    BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
    AttentionGradients gradients = {result.out.Clone()};  // the loss is sum(out^2) / 2
    BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));

    const Tensor& dk = gradients.dk;
    std::copy_n(dk.data<float>(), dk.numel(),
                results->dk.begin() + own_keys.front() * kKvHeads * kHeadDim);
    if (comm.rank() > 0) return absl::OkStatus();
    results->forward_mb = attention->stats().forward.bytes() * 1e-6;
    results->backward_mb = attention->stats().backward.bytes() * 1e-6;
    results->direction = attention->Direction(*schedule.ring(), kHeads, kKvHeads, kHeadDim,
                                              dk.dtype()) == BackwardDirection::kBurst
                             ? "queries"
                             : "keys and values";
    return absl::OkStatus();
  });
}

absl::Status Compare(int64_t queries, int64_t keys) {
  Results one, four;
  BURST_RETURN_IF_ERROR(Run(1, queries, keys, &one));
  BURST_RETURN_IF_ERROR(Run(4, queries, keys, &four));
  double difference = 0;
  for (size_t i = 0; i < one.dk.size(); ++i) {
    difference = std::max(difference, std::fabs(double{one.dk[i]} - four.dk[i]));
  }
  std::printf(
      "%lld queries, %lld keys: dK of four ranks and of one differ by %.1e; a rank sent %.2f MB "
      "forward, %.2f MB backward (%s went around)\n",
      static_cast<long long>(queries), static_cast<long long>(keys), difference, four.forward_mb,
      four.backward_mb, four.direction);
  return absl::OkStatus();
}

}  // namespace

int main() {
  absl::Status status = Compare(/*queries=*/256, /*keys=*/4096);
  if (status.ok()) status = Compare(/*queries=*/4096, /*keys=*/256);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
