// Tests the places that ranks report, and the watchdog that reads them.
#include "burst/base/progress.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "burst/base/watchdog.h"

namespace burst {
namespace {

using std::chrono::milliseconds;
using testing::ExitedWithCode;

void SleepFor(milliseconds time) { std::this_thread::sleep_for(time); }

TEST(Progress, SaysWhereARankIs) {
  ReachStep(3);  // does nothing on a thread that is not a rank
  EXPECT_EQ(RanksInProgress(), 0);
  const ScopedRankProgress rank(5);
  EXPECT_EQ(DescribeProgress(), std::vector<std::string>{"rank 5: start: computes"});
  ReachStep(12);
  {
    const ScopedPhase phase("backward");
    ReachOp(3, "attention");
    EXPECT_EQ(CurrentLayer(), 3);
    EXPECT_EQ(DescribeProgress()[0], "rank 5: step 12, backward, layer 3, attention: computes");
    {
      const ScopedWait wait("receives", "read", 2, 4096);
      EXPECT_EQ(DescribeProgress()[0],
                "rank 5: step 12, backward, layer 3, attention: receives 4096 bytes from rank 2, "
                "channel read");
    }
    const ScopedWait wait("sends", "gradient", 1, 8);
    EXPECT_EQ(DescribeProgress()[0],
              "rank 5: step 12, backward, layer 3, attention: sends 8 bytes to rank 1, channel "
              "gradient");
  }
  EXPECT_EQ(DescribeProgress()[0], "rank 5: step 12, start: computes");
  EXPECT_EQ(CurrentLayer(), -1);
}

TEST(Progress, CountsWhatHappensOnAllRanks) {
  const uint64_t before = CountProgress();
  std::thread([] {
    const ScopedRankProgress rank(1);
    CountEvent();
    CountEvent();
  }).join();
  EXPECT_GE(CountProgress(), before + 2) << "the count of a rank that ended stays";
  const uint64_t between = CountProgress();
  const ScopedRankProgress rank(0);
  CountEvent();
  EXPECT_GT(CountProgress(), between);
}

TEST(Progress, ARankThatIsUnwatchedIsNotInProgress) {
  const ScopedUnwatched nobody;  // does nothing on a thread that is not a rank
  const ScopedRankProgress rank(2);
  {
    const ScopedUnwatched unwatched;
    EXPECT_EQ(RanksInProgress(), 0);
    CountEvent();
  }
  EXPECT_EQ(RanksInProgress(), 1);
  EXPECT_EQ(DescribeProgress().size(), 1u);
}

class WatchdogDeathTest : public testing::Test {
 protected:
  void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(WatchdogDeathTest, EndsAProcessWhoseRanksStandStillAndSaysWhere) {
  EXPECT_EXIT(
      {
        const Watchdog watchdog(milliseconds(300));
        std::thread other([] {
          const ScopedRankProgress rank(1);
          ReachStep(8);
          const ScopedWait wait("receives", "read", 0, 64);
          SleepFor(std::chrono::hours(1));
        });
        const ScopedRankProgress rank(0);
        ReachStep(7);
        const ScopedPhase phase("save");
        SleepFor(std::chrono::hours(1));
      },
      ExitedWithCode(1),
      "no rank has made progress for 0.? ?s.*\n.*rank 0: step 7, save: computes\n"
      ".*rank 1: step 8, start: receives 64 bytes from rank 0, channel read");
}

// A process that another one asks says where its ranks are, once.
TEST_F(WatchdogDeathTest, AsksTheOthers) {
  EXPECT_EXIT(
      {
        SetAskOthersToReport([] { std::fputs("asked\n", stderr); });
        const Watchdog watchdog(milliseconds(200));
        const ScopedRankProgress rank(0);
        SleepFor(std::chrono::hours(1));
      },
      ExitedWithCode(1), "rank 0: start: computes\nasked\n");
}

TEST(Watchdog, WaitsWhileAnythingMoves) {
  const Watchdog watchdog(milliseconds(1000));
  SleepFor(milliseconds(1500));  // without ranks there is nothing to wait for
  std::atomic<bool> done{false};
  std::thread waits([&] {
    const ScopedRankProgress rank(1);
    const ScopedWait wait("receives", "read", 0, 64);
    while (!done) SleepFor(milliseconds(10));
  });
  {
    const ScopedRankProgress rank(0);
    for (int i = 0; i < 150; ++i) {
      CountEvent();
      SleepFor(milliseconds(10));
    }
  }
  for (int i = 0; i < 150; ++i) {  // rank 1 waits alone, but a rank of another process works
    ProgressElsewhere(10);
    SleepFor(milliseconds(10));
  }
  EXPECT_GT(MsWithoutProgress(), 1000) << "what this process tells the others";
  done = true;
  waits.join();
}

}  // namespace
}  // namespace burst
