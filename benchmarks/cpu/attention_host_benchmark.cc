// Measures the host's time of one call of BurstAttention: checks, plans, tensors and messages. The
// kernels compute nothing, and the tensors are small. Argument: ranks (threads).
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {
namespace {

class IdleKernels : public AttentionKernels {
 public:
  absl::Status Check(DeviceType, DType, const HeadWidths&) const override {
    return absl::OkStatus();
  }
  bool TakesBlocks(DType, const HeadWidths&) const override { return true; }
  void Forward(const FlashForwardParams&) const override {}
  void Delta(const FlashDeltaParams&) const override {}
  void Backward(const FlashBackwardParams&) const override {}
};

constexpr int64_t kSeqlen = 128, kCalls = 1000;

absl::Status Call(Communicator* comm, bool backward) {
  const IdleKernels kernels;
  BurstAttentionOptions options;
  options.kernels = &kernels;
  BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, comm));
  BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                         attention->Schedule({kSeqlen}, Mask::Causal()));
  const int64_t length = schedule.shard().group_length();
  const Tensor q = Tensor::Zeros({1, length, 8, 8}, DType::kFloat32);
  const Tensor k = Tensor::Zeros({1, length, 4, 8}, DType::kFloat32);
  const AttentionCall call = {&schedule, q, k, k};
  AttentionResult result;
  BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
  AttentionGradients gradients = {result.out};
  for (int64_t i = 0; i < kCalls; ++i) {
    BURST_RETURN_IF_ERROR(backward ? attention->Backward(call, result, &gradients)
                                   : attention->Forward(call, &result));
  }
  return absl::OkStatus();
}

void Measure(benchmark::State& state, bool backward) {
  const auto ranks = static_cast<int>(state.range(0));
  for (auto _ : state) {
    const absl::Status status =
        RunRanks(ranks, [&](Communicator& comm) { return Call(&comm, backward); });
    if (!status.ok()) state.SkipWithError(std::string(status.message()).c_str());
  }
  state.counters["call"] = benchmark::Counter(
      static_cast<double>(kCalls),
      benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void Forward(benchmark::State& state) { Measure(state, /*backward=*/false); }
void Backward(benchmark::State& state) { Measure(state, /*backward=*/true); }
BENCHMARK(Forward)->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(Backward)->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace burst
