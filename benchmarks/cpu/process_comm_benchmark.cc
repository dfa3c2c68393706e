// Compares messages between processes over sockets (--comm=tcp) with MPI, in turns, in the same
// processes.
//
//   mpirun -np 2 bazel-bin/benchmarks/cpu/process_comm_benchmark
//
// exchange: every rank sends to the next rank and receives from the previous one; the figure is the
// GB/s that a rank sends. allreduce: the figure is GB/s of the fp32 tensor. Both are medians of 21
// turns.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "benchmarks/harness/harness.h"
#include "burst/base/print_error.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/mpi/mpi_communicator.h"
#include "burst/comm/tcp/tcp_communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr int kTurns = 21;

absl::Status Exchange(Communicator& comm, const Tensor& out, const Tensor& in) {
  const int size = comm.world_size(), next = (comm.rank() + 1) % size,
            last = (comm.rank() + size - 1) % size;
  const SendBuffer send = {out.raw_data(), out.size_bytes(), next};
  const ReceiveBuffer receive = {in.raw_data(), in.size_bytes(), last};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
  return comm.Wait(Channel::kRead);
}

// Returns the seconds of one call, averaged over several calls in a row.
absl::StatusOr<double> Time(Communicator& comm, bool reduces, const Tensor& out, const Tensor& in) {
  const int calls = static_cast<int>(std::clamp<int64_t>((8 << 20) / out.size_bytes(), 1, 200));
  BURST_RETURN_IF_ERROR(comm.Barrier());
  const Stopwatch stopwatch;
  for (int call = 0; call < calls; ++call) {
    BURST_RETURN_IF_ERROR(reduces ? comm.AllReduceSum(out) : Exchange(comm, out, in));
  }
  return stopwatch.Seconds() / calls;
}

absl::Status Run() {
  BURST_ASSIGN_OR_RETURN(const auto mpi, CreateMpiCommunicator());
  BURST_ASSIGN_OR_RETURN(const auto launch, DetectProcessLaunch(std::getenv));
  if (!launch.has_value()) return absl::FailedPreconditionError("start it with mpirun");
  BURST_ASSIGN_OR_RETURN(const auto tcp, TcpCommunicator::Create(*launch, TcpOptions()));
  if (mpi->rank() == 0) {
    std::printf("%d processes\n%-10s %10s %10s %10s %8s\n", mpi->world_size(), "", "bytes",
                "tcp us", "mpi us", "mpi/tcp");
  }
  for (const bool reduces : {false, true}) {
    for (int64_t bytes = 64; bytes <= (64 << 20); bytes *= 8) {
      const Tensor out = Tensor::Zeros({bytes / 4}, DType::kFloat32), in = Tensor::ZerosLike(out);
      std::vector<double> times[2];
      for (int turn = 0; turn < kTurns; ++turn) {
        for (const bool first : {true, false}) {
          BURST_ASSIGN_OR_RETURN(const double time, Time(first ? *tcp : *mpi, reduces, out, in));
          times[first ? 0 : 1].push_back(time);
        }
      }
      if (mpi->rank() != 0) continue;
      const double a = Median(times[0]), b = Median(times[1]);
      std::printf("%-10s %10ld %10.1f %10.1f %8.2f   tcp %.2f GB/s\n",
                  reduces ? "allreduce" : "exchange", static_cast<long>(bytes), a * 1e6, b * 1e6,
                  b / a, bytes / a * 1e-9);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace burst

int main() {
  const absl::Status status = burst::Run();
  if (!status.ok()) burst::PrintError(status);
  return status.ok() ? 0 : 1;
}
