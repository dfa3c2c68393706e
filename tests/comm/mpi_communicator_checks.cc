// Ranks as processes: started by mpirun_test.sh under mpirun.
//
// mpi_communicator_checks [abort | exit] [GoogleTest flags]: the words play a failure that
// the script looks at from outside.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/mpi/mpi_communicator.h"
#include "burst/comm/thread/thread_communicator.h"
#include "tests/comm/communicator_checks.h"
#include "tests/comm/process_ranks.h"

namespace burst {
namespace {

class MpiRanks : public testing::TestWithParam<CommunicatorCheck> {};
TEST_P(MpiRanks, Check) { RunOnAllRanks(GetParam(), {}); }
INSTANTIATE_TEST_SUITE_P(All, MpiRanks, testing::ValuesIn(CommunicatorChecks()),
                         [](const auto& info) { return std::string(info.param.name); });

// The bits of an all-reduce do not depend on the transport.
absl::Status SumsEqualThoseOfThreads(Communicator& comm, const CheckOptions&) {
  BURST_ASSIGN_OR_RETURN(const uint64_t here, AllReduceDigest(comm));
  std::vector<uint64_t> there(comm.world_size());
  BURST_RETURN_IF_ERROR(RunRanks(comm.world_size(), [&](Communicator& threads) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(there[threads.rank()], AllReduceDigest(threads));
    return absl::OkStatus();
  }));
  EXPECT_EQ(there, std::vector<uint64_t>(comm.world_size(), here));
  return absl::OkStatus();
}
TEST(MpiCommunicator, SumsEqualThoseOfThreads) {
  RunOnAllRanks({"SumsEqualThoseOfThreads", SumsEqualThoseOfThreads}, {});
}

// All messages around the ring are too long or too short, and every rank gets the error.
absl::Status LengthsMustAgree(Communicator& comm, const CheckOptions&) {
  const int ranks = comm.world_size(), next = (comm.rank() + 1) % ranks,
            last = (comm.rank() + ranks - 1) % ranks;
  for (const auto& [sent, expected] : {std::pair{16, 8}, std::pair{8, 16}}) {
    if (ranks == 1 && sent > expected) continue;  // Open MPI clips what a rank sends itself
    BURST_ASSIGN_OR_RETURN(const auto twin, comm.Split(0, comm.rank()));
    char out[16] = {}, in[16];
    const SendBuffer send = {out, sent, next};
    const ReceiveBuffer receive = {in, expected, last};
    BURST_RETURN_IF_ERROR(twin->Post(Channel::kRead, {&send, 1}, {&receive, 1}));
    const absl::Status status = twin->Wait(Channel::kRead);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::string text = absl::StrCat("rank ", comm.rank(), " of ", ranks, " expected ",
                                          expected, " bytes from rank ", last, ", which sent ");
    EXPECT_TRUE(absl::StrContains(status.message(), text)) << status;
  }
  return absl::OkStatus();
}
TEST(MpiCommunicator, LengthsMustAgree) {
  RunOnAllRanks({"LengthsMustAgree", LengthsMustAgree}, {});
}

// Rank 1 of 3 fails while the others wait for it for ever.
int Fail(const std::string& how) {
  if (world->rank() == 1 && how == "abort") world->Abort(absl::InternalError("disk full"));
  if (world->rank() == 1) return 3;
  char byte;
  const ReceiveBuffer receive = {&byte, 1, 1};
  if (!world->Post(Channel::kRead, {}, {&receive, 1}).ok()) return 4;
  return world->Wait(Channel::kRead).ok() ? 5 : 6;
}

int Main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  auto communicator = CreateMpiCommunicator();
  if (!communicator.ok()) {
    std::fprintf(stderr, "%s\n", communicator.status().ToString().c_str());
    return 2;
  }
  world = communicator->get();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "abort" || mode == "exit") return Fail(mode);
  return RunAllTestsOnAllRanks();
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) { return burst::Main(argc, argv); }
