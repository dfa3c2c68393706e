// Uses attention from another project. Two ranks, threads of this process, share a sequence of four
// tokens. Every key is equal, so each token's output is the mean of the values up to it: 0, 1/2, 1,
// 3/2.

#include <cmath>
#include <cstdio>

#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace {

absl::Status Attend(burst::Communicator& comm) {
  BURST_ASSIGN_OR_RETURN(const auto attention, burst::BurstAttention::Create({}, &comm));
  BURST_ASSIGN_OR_RETURN(const burst::AttentionSchedule schedule,
                         attention->Schedule(/*seqlen=*/4, burst::Mask::Causal()));
  const std::vector<int32_t>& positions = schedule.shard().local_positions();
  const burst::Shape shape = {1, static_cast<int64_t>(positions.size()), 1, 1};
  const burst::Tensor q = burst::Tensor::Zeros(shape, burst::DType::kFloat32), k = q;
  const burst::Tensor v = burst::Tensor::Zeros(shape, burst::DType::kFloat32);
  for (size_t i = 0; i < positions.size(); ++i) {
    v.data<float>()[i] = static_cast<float>(positions[i]);
  }
  burst::AttentionResult result;
  BURST_RETURN_IF_ERROR(attention->Forward({&schedule, q, k, v}, &result));
  for (size_t i = 0; i < positions.size(); ++i) {
    const float value = result.out.data<float>()[i],
                expected = 0.5F * static_cast<float>(positions[i]);
    std::printf("rank %d token %d: %g\n", comm.rank(), positions[i], value);
    if (std::fabs(value - expected) > 1e-6F) return absl::InternalError("not the expected value");
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = burst::RunRanks(/*world_size=*/2, Attend);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
