// If a rank's items differ from rank 0's, all ranks find out and name the difference.
#include "burst/comm/agreement.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {
namespace {

// Returns what CheckAgreement says on every rank about the items of rank 0, 1, ...
std::vector<std::string> SaidBy(const std::vector<std::vector<AgreedItem>>& items) {
  std::vector<std::string> said(items.size());
  const absl::Status status = RunRanks(static_cast<int>(items.size()), [&](Communicator& comm) {
    said[comm.rank()] = std::string(CheckAgreement(&comm, items[comm.rank()]).message());
    return comm.Barrier();
  });
  EXPECT_EQ(status, absl::OkStatus());
  return said;
}

std::vector<std::string> All(size_t ranks, const std::string& text) {
  return std::vector<std::string>(ranks, text);
}

TEST(Agreement, RanksThatAgree) {
  for (const size_t ranks : {1, 2, 5}) {
    const std::vector<AgreedItem> items = {{"--lr", "0.2"}, {"--out", ""}};
    EXPECT_EQ(SaidBy(std::vector<std::vector<AgreedItem>>(ranks, items)), All(ranks, ""));
    EXPECT_EQ(SaidBy(std::vector<std::vector<AgreedItem>>(ranks)), All(ranks, ""));
  }
}

TEST(Agreement, TheFirstItemOfTheLowestRankThatDiffersIsNamed) {
  std::vector<AgreedItem> items = {{"--seed", "1"}, {"--lr", "0.002"}, {"--out", ""}};
  std::vector<AgreedItem> other = items, another = items;
  other[1].value = "0.2";
  other[2].value = "runs/one";
  another[0].value = "7";
  const std::string lr = "--lr: 0.2 on rank 1, 0.002 on rank 0; give all ranks the same";
  EXPECT_EQ(SaidBy({items, other}), All(2, lr));
  EXPECT_EQ(SaidBy({items, other, another, items}), All(4, lr));
  EXPECT_EQ(SaidBy({items, items, items, another}),
            All(4, "--seed: 7 on rank 3, 1 on rank 0; give all ranks the same"));
  other = items;
  other[2].value = "a:b\n";
  EXPECT_EQ(SaidBy({items, other}),
            All(2, "--out: a:b\\n on rank 1, '' on rank 0; give all ranks the same"));
}

// Values are compared whole.
TEST(Agreement, LongValues) {
  const std::string text(3 << 20, 'x');
  const std::vector<AgreedItem> items = {{"a text", text}};
  std::vector<AgreedItem> other = items;
  other[0].value.back() = 'y';
  EXPECT_EQ(SaidBy({items, items}), All(2, ""));
  const std::vector<std::string> said = SaidBy({items, other});
  EXPECT_EQ(said[0], said[1]);
  EXPECT_EQ(said[0].substr(0, 20), "a text: xxxxxxxxxxxx");
  EXPECT_LT(said[0].size(), 600u);
}

// Two versions of the program compare different items.
TEST(Agreement, OtherItems) {
  const std::vector<AgreedItem> items = {{"--a", "1"}}, more = {{"--a", "1"}, {"--b", "2"}};
  EXPECT_EQ(SaidBy({items, more}),
            All(2, "what ranks compare: --b on rank 1, '' on rank 0; give all ranks the same"));
  EXPECT_EQ(SaidBy({more, items}),
            All(2, "what ranks compare: '' on rank 1, --b on rank 0; give all ranks the same"));
}

}  // namespace
}  // namespace burst
