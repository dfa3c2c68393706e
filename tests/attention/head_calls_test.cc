#include "burst/attention/ring/head_calls.h"

#include "gtest/gtest.h"

namespace burst {
namespace {

void ExpectRange(const HeadRange& range, int64_t begin, int64_t end) {
  EXPECT_EQ(range.begin, begin);
  EXPECT_EQ(range.end, end);
}

// The calls are a ring's calls: half of the heads, all heads twice, and the other half.
TEST(HeadCallsTest, HalvesBeginAndEndInDifferentCalls) {
  HeadCalls calls(5);
  calls.Announce({0, 2}, 1);
  calls.Announce({0, 5}, 2);
  calls.Announce({2, 5}, 1);
  EXPECT_TRUE(calls.ForAllHeads());
  HeadCalls::Ends ends = calls.Next({0, 2});
  ExpectRange(ends.first, 0, 2);
  EXPECT_TRUE(ends.last.empty());
  ends = calls.Next({0, 5});
  ExpectRange(ends.first, 2, 5);
  EXPECT_TRUE(ends.last.empty());
  ends = calls.Next({0, 5});
  EXPECT_TRUE(ends.first.empty());
  ExpectRange(ends.last, 0, 2);
  ends = calls.Next({2, 5});
  EXPECT_TRUE(ends.first.empty());
  ExpectRange(ends.last, 0, 3);  // counted from head 2
}

TEST(HeadCallsTest, OneCallIsFirstAndLast) {
  HeadCalls calls(3);
  calls.Announce({0, 3}, 1);
  const HeadCalls::Ends ends = calls.Next({0, 3});
  ExpectRange(ends.first, 0, 3);
  ExpectRange(ends.last, 0, 3);
}

TEST(HeadCallsTest, HeadsWithoutACallMustBeFilled) {
  HeadCalls calls(4);
  calls.Announce({0, 2}, 1);
  EXPECT_FALSE(calls.ForAllHeads());
  calls.OnlyAdd();
  EXPECT_TRUE(calls.ForAllHeads());
  const HeadCalls::Ends ends = calls.Next({0, 2});
  EXPECT_TRUE(ends.first.empty());
  ExpectRange(ends.last, 0, 2);
}

}  // namespace
}  // namespace burst
