// Compares Mask with its definition, pair by pair, and tests what it refuses.
#include "burst/mask/mask.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/mask/mask_cases.h"

namespace burst {
namespace {

constexpr int64_t kLengths[] = {0, 1, 2, 5, 7, 16, 33};

// Adds the pairs of a part to seen[row, query, key], and checks the part's own figures.
void AddPart(const VisibleKeys& part, int64_t q_len, int64_t k_len, std::vector<int>* seen) {
  EXPECT_EQ(part.q_len, q_len);
  ASSERT_EQ(static_cast<int64_t>(part.begin.size()), part.rows * q_len);
  int64_t pairs = 0;
  for (int64_t at = 0; at < part.rows * q_len; ++at) {
    if (at % q_len > 0) {
      EXPECT_GE(part.begin[at], part.begin[at - 1]);
      EXPECT_GE(part.end[at], part.end[at - 1]);
    }
    for (int32_t j = part.begin[at]; j < part.end[at]; ++j, ++pairs) ++(*seen)[at * k_len + j];
  }
  EXPECT_EQ(part.pairs, pairs);
  EXPECT_EQ(part.all, pairs == static_cast<int64_t>(seen->size()));
}

// Checks that every visible pair of the definition is in one part of the mask or in its blocks, and
// no other pair.
void CheckBetween(const MaskCase& c, int64_t seqlen, const std::vector<int32_t>& queries,
                  const std::vector<int32_t>& keys, int64_t block) {
  const Mask mask = MaskOf(c, seqlen);
  const BlockMask between = mask.Between(queries, keys, block);
  const auto q_len = static_cast<int64_t>(queries.size()),
             k_len = static_cast<int64_t>(keys.size());
  std::vector<int> seen(mask.rows() * q_len * k_len);
  EXPECT_TRUE(!c.slices.empty() || (between.parts.size() == 1 && between.blocks.none()));
  EXPECT_TRUE(!between.parts.empty() || !between.blocks.none());
  for (const VisibleKeys& part : between.parts) {
    EXPECT_EQ(part.rows, mask.rows());
    EXPECT_TRUE(part.pairs > 0 || between.parts.size() == 1) << "a part of nothing";
    AddPart(part, q_len, k_len, &seen);
  }
  AddBlocks(between.blocks, mask.rows(), q_len, k_len, &seen);
  int64_t pairs = 0;
  for (int64_t n = 0; n < static_cast<int64_t>(seen.size()); ++n) {
    const int64_t row = n / k_len / q_len, i = n / k_len % q_len, j = n % k_len;
    const bool visible = Visible(c, seqlen, row, queries[i], keys[j]);
    EXPECT_EQ(seen[n], visible) << "query " << queries[i] << ", key " << keys[j];
    pairs += visible;
  }
  EXPECT_EQ(between.pairs(), pairs);
  EXPECT_EQ(between.none(), pairs == 0);
  EXPECT_EQ(mask.AnyVisible(queries, keys), pairs > 0);
}

// Returns each position of [0, seqlen) with probability `part` / 4.
std::vector<int32_t> Some(int64_t seqlen, unsigned part, std::mt19937* random) {
  std::vector<int32_t> positions;
  for (int32_t p = 0; p < seqlen; ++p) {
    if ((*random)() % 4 < part) positions.push_back(p);
  }
  return positions;
}

TEST(MaskTest, ShowsWhatItsDefinitionShows) {
  std::mt19937 random(1);
  for (const MaskCase& c : MaskCases()) {
    for (const int64_t seqlen : kLengths) {
      ASSERT_TRUE(MaskOf(c, seqlen).CheckForSequence(seqlen).ok());
      for (const unsigned part : {1, 2, 4}) {
        const std::vector<int32_t> queries = Some(seqlen, part, &random);
        for (const unsigned other : {1, 3, 4}) {
          const std::vector<int32_t> keys = Some(seqlen, other, &random);
          for (const int64_t block : {2, 5, 128}) {
            SCOPED_TRACE(testing::Message() << c.name << ", " << seqlen << " tokens, " << part
                                            << " and " << other << " of 4, blocks of " << block);
            CheckBetween(c, seqlen, queries, keys, block);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

TEST(MaskTest, APrefixIsTheMaskOfAShorterSequence) {
  for (const MaskCase& c : MaskCases()) {
    if (!c.mask.causal || !c.mask.spans.empty() || !c.slices.empty()) continue;
    for (const int64_t tokens : {0, 1, 16, 33}) {
      const Mask prefix = MaskOf(c, 33).Prefix(tokens), expected = MaskOf(c, tokens);
      ASSERT_TRUE(prefix.CheckForSequence(tokens).ok());
      std::vector<int32_t> all;
      for (int32_t p = 0; p < tokens; ++p) all.push_back(p);
      EXPECT_EQ(prefix.rows(), expected.rows());
      const BlockMask a = prefix.Between(all, all, 128), b = expected.Between(all, all, 128);
      EXPECT_EQ(a.parts[0].begin, b.parts[0].begin) << c.name;
      EXPECT_EQ(a.parts[0].end, b.parts[0].end) << c.name;
    }
  }
}

std::string ErrorOf(const Mask& mask) {
  const absl::Status status = mask.CheckForSequence(20);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(MaskTest, RejectsWindowsAndDocumentsThatDoNotFit) {
  EXPECT_EQ(ErrorOf(Mask::SlidingWindow(-3)), "window: must be at least 0; got -3");
  const auto documents = [](const DocumentStarts& starts) {
    return ErrorOf(Mask::Causal().WithDocuments(starts));
  };
  const std::string rule = "documents: starts must increase within [0, 20); got ";
  EXPECT_EQ(documents({{0, 20}}), rule + "20 as number 1 of row 0");
  EXPECT_EQ(documents({{}, {4, 4}}), rule + "4 as number 1 of row 1");
  EXPECT_EQ(documents({{-1}}), rule + "-1 as number 0 of row 0");
  EXPECT_TRUE(Mask::Full().WithDocuments({{0, 19}, {}}).CheckForSequence(20).ok());
}

TEST(MaskTest, RejectsSpansThatDoNotFit) {
  const auto message = [](const Spans& spans, const DocumentStarts& documents = {}) {
    return ErrorOf(Mask::Causal().WithSpans(spans).WithDocuments(documents));
  };
  const std::string order = "spans: must not be empty, and must increase within [0, 20); got ";
  EXPECT_EQ(message({{{3, 3}}}), order + "[3, 3) of row 0");
  EXPECT_EQ(message({{}, {{-1, 2}}}), order + "[-1, 2) of row 1");
  EXPECT_EQ(message({{{3, 21}}}), order + "[3, 21) of row 0");
  EXPECT_EQ(message({{{3, 9}, {8, 12}}}), order + "[8, 12) of row 0");
  const std::string beyond =
      "spans: must each be within a document; got [3, 9) of row 0, whose document ends at 7";
  EXPECT_EQ(message({{{3, 9}}}, {{0, 7, 12}}), beyond);
  EXPECT_EQ(message({{{3, 9}}}, {{0, 3, 9}, {7}}), beyond) << "one row of spans, for all";
  EXPECT_EQ(message({{{3, 9}}, {}}, {{7}}), beyond) << "one row of documents, for all";
  EXPECT_EQ(message({{}, {}}, {{0}, {1}, {2}}),
            "spans: must have one row, or those of documents, 3; got 2");
  EXPECT_TRUE(Mask::Causal()
                  .WithDocuments({{3, 9}, {7}})
                  .WithSpans({{{3, 9}}, {{7, 20}}})
                  .CheckForSequence(20)
                  .ok());
}

TEST(MaskTest, RejectsSlicesThatDoNotFit) {
  const auto message = [](const MaskSlices& slices) { return ErrorOf(Mask::Slices(slices)); };
  EXPECT_EQ(message({}), "slices: must have at least one row; got none");
  const std::string rule = "slices: must not be empty, with queries in [0, 20); got queries ";
  EXPECT_EQ(message({{}, {{0, 0, 0, 5}}}), rule + "[0, 0) and keys [0, 5) of row 1");
  EXPECT_EQ(message({{{0, 5, 9, 8}}}), rule + "[0, 5) and keys [9, 8) of row 0");
  EXPECT_EQ(message({{{-1, 5, 0, 8}}}), rule + "[-1, 5) and keys [0, 8) of row 0");
  EXPECT_EQ(message({{{0, 21, 0, 5}}}), rule + "[0, 21) and keys [0, 5) of row 0");
  EXPECT_TRUE(Mask::Slices({{}}).CheckForSequence(20).ok()) << "nobody sees anything";
}

TEST(MaskTest, TwoSequencesHaveNoCommonOrder) {
  const auto got = [](const Mask& mask) {
    const absl::Status status = mask.CheckForTwoSequences(20);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    const std::string message(status.message());
    return message.substr(message.find("; got ") + 6);
  };
  EXPECT_EQ(got(Mask::Causal()), "a causal mask");
  EXPECT_EQ(got(Mask::SlidingWindow(3, /*causal=*/false)), "a window");
  EXPECT_EQ(got(Mask::Full().WithDocuments({{3}})), "documents");
  EXPECT_EQ(got(Mask::Full().WithSpans({{{3, 4}}})), "spans");
  EXPECT_FALSE(Mask::Slices({{{0, 21, 0, 5}}}).CheckForTwoSequences(20).ok());
  EXPECT_TRUE(Mask::Slices({{{0, 20, 0, 500}}}).CheckForTwoSequences(20).ok());
  EXPECT_TRUE(Mask::Full().CheckForTwoSequences(20).ok());
}

}  // namespace
}  // namespace burst
