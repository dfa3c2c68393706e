// Tests messages of GPU memory between ranks that are threads. It uses the GPU communicator, where
// each rank owns a GPU, and the thread communicator, which needs only one GPU. The option --ranks=N
// tests up to N ranks with their own GPU (default 2).
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"
#include "tests/comm/communicator_checks.h"

namespace burst {
namespace {

int max_ranks = 2;

class SharedGpus : public testing::TestWithParam<CommunicatorCheck> {};
INSTANTIATE_TEST_SUITE_P(All, SharedGpus, testing::ValuesIn(CommunicatorChecks()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(SharedGpus, Check) {
  for (int ranks : {1, 2, 3, 8}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    EXPECT_EQ(RunRanks(ranks,
                       [](Communicator& comm) {
                         const ScopedCudaDevice device(comm.rank() % CudaDeviceCount(),
                                                       comm.rank());
                         return GetParam().run(comm, {DeviceType::kCuda});
                       }),
              absl::OkStatus());
  }
}

// All checks use one world, because NCCL takes a second to make one.
TEST(Nccl, Checks) {
  for (int ranks = 1; ranks <= max_ranks; ++ranks) {
    EXPECT_EQ(RunCudaRanks(ranks,
                           [](Communicator& comm) {
                             const bool alone = comm.world_size() == 1;
                             for (const CommunicatorCheck& check : CommunicatorChecks()) {
                               SCOPED_TRACE(testing::Message() << check.name << " of "
                                                               << comm.world_size() << " ranks");
                               BURST_RETURN_IF_ERROR(check.run(comm, {}));
                               BURST_RETURN_IF_ERROR(
                                   check.run(comm, {DeviceType::kCuda, /*fixed_order=*/alone,
                                                    /*posts_in_turn=*/true}));
                             }
                             return absl::OkStatus();
                           }),
              absl::OkStatus());
  }
}

const absl::Status kDiskFull = absl::ResourceExhaustedError("disk full");

// The ways to wait for a message that does not come.
struct Waiting {
  const char* name;
  std::function<absl::Status(Communicator&)> wait;
};
void PrintTo(const Waiting& waiting, std::ostream* out) { *out << waiting.name; }

// Receives a message that the previous rank never sends.
absl::Status Receive(Communicator& comm, bool waits_for_gpu) {
  const Tensor tensor = Tensor::Zeros({16}, DType::kFloat32, DeviceType::kCuda);
  const int last = (comm.rank() + comm.world_size() - 1) % comm.world_size();
  const ReceiveBuffer receive = {tensor.raw_data(), 64, last, DeviceType::kCuda};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive, 1}));
  BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  if (waits_for_gpu) SynchronizeDevice(DeviceType::kCuda);
  return comm.AllGather(1).status();
}

const std::vector<Waiting>& WaysToWait() {
  static const auto* const ways = new std::vector<Waiting>{
      {"Receive", [](Communicator& comm) { return Receive(comm, /*waits_for_gpu=*/false); }},
      {"ReceiveOnGpu", [](Communicator& comm) { return Receive(comm, /*waits_for_gpu=*/true); }},
      {"AllReduceOnGpu",
       [](Communicator& comm) {
         const Tensor tensor = Tensor::Zeros({1 << 20}, DType::kFloat32, DeviceType::kCuda);
         BURST_RETURN_IF_ERROR(comm.AllReduceSum(tensor));
         (void)tensor.ToVector<float>();
         return comm.Wait(Channel::kRead);
       }},
      {"AllReduceOnHost",
       [](Communicator& comm) { return comm.AllReduceSum(Tensor::Zeros({9}, DType::kFloat32)); }},
      {"Barrier", [](Communicator& comm) { return comm.Barrier(); }},
      {"Split", [](Communicator& comm) { return comm.Split(0, 0).status(); }},
  };
  return *ways;
}

class NcclAbort : public testing::TestWithParam<Waiting> {};
INSTANTIATE_TEST_SUITE_P(All, NcclAbort, testing::ValuesIn(WaysToWait()),
                         [](const auto& info) { return info.param.name; });

// Ranks that wait for a rank that fails are freed within seconds and told why.
TEST_P(NcclAbort, AnErrorReturnedFreesThoseThatWait) {
  if (max_ranks == 1) GTEST_SKIP() << "told to use one GPU: nobody waits";
  for (bool in_group : {false, true}) {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(
        RunCudaRanks(max_ranks,
                     [&](Communicator& comm) -> absl::Status {
                       // Connections are made at the first use, which is another way to wait.
                       const Tensor one = Tensor::Zeros({1}, DType::kFloat32, DeviceType::kCuda);
                       BURST_ASSIGN_OR_RETURN(const auto group, comm.Split(0, 0));
                       Communicator& waits_in = in_group ? *group : comm;
                       BURST_RETURN_IF_ERROR(waits_in.AllReduceSum(one));
                       if (comm.rank() == 1) {
                         std::this_thread::sleep_for(std::chrono::milliseconds(300));
                         return kDiskFull;
                       }
                       const absl::Status status = GetParam().wait(waits_in);
                       EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
                       EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 of")) << status;
                       EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
                       return status;
                     }),
        kDiskFull);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  }
}

TEST(RunCudaRanks, RefusesMoreRanksThanGpus) {
  const absl::Status status =
      RunCudaRanks(CudaDeviceCount() + 1, [](Communicator&) { return absl::OkStatus(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(
      absl::StrContains(status.message(), "ranks need one GPU each, and this machine has "));
}

TEST(RunCudaRanks, SendsToItselfMustBeReceivedInTheSamePost) {
  EXPECT_EQ(RunCudaRanks(
                1,
                [](Communicator& comm) {
                  const Tensor a = Tensor::Zeros({4}, DType::kFloat32, DeviceType::kCuda);
                  const SendBuffer send = {a.raw_data(), 16, 0, DeviceType::kCuda};
                  const ReceiveBuffer receive = {a.raw_data(), 8, 0, DeviceType::kCuda};
                  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
                  EXPECT_EQ(comm.Post(Channel::kRead, {&send, 1}, {}).code(), kInvalid);
                  EXPECT_EQ(comm.Post(Channel::kRead, {}, {&receive, 1}).code(), kInvalid);
                  EXPECT_EQ(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}).code(), kInvalid);
                  return comm.Wait(Channel::kRead);
                }),
            absl::OkStatus());
}

int Main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--ranks=") || !absl::SimpleAtoi(argument, &max_ranks)) {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (CudaDeviceCount() < max_ranks) {
    std::fprintf(stderr, "error: --ranks=%d needs as many GPUs, and this machine has %d\n",
                 max_ranks, CudaDeviceCount());
    return 1;
  }
  return RUN_ALL_TESTS();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
