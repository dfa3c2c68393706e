// Runs tests whose ranks are processes. Every rank runs every test. Rank 0 prints the report, the
// other ranks print their failures, and a failure on any rank fails the run.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>

#include "burst/comm/communicator.h"
#include "tests/comm/communicator_checks.h"

namespace burst {

inline Communicator* world = nullptr;

// Runs a check. A rank that cannot continue ends the run. A failure on another rank also fails rank
// 0, so its report is complete.
inline void RunOnAllRanks(const CommunicatorCheck& check, const CheckOptions& options) {
  const absl::Status status = check.run(*world, options);
  if (!status.ok()) world->Abort(status);
  const auto failed = world->AllGather(testing::Test::HasFailure());
  if (!failed.ok()) world->Abort(failed.status());
  for (int rank = 0; rank < world->world_size(); ++rank) {
    EXPECT_TRUE(rank == world->rank() || (*failed)[rank] == 0) << "rank " << rank << " failed";
  }
}

// Prints only failures, with their rank.
class FailurePrinter : public testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", world->rank(),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
  }
};

inline int RunAllTestsOnAllRanks() {
  if (world->rank() != 0) {
    auto& listeners = testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  } else {
    std::printf("%d processes\n", world->world_size());
  }
  return RUN_ALL_TESTS();
}

}  // namespace burst
