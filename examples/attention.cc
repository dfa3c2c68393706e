// Uses BurstAttention without the trainer. Each of four ranks (threads of this process) has a
// quarter of a sequence. They compute attention over all of it, forward and backward.
//
//   bazel run //examples:attention

#include <cstdio>

#include "burst/attention/burst_attention.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace {

using namespace burst;  // NOLINT: an example reads better without prefixes

constexpr int64_t kBatch = 1, kSeqlen = 4096, kHeads = 8, kKvHeads = 2, kHeadDim = 64;

// Returns standard normal numbers that depend on (stream, global position, channel) only.
Tensor RandomTokens(uint64_t stream, const std::vector<int32_t>& positions, int64_t heads) {
  const int64_t length = static_cast<int64_t>(positions.size());
  const Tensor tensor = Tensor::Empty({kBatch, length, heads, kHeadDim}, DType::kFloat32);
  const int64_t channels = heads * kHeadDim;
  for (int64_t i = 0; i < length; ++i) {
    for (int64_t c = 0; c < channels; ++c) {
      const PhiloxCounter bits = Philox(/*key=*/1, stream, positions[i] * channels + c);
      tensor.data<float>()[i * channels + c] =
          static_cast<float>(NormalFromBits(bits[0], bits[1])[0]);
    }
  }
  return tensor;
}

absl::Status Run(Communicator& comm) {
  BurstAttentionOptions options;
  options.layout = Layout::kZigzag;  // gives ranks equal work under a causal mask
  BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
  BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                         attention->Schedule(kSeqlen, Mask::Causal()));

  // This rank's tokens, in order of their global positions.
  const std::vector<int32_t>& positions = schedule.shard().local_positions();
  const Tensor q = RandomTokens(0, positions, kHeads);
  const Tensor k = RandomTokens(1, positions, kKvHeads);
  const Tensor v = RandomTokens(2, positions, kKvHeads);

  const AttentionCall call = {&schedule, q, k, v};
  AttentionResult result;  // out, like q, and lse, [batch, heads, length]
  BURST_RETURN_IF_ERROR(attention->Forward(call, &result));

  AttentionGradients gradients = {/*dout=*/result.out.Clone()};  // and dq, dk, dv
  BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));

  const RingTraffic& forward = attention->stats().forward;
  const RingTraffic& backward = attention->stats().backward;
  std::printf(
      "rank %d: %lld tokens from position %d on; forward sent %lld blocks, %.2f MB; "
      "backward (%s) sent %lld blocks and %lld gradients, %.2f MB\n",
      comm.rank(), static_cast<long long>(schedule.shard().local_length()), positions.front(),
      static_cast<long long>(forward.blocks.total().transfers), forward.bytes() * 1e-6,
      Name(attention->Direction(*schedule.ring(), kHeads, kKvHeads, kHeadDim, q.dtype())),
      static_cast<long long>(backward.blocks.total().transfers),
      static_cast<long long>(backward.gradients.total().transfers), backward.bytes() * 1e-6);
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = RunRanks(4, Run);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
