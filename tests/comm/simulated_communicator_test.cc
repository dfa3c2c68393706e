// Tests times by formulas. The tests of the thread communicator check that the host's messages
// arrive.
#include "burst/comm/simulated/simulated_communicator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr double kLinks = 1e11, kNetwork = 1e10, kMessage = 1e-5;

GpuModel Model() {
  GpuModel model;
  model.bandwidth = 1e12;
  model.links = kLinks;
  model.network = kNetwork;
  model.message_seconds = kMessage;
  return model;
}

Tensor OnGpu(int64_t floats) { return Tensor::Empty({floats}, DType::kFloat32, DeviceType::kCuda); }

// Sends a tensor to the next rank and receives one from the rank before.
absl::Status Shift(Communicator& comm, Channel channel, const Tensor& sent,
                   const Tensor& received) {
  const int n = comm.world_size();
  const SendBuffer send = {sent.raw_data(), sent.size_bytes(), (comm.rank() + 1) % n,
                           DeviceType::kCuda};
  const ReceiveBuffer receive = {received.raw_data(), received.size_bytes(),
                                 (comm.rank() + n - 1) % n, DeviceType::kCuda};
  return comm.Post(channel, {&send, 1}, {&receive, 1});
}

void OnRanks(int ranks, int ranks_per_node,
             const std::function<absl::Status(Communicator&, SimulatedGpu&)>& body) {
  const absl::Status status = RunSimulatedRanks(ranks, ranks_per_node, Model(), body);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SimulatedCommunicator, AMessageTakesTheTimeOfItsBytes) {
  OnRanks(4, 0, [](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 20), b = OnGpu(1 << 20);
    BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
    EXPECT_EQ(gpu.now(), 0);  // no rank waits yet
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_NEAR(gpu.now(), kMessage + 4 * (1 << 20) / kLinks, 1e-12);
    EXPECT_EQ(comm.stats().bytes_sent[0], 4 << 20);
    return absl::OkStatus();
  });
}

// A message costs no time while a longer kernel runs.
TEST(SimulatedCommunicator, MessagesAreBesideKernels) {
  OnRanks(2, 0, [](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 20), b = OnGpu(1 << 20);
    BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
    BURST_RETURN_IF_ERROR(Shift(comm, Channel::kGradient, a, b));
    gpu.RunKernel(0, 1);
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    EXPECT_EQ(gpu.now(), 1);
    return absl::OkStatus();
  });
}

TEST(SimulatedCommunicator, MessagesOfAChannelFollowEachOther) {
  OnRanks(2, 0, [](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 20), b = OnGpu(1 << 20);
    for (int i = 0; i < 3; ++i) BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_NEAR(gpu.now(), 3 * (kMessage + 4 * (1 << 20) / kLinks), 1e-12);
    return absl::OkStatus();
  });
}

// Rank 0 comes after 2 s. Rank 1, which receives from it, then has the message. Rank 2 does not
// wait for it.
TEST(SimulatedCommunicator, ALateSenderIsWaitedFor) {
  OnRanks(3, 0, [](Communicator& comm, SimulatedGpu& gpu) {
    if (comm.rank() == 0) gpu.RunKernel(0, 2);
    const Tensor a = OnGpu(1 << 10), b = OnGpu(1 << 10);
    BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    const double message = kMessage + 4096 / kLinks;
    EXPECT_NEAR(gpu.now(), message + (comm.rank() == 2 ? 0 : 2), 1e-12) << comm.rank();
    return absl::OkStatus();
  });
}

// Nodes have two ranks, and ranks 1 and 3 send to another node.
TEST(SimulatedCommunicator, TheNetworkIsBetweenNodes) {
  OnRanks(4, 2, [](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 20);
    const int peer = comm.rank() ^ 1;  // the other rank of the node
    const SendBuffer send = {a.raw_data(), a.size_bytes(), peer, DeviceType::kCuda};
    const ReceiveBuffer receive = {a.raw_data(), a.size_bytes(), peer, DeviceType::kCuda};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_NEAR(gpu.now(), kMessage + 4 * (1 << 20) / kLinks, 1e-12);
    const double begin = gpu.now();
    const Tensor b = OnGpu(1 << 20);
    BURST_RETURN_IF_ERROR(Shift(comm, Channel::kGradient, a, b));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    // In a ring of four every rank either sends to another node or receives from one.
    EXPECT_NEAR(gpu.now() - begin, kMessage + 4 * (1 << 20) / kNetwork, 1e-12);
    return absl::OkStatus();
  });
}

TEST(SimulatedCommunicator, CollectivesBeginWithTheLastRank) {
  OnRanks(4, 0, [](Communicator& comm, SimulatedGpu& gpu) {
    gpu.RunKernel(0, comm.rank());
    const Tensor sum = OnGpu(1 << 20), part = OnGpu(1 << 18);
    const double bytes = 4 * (1 << 20);
    double expected = 3 + kMessage + 2 * 0.75 * bytes / kLinks;
    BURST_RETURN_IF_ERROR(comm.AllReduceSum(sum));
    EXPECT_NEAR(gpu.now(), expected, 1e-12);
    const std::vector<int64_t> counts(4, 1 << 18);
    BURST_RETURN_IF_ERROR(comm.PostAllGatherParts(part, counts, sum));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kCollective));
    expected += kMessage + 0.75 * bytes / kLinks;
    EXPECT_NEAR(gpu.now(), expected, 1e-12);
    BURST_RETURN_IF_ERROR(comm.PostReduceScatterSum(sum, counts, part));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kCollective));
    expected += kMessage + 0.75 * bytes / kLinks;
    EXPECT_NEAR(gpu.now(), expected, 1e-12);
    return absl::OkStatus();
  });
}

// Two rings of two nodes with two ranks each leave a node together.
TEST(SimulatedCommunicator, CollectivesUseTheNetworkOfAllRanksOfANode) {
  OnRanks(4, 2, [](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor sum = OnGpu(1 << 20);
    BURST_RETURN_IF_ERROR(comm.AllReduceSum(sum));
    EXPECT_NEAR(gpu.now(), kMessage + 2 * 0.75 * 4 * (1 << 20) / (2 * kNetwork), 1e-12);
    return absl::OkStatus();
  });
}

// A message to oneself uses no link.
TEST(SimulatedCommunicator, ARankSendsToItself) {
  OnRanks(2, 0, [](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 20), b = OnGpu(1 << 20);
    for (int i = 0; i < 3; ++i) {
      const SendBuffer send = {a.raw_data(), a.size_bytes(), comm.rank(), DeviceType::kCuda};
      const ReceiveBuffer receive = {b.raw_data(), b.size_bytes(), comm.rank(), DeviceType::kCuda};
      BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    }
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    EXPECT_NEAR(gpu.now(), 3 * kMessage, 1e-12);
    EXPECT_EQ(comm.stats().bytes_sent[0], 0);
    return absl::OkStatus();
  });
}

// A sender runs ahead of its receiver until it ends.
TEST(SimulatedCommunicator, NobodyWaitsForAReceiver) {
  std::atomic<bool> left{false};
  OnRanks(2, 0, [&](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 20);
    if (comm.rank() == 0) {
      const SendBuffer send = {a.raw_data(), a.size_bytes(), 1, DeviceType::kCuda};
      for (int i = 0; i < 3; ++i) {
        BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {}));
        BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
      }
      left = true;
      return absl::OkStatus();
    }
    while (!left) std::this_thread::yield();
    const ReceiveBuffer receive = {a.raw_data(), a.size_bytes(), 0, DeviceType::kCuda};
    for (int i = 0; i < 3; ++i) {
      BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive, 1}));
      BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    }
    // The third was sent when the two before it had been.
    EXPECT_NEAR(gpu.now(), 3 * (kMessage + 4 * (1 << 20) / kLinks), 1e-12);
    return absl::OkStatus();
  });
}

// Rank 0 waits for a message, and goes on to launch kernels: thousands, but not a million.
TEST(SimulatedCommunicator, ARankIsNotFarAhead) {
  constexpr int kKernels = 1000000, kFewest = 1000, kMost = 10000;
  std::atomic<int> launched{0};
  OnRanks(2, 0, [&](Communicator& comm, SimulatedGpu& gpu) {
    const Tensor a = OnGpu(1 << 10), b = OnGpu(1 << 10);
    if (comm.rank() == 1) {
      while (launched < kFewest) std::this_thread::yield();
      for (int i = 0; i < kMost; ++i) std::this_thread::yield();
      EXPECT_LT(launched, kMost);
    }
    BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    for (; comm.rank() == 0 && launched < kKernels; ++launched) gpu.RunKernel(0, 1e-6);
    return absl::OkStatus();
  });
  EXPECT_EQ(launched, kKernels);
}

TEST(SimulatedCommunicator, AMessageMustFitItsReceiver) {
  const absl::Status status =
      RunSimulatedRanks(2, 0, Model(), [](Communicator& comm, SimulatedGpu&) -> absl::Status {
        const Tensor a = OnGpu(1 << 10), b = OnGpu(1 << 9);
        if (comm.rank() == 0) return Shift(comm, Channel::kRead, a, b);
        BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
        return comm.Wait(Channel::kRead);
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "rank 0 sends 4096 bytes to a buffer of 2048");
}

// A rank that fails or ends frees the ranks that wait for its messages or for it in a collective.
// The first error is returned.
TEST(SimulatedCommunicator, WhoFailsFreesTheOthers) {
  for (const bool collective : {false, true}) {
    for (const bool fails : {false, true}) {
      const absl::Status status =
          RunSimulatedRanks(3, 0, Model(), [&](Communicator& comm, SimulatedGpu&) -> absl::Status {
            if (comm.rank() == 1) {
              return fails ? absl::ResourceExhaustedError("no room") : absl::OkStatus();
            }
            const Tensor a = OnGpu(1 << 10), b = OnGpu(1 << 10);
            if (collective) return comm.AllReduceSum(a);
            BURST_RETURN_IF_ERROR(Shift(comm, Channel::kRead, a, b));
            return comm.Wait(Channel::kRead);
          });
      EXPECT_EQ(status.code(),
                fails ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable)
          << status;
    }
  }
}

TEST(SimulatedCommunicator, HostsExchangeWhatTheySay) {
  OnRanks(4, 0, [](Communicator& comm, SimulatedGpu& gpu) -> absl::Status {
    const Tensor sum = Tensor::FromVector<double>({1.0 + comm.rank()}, {1});
    BURST_RETURN_IF_ERROR(comm.AllReduceSum(sum));
    EXPECT_EQ(sum.data<double>()[0], 10);
    BURST_ASSIGN_OR_RETURN(const auto half, comm.Split(comm.rank() % 2, comm.rank()));
    EXPECT_EQ(half->world_size(), 2);
    EXPECT_EQ(half->WorldRank(1), 2 + comm.rank() % 2);
    EXPECT_EQ(gpu.now(), 0);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace burst
