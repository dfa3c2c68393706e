// Times a transfer around the ring and an all-reduce between two threads. Compares them with the
// memcpy that bounds them, on both cores at once. The argument is the bytes of a rank's buffer;
// bytes_per_second counts one rank's bytes. Up to a megabyte the memcpy stays in its core's cache,
// where another rank's data cannot be. So the bound is fair at 16 MiB.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/status/status.h"
#include "benchmarks/harness/harness.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr int kRanks = 2;

// Times step(communicator, a, b) on all ranks, from one barrier to the next, many steps at a time.
// a and b are the rank's buffers, float32 [bytes / 4].
template <typename Step>
void Measure(benchmark::State& state, Step step) {
  const int64_t bytes = state.range(0);
  const int steps = static_cast<int>(std::clamp<int64_t>((int64_t{1} << 26) / bytes, 4, 2000));
  for (auto _ : state) {
    double seconds = 0;
    const absl::Status status = RunRanks(kRanks, [&](Communicator& comm) {
      const Tensor a = Tensor::Zeros({bytes / 4}, DType::kFloat32), b = Tensor::ZerosLike(a);
      BURST_RETURN_IF_ERROR(step(comm, a, b));  // scratch is allocated, pages are touched
      BURST_RETURN_IF_ERROR(comm.Barrier());
      const Stopwatch stopwatch;
      for (int i = 0; i < steps; ++i) BURST_RETURN_IF_ERROR(step(comm, a, b));
      BURST_RETURN_IF_ERROR(comm.Barrier());
      if (comm.rank() == 0) seconds = stopwatch.Seconds();
      return absl::OkStatus();
    });
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
    state.SetIterationTime(seconds);
  }
  state.SetBytesProcessed(state.iterations() * steps * bytes);
  state.counters["seconds_per_step"] = benchmark::Counter(
      steps, benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}

void Memcpy(benchmark::State& state) {
  Measure(state, [](Communicator&, const Tensor& a, const Tensor& b) {
    std::memcpy(b.raw_data(), a.raw_data(), a.size_bytes());
    benchmark::DoNotOptimize(b.raw_data());
    benchmark::ClobberMemory();
    return absl::OkStatus();
  });
}

void RingTransfer(benchmark::State& state) {
  Measure(state, [](Communicator& comm, const Tensor& a, const Tensor& b) {
    const int next = (comm.rank() + 1) % kRanks, last = (comm.rank() + kRanks - 1) % kRanks;
    const SendBuffer send = {a.raw_data(), a.size_bytes(), next};
    const ReceiveBuffer receive = {b.raw_data(), b.size_bytes(), last};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    return comm.Wait(Channel::kRead);
  });
}

void AllReduce(benchmark::State& state) {
  Measure(state,
          [](Communicator& comm, const Tensor& a, const Tensor&) { return comm.AllReduceSum(a); });
}

// Times the base class's algorithm, which transports without shared memory use.
void AllReduceByMessages(benchmark::State& state) {
  Measure(state, [](Communicator& comm, const Tensor& a, const Tensor&) {
    return comm.Communicator::AllReduceSum(a);
  });
}

void Sizes(benchmark::internal::Benchmark* benchmark) {
  benchmark->UseManualTime()->Unit(benchmark::kMillisecond)->MinTime(0.2);
  for (int64_t bytes : {int64_t{256}, int64_t{1} << 16, int64_t{1} << 20, int64_t{1} << 24}) {
    benchmark->Arg(bytes);
  }
}

BENCHMARK(Memcpy)->Apply(Sizes);
BENCHMARK(RingTransfer)->Apply(Sizes);
BENCHMARK(AllReduce)->Apply(Sizes);
BENCHMARK(AllReduceByMessages)->Apply(Sizes);

}  // namespace
}  // namespace burst
