// Tests ranks as threads: all the checks of communicator_checks, and what failures do to ranks that
// wait.
#include "burst/comm/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <ostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/mesh.h"
#include "burst/comm/thread/thread_communicator.h"
#include "tests/comm/communicator_checks.h"

// Counts a thread's allocations. If new and delete were inlined, compilers would not see a pair.
thread_local int64_t allocations = 0;

[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* data = std::malloc(bytes == 0 ? 1 : bytes)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace burst {
namespace {

class ThreadRanks : public testing::TestWithParam<std::tuple<CommunicatorCheck, int>> {};

TEST_P(ThreadRanks, Check) {
  const auto& [check, world_size] = GetParam();
  EXPECT_EQ(RunRanks(world_size, [&](Communicator& comm) { return check.run(comm, {}); }),
            absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(All, ThreadRanks,
                         testing::Combine(testing::ValuesIn(CommunicatorChecks()),
                                          testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param).name) +
                                  std::to_string(std::get<1>(info.param));
                         });

// With several threads per rank, copies and reductions are split among them; results do not change.
TEST(ThreadCommunicator, RanksWithThreadPools) {
  EXPECT_EQ(RunRanks(2,
                     [](Communicator& comm) {
                       const ScopedThreadPool pool(2);
                       for (const CommunicatorCheck& check : CommunicatorChecks()) {
                         BURST_RETURN_IF_ERROR(check.run(comm, {}));
                       }
                       return absl::OkStatus();
                     }),
            absl::OkStatus());
}

// Sends a block to the next rank and receives one from the rank before.
absl::Status RingTransfer(Communicator& comm, std::vector<char>& out, std::vector<char>& in) {
  const int ranks = comm.world_size();
  const SendBuffer send = {out.data(), static_cast<int64_t>(out.size()), (comm.rank() + 1) % ranks};
  const ReceiveBuffer receive = {in.data(), static_cast<int64_t>(in.size()),
                                 (comm.rank() + ranks - 1) % ranks};
  BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
  return comm.Wait(Channel::kRead);
}

TEST(ThreadCommunicator, SteadyStateDoesNotAllocate) {
  EXPECT_EQ(RunRanks(3,
                     [](Communicator& comm) {
                       std::vector<char> out(1000), in(1000);
                       const Tensor sum = Tensor::Zeros({1000}, DType::kFloat32);
                       int64_t before = 0;
                       for (int round = 0; round < 50; ++round) {
                         if (round == 5) before = allocations;
                         BURST_RETURN_IF_ERROR(RingTransfer(comm, out, in));
                         BURST_RETURN_IF_ERROR(comm.AllReduceSum(sum));
                         BURST_RETURN_IF_ERROR(comm.Communicator::AllReduceSum(sum));
                         BURST_RETURN_IF_ERROR(comm.Barrier());
                       }
                       EXPECT_GT(before, 0) << "the counter counts";
                       EXPECT_EQ(allocations - before, 0);
                       return absl::OkStatus();
                     }),
            absl::OkStatus());
}

const absl::Status kDiskFull = absl::ResourceExhaustedError("disk full");

void ExpectFreedByRank1(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 1 of 4 gave up")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "disk full")) << status;
}

// The ways to wait for a rank that does not come. Rank 0 waits.
struct Waiting {
  const char* name;
  std::function<absl::Status(Communicator&)> wait;
};
void PrintTo(const Waiting& waiting, std::ostream* out) { *out << waiting.name; }

const std::vector<Waiting>& WaysToWait() {
  static char data[64];
  static const auto* const ways = new std::vector<Waiting>{
      {"Receive",
       [](Communicator& comm) {
         const ReceiveBuffer receive = {data, 64, 1};
         BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive, 1}));
         return comm.Wait(Channel::kRead);
       }},
      {"Send",
       [](Communicator& comm) {
         const SendBuffer send = {data, 64, 1};
         BURST_RETURN_IF_ERROR(comm.Post(Channel::kGradient, {&send, 1}, {}));
         return comm.Wait(Channel::kGradient);
       }},
      {"AllReduce",
       [](Communicator& comm) { return comm.AllReduceSum(Tensor::Zeros({9}, DType::kFloat32)); }},
      {"GenericAllReduce",
       [](Communicator& comm) {
         return comm.Communicator::AllReduceSum(Tensor::Zeros({9}, DType::kFloat32));
       }},
      {"Broadcast", [](Communicator& comm) { return comm.Broadcast(data, 64, 1); }},
      {"Barrier", [](Communicator& comm) { return comm.Barrier(); }},
      {"AllGather", [](Communicator& comm) { return comm.AllGather(1).status(); }},
      {"Split", [](Communicator& comm) { return comm.Split(0, 0).status(); }},
  };
  return *ways;
}

class Abort : public testing::TestWithParam<Waiting> {};
INSTANTIATE_TEST_SUITE_P(All, Abort, testing::ValuesIn(WaysToWait()),
                         [](const auto& info) { return info.param.name; });

TEST_P(Abort, FreesThoseThatWaitNowOrLater) {
  const auto& wait = GetParam().wait;
  EXPECT_EQ(RunRanks(4,
                     [&](Communicator& comm) {
                       if (comm.rank() == 1) {
                         std::this_thread::sleep_for(std::chrono::milliseconds(20));
                         comm.Abort(kDiskFull);
                         comm.Abort(absl::InternalError("the first reason stands"));
                       }
                       // Rank 0 waits already.
                       if (comm.rank() == 0) ExpectFreedByRank1(wait(comm));
                       if (comm.rank() == 3)
                         std::this_thread::sleep_for(std::chrono::milliseconds(40));
                       for (const Waiting& later : WaysToWait())
                         ExpectFreedByRank1(later.wait(comm));
                       return absl::OkStatus();
                     }),
            kDiskFull);
}

// Rank 1 fails without a call; rank 0 waits for it in a group of the world or in the world itself.
TEST_P(Abort, AnErrorReturnedFreesThoseThatWait) {
  for (bool in_group : {false, true}) {
    EXPECT_EQ(RunRanks(4,
                       [&](Communicator& comm) -> absl::Status {
                         BURST_ASSIGN_OR_RETURN(const auto group, comm.Split(comm.rank() / 2, 0));
                         if (comm.rank() == 1) return kDiskFull;
                         const absl::Status status =
                             GetParam().wait(in_group && comm.rank() == 0 ? *group : comm);
                         ExpectFreedByRank1(status);
                         return status;
                       }),
              kDiskFull);
  }
}

TEST(ThreadCommunicator, AbortReachesGroupsAndTheirParents) {
  for (bool in_group : {false, true}) {
    EXPECT_EQ(RunRanks(4,
                       [&](Communicator& comm) -> absl::Status {
                         // {0, 2}, {1, 3}; rank 1 has number 0 in its group.
                         BURST_ASSIGN_OR_RETURN(const auto group, comm.Split(comm.rank() % 2, 0));
                         BURST_ASSIGN_OR_RETURN(const auto pair, group->Split(0, 0));
                         if (comm.rank() == 1) (in_group ? *pair : comm).Abort(kDiskFull);
                         char byte;
                         const ReceiveBuffer receive = {&byte, 1, 1};
                         Communicator& waits_in = comm.rank() == 0   ? *pair
                                                  : comm.rank() == 2 ? *group
                                                                     : comm;
                         (void)waits_in.Post(Channel::kRead, {}, {&receive, 1});
                         ExpectFreedByRank1(waits_in.Wait(Channel::kRead));
                         return absl::OkStatus();
                       }),
              kDiskFull);
  }
}

// A sender that was freed may overwrite its buffer at once, while the receiver may be reading it. A
// receiver whose Wait succeeds has not seen any of the new content.
TEST(ThreadCommunicator, NoBufferIsInUseAfterAnAbort) {
  constexpr int64_t kBytes = 8 << 20;
  for (int round = 0; round < 30; ++round) {
    std::atomic<bool> started{false};
    const absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
      if (comm.rank() == 2) {
        while (!started) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
        return kDiskFull;
      }
      std::vector<char> block(kBytes);
      const SendBuffer send = {block.data(), kBytes, 1};
      const ReceiveBuffer receive = {block.data(), kBytes, 0};
      while (true) {
        if (comm.rank() == 0) {
          BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {}));
          started = true;
        } else {
          BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {&receive, 1}));
        }
        const absl::Status waited = comm.Wait(Channel::kRead);
        if (!waited.ok() && comm.rank() == 0) std::fill(block.begin(), block.end(), 1);
        BURST_RETURN_IF_ERROR(waited);
        EXPECT_EQ(std::count(block.begin(), block.end(), 1), 0);
      }
    });
    EXPECT_EQ(status, kDiskFull);
  }
}

// Tensors that other ranks write to are not in use either. The address sanitizer checks it.
TEST(ThreadCommunicator, NoTensorIsInUseAfterAnAbort) {
  for (int round = 0; round < 20; ++round) {
    const absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
      BURST_ASSIGN_OR_RETURN(const auto pair, comm.Split(comm.rank() == 2 ? -1 : 0, 0));
      if (comm.rank() == 2) {
        std::this_thread::sleep_for(std::chrono::microseconds(50 * round));
        return kDiskFull;
      }
      while (true) {
        BURST_RETURN_IF_ERROR(pair->AllReduceSum(Tensor::Zeros({1 << 18}, DType::kFloat32)));
      }
    });
    EXPECT_EQ(status, kDiskFull);
  }
}

TEST(RunRanks, ReturnsTheFirstErrorByTime) {
  std::atomic<bool> failing{false};
  const absl::Status status = RunRanks(4, [&](Communicator& comm) -> absl::Status {
    if (comm.rank() == 2) {
      failing = true;
      return absl::NotFoundError("first");
    }
    while (!failing) std::this_thread::yield();
    if (comm.rank() == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return absl::InternalError("second");
    }
    return comm.Barrier();
  });
  EXPECT_EQ(status, absl::NotFoundError("first"));
}

TEST(RunRanks, ExceptionsBecomeErrors) {
  EXPECT_EQ(RunRanks(3,
                     [](Communicator& comm) -> absl::Status {
                       if (comm.rank() == 1) throw std::runtime_error("no luck");
                       return comm.Barrier();
                     }),
            absl::InternalError("rank 1 threw: no luck"));
  EXPECT_EQ(RunRanks(3,
                     [](Communicator& comm) -> absl::Status {
                       if (comm.rank() == 2) throw 5;
                       return comm.Barrier();
                     })
                .code(),
            absl::StatusCode::kInternal);
}

TEST(RunRanks, RefusesAnEmptyWorld) {
  const auto body = [](Communicator&) { return absl::OkStatus(); };
  EXPECT_EQ(RunRanks(0, body).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(RunRanks(-3, body).code(), absl::StatusCode::kInvalidArgument);
}

// Waiting for a rank that has returned would never end, so an error names the rank.
TEST_P(Abort, WaitingForARankThatHasFinishedIsAnError) {
  const absl::Status status = RunRanks(2, [&](Communicator& comm) {
    return comm.rank() == 1 ? absl::OkStatus() : GetParam().wait(comm);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "rank 1, which has finished")) << status;
}

TEST(ThreadCommunicator, LengthsMustAgree) {
  const absl::Status status = RunRanks(2, [](Communicator& comm) {
    std::vector<char> out(comm.rank() == 0 ? 16 : 8), in(16);
    return RingTransfer(comm, out, in);
  });
  EXPECT_EQ(status,
            absl::InvalidArgumentError("rank 0 expected 16 bytes from rank 1, which sent 8"));

  const absl::Status sum = RunRanks(3, [](Communicator& comm) {
    return comm.AllReduceSum(Tensor::Zeros({comm.rank() == 2 ? 5 : 4}, DType::kFloat32));
  });
  EXPECT_EQ(sum.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(absl::StrContains(sum.message(), "4 float32 on rank 0 and 5 float32 on rank 2"));
}

// Every rank has its own place, and the ranks of a stage are numbered as those of a mesh without
// any.
TEST(Mesh, RanksHaveTheirPlaces) {
  const Mesh mesh = {/*data=*/3, /*sequence=*/2, /*stages=*/4, /*tensor=*/5};
  EXPECT_EQ(mesh.world_size(), 120);
  EXPECT_EQ(mesh.stage_size(), 30);
  int rank = 0;
  for (int data = 0; data < 3; ++data) {
    for (int stage = 0; stage < 4; ++stage) {
      for (int sequence = 0; sequence < 2; ++sequence) {
        for (int tensor = 0; tensor < 5; ++tensor, ++rank) {
          EXPECT_EQ(mesh.data_rank(rank), data) << rank;
          EXPECT_EQ(mesh.stage(rank), stage) << rank;
          EXPECT_EQ(mesh.sequence_rank(rank), sequence) << rank;
          EXPECT_EQ(mesh.tensor_rank(rank), tensor) << rank;
          EXPECT_EQ(mesh.rank_in_stage(rank), 10 * data + 5 * sequence + tensor) << rank;
        }
      }
    }
  }
}

// The mesh has two data-parallel groups of three tensor groups of two ranks.
TEST(Mesh, TensorGroupsAreWithinSequences) {
  const Mesh mesh = {/*data=*/2, /*sequence=*/3, /*stages=*/1, /*tensor=*/2};
  EXPECT_EQ(RunRanks(mesh.world_size(),
                     [&](Communicator& comm) -> absl::Status {
                       BURST_ASSIGN_OR_RETURN(const auto sequence, SplitSequence(mesh, comm));
                       BURST_ASSIGN_OR_RETURN(const auto tensor, SplitTensor(mesh, comm));
                       const double r = comm.rank(), first = comm.rank() / 6 * 6 + comm.rank() % 2;
                       BURST_ASSIGN_OR_RETURN(const auto ring, sequence->AllGather(r));
                       EXPECT_EQ(ring, std::vector<double>({first, first + 2, first + 4}));
                       const double even = comm.rank() / 2 * 2;
                       BURST_ASSIGN_OR_RETURN(const auto pair, tensor->AllGather(r));
                       EXPECT_EQ(pair, std::vector<double>({even, even + 1}));
                       return absl::OkStatus();
                     }),
            absl::OkStatus());
}

// Six ranks are two rings of three. A ring's ranks are next to each other.
TEST(Mesh, SequenceGroupsAreOfNeighbors) {
  const Mesh mesh = {/*data=*/2, /*sequence=*/3};
  EXPECT_EQ(RunRanks(mesh.world_size(),
                     [&](Communicator& comm) -> absl::Status {
                       BURST_ASSIGN_OR_RETURN(const auto sequence, SplitSequence(mesh, comm));
                       const double r = comm.rank();
                       EXPECT_EQ(sequence->rank(), comm.rank() % 3);
                       const double first = comm.rank() / 3 * 3;
                       BURST_ASSIGN_OR_RETURN(const auto ring, sequence->AllGather(r));
                       EXPECT_EQ(ring, std::vector<double>({first, first + 1, first + 2}));
                       return absl::OkStatus();
                     }),
            absl::OkStatus());
}

}  // namespace
}  // namespace burst
