#include "train/data/batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "train/data/shards.h"

namespace burst {
namespace {

// Returns `size` tokens with the values 0, 1, 2, ..., up to 65,535.
TokenSpan Counting(int64_t size, const std::vector<int64_t>& end_of_texts = {}) {
  std::vector<int32_t> header(256);
  header[0] = 20240520, header[1] = 1, header[2] = static_cast<int32_t>(size);
  std::vector<uint16_t> tokens(size);
  for (int64_t i = 0; i < size; ++i) tokens[i] = static_cast<uint16_t>(i);
  for (int64_t i : end_of_texts) tokens[i] = kGpt2EndOfText;
  const std::string path = testing::TempDir() + "/counting.bin";
  std::filesystem::remove(path);
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(header.data()), 1024)
      .write(reinterpret_cast<const char*>(tokens.data()), size * 2);
  auto data = LoadTrainingData(path, "", std::nullopt, testing::TempDir() + "/cache");
  EXPECT_TRUE(data.ok()) << data.status();
  return {data->train.corpus, 0, size};
}

SequenceSampler Make(const TokenSpan& span, int64_t seqlen, uint64_t seed = 1,
                     bool packed = false) {
  auto sampler = SequenceSampler::Create(span, {seqlen, seed, packed});
  EXPECT_TRUE(sampler.ok()) << sampler.status();
  return *sampler;
}

std::shared_ptr<const AttentionSchedule> Schedule(int rank, int world_size, Layout layout,
                                                  int64_t seqlen,
                                                  const DocumentStarts& documents = {}) {
  auto schedule = RingSchedule::Create(*TokenShard::Create(rank, world_size, layout, seqlen),
                                       Mask::Causal().WithDocuments(documents));
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return std::make_shared<const AttentionSchedule>(AttentionSchedule(*std::move(schedule)));
}

TEST(RandomPermutation, IsAPermutationThatDependsOnItsKey) {
  for (int64_t n : {1, 2, 3, 4, 5, 16, 17, 1000}) {
    std::set<int64_t> seen;
    int64_t moved = 0;
    const RandomPermutation permutation(n, 7, 3), other(n, 7, 4);
    for (int64_t i = 0; i < n; ++i) {
      seen.insert(permutation(i));
      moved += permutation(i) != other(i);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), n - 1);
    if (n >= 16) {
      EXPECT_GT(moved, n / 2) << n;
    }
  }
}

TEST(RandomPermutation, IsRandom) {
  // The number of neighbors that stay neighbors has nearly a Poisson distribution with mean 1.
  const RandomPermutation permutation(10000, 1, 2);
  int neighbors = 0;
  for (int64_t i = 0; i + 1 < 10000; ++i) neighbors += permutation(i + 1) == permutation(i) + 1;
  EXPECT_LT(neighbors, 12);
}

TEST(CheckTokens, NamesATokenBeyondTheVocabulary) {
  GlobalBatch batch;
  batch.tokens = {3, 0, 9};
  batch.targets = {0, 9, -1};
  EXPECT_TRUE(CheckTokens(batch, 10).ok());
  EXPECT_EQ(CheckTokens(batch, 9).message(),
            "--data: the token 9 is outside of the vocabulary of 9; has the file changed?");
  batch.targets[0] = 10;
  EXPECT_FALSE(CheckTokens(batch, 10).ok());
  batch.targets[0] = 0;
  batch.tokens[1] = -2;
  EXPECT_FALSE(CheckTokens(batch, 10).ok());
}

TEST(SequenceSampler, AnEpochSeesEverySequenceOnce) {
  for (int64_t seqlen : {1, 7, 64}) {
    const int64_t size = 1003;
    const SequenceSampler sampler = Make(Counting(size), seqlen);
    const int64_t n = sampler.per_epoch();
    EXPECT_GE(n * seqlen, size - 1 - 2 * seqlen) << "little is left out";
    std::set<int64_t> phases;
    for (int64_t epoch = 0; epoch < 5; ++epoch) {
      std::vector<int64_t> starts;
      for (int64_t s = epoch * n; s < (epoch + 1) * n; ++s) {
        starts.push_back(sampler.TrainingStart(s));
      }
      EXPECT_FALSE(std::is_sorted(starts.begin(), starts.end()));
      std::sort(starts.begin(), starts.end());
      EXPECT_GE(starts.front(), 0);
      EXPECT_LE(starts.back() + seqlen + 1, size);
      for (int64_t i = 0; i + 1 < n; ++i) ASSERT_EQ(starts[i + 1] - starts[i], seqlen);
      phases.insert(starts.front());
    }
    if (seqlen == 64) {
      EXPECT_GT(phases.size(), 2u) << "epochs cut the text in other places";
    }
  }
}

TEST(SequenceSampler, AreAFunctionOfSeedAndSequence) {
  const TokenSpan span = Counting(5000);
  const SequenceSampler sampler = Make(span, 32, 1), same = Make(span, 32, 1),
                        other = Make(span, 32, 2);
  const GlobalBatch all = *sampler.Training(100, 6);
  const GlobalBatch tail = *same.Training(104, 2);
  EXPECT_TRUE(std::equal(tail.tokens.begin(), tail.tokens.end(), all.tokens.begin() + 4 * 32));
  EXPECT_NE(other.Training(100, 6)->tokens, all.tokens);
}

// Each part has its share of 1,000 sequences in a row, and visits its own as if it were alone.
TEST(SequenceSampler, AMixtureDrawsFromEveryPart) {
  TokenSpan span = Counting(3000);
  span.mixture = {{0, 1000, 1.4}, {1000, 2990, 0.5}, {2990, 3000, 0.1}};
  const int64_t shares[] = {700, 250, 50};
  const SequenceSampler sampler = Make(span, 8);
  int64_t per_epoch = 0, sorted = 0;
  for (size_t part = 0; part < 3; ++part) {
    const auto& [begin, end, weight] = span.mixture[part];
    const SequenceSampler alone = Make({span.corpus, begin, end}, 8);
    per_epoch += alone.per_epoch();
    for (int64_t block : {0, 1, 7}) {
      std::vector<int64_t> starts, expected;
      for (int64_t s = 1000 * block; s < 1000 * (block + 1); ++s) {
        const int64_t start = sampler.TrainingStart(s);
        if (begin <= start && start < end) starts.push_back(start);
      }
      for (int64_t i = 0; i < shares[part]; ++i) {
        expected.push_back(alone.TrainingStart(block * shares[part] + i));
      }
      sorted += starts == expected;
      std::sort(starts.begin(), starts.end());
      std::sort(expected.begin(), expected.end());
      EXPECT_EQ(starts, expected) << part << " " << block;
    }
  }
  EXPECT_EQ(sampler.per_epoch(), per_epoch);
  EXPECT_LT(sorted, 9) << "the order is random";
  EXPECT_NE(Make(span, 8, 2).TrainingStart(0), sampler.TrainingStart(0));
  span.mixture[2].weight = 1e-4;
  EXPECT_TRUE(absl::StrContains(SequenceSampler::Create(span, {8, 1, false}).status().message(),
                                "at least one in 1000"));
  span.mixture[2] = {2995, 3000, 1};
  EXPECT_TRUE(absl::StrContains(SequenceSampler::Create(span, {8, 1, false}).status().message(),
                                "holds 5 tokens"));
}

TEST(SequenceSampler, TargetIsTheNextTokenOfTheStream) {
  const GlobalBatch batch = *Make(Counting(1000), 10).Training(0, 8);
  EXPECT_EQ(batch.batch, 8);
  EXPECT_EQ(batch.num_targets, 80);
  for (size_t i = 0; i < batch.tokens.size(); ++i) {
    ASSERT_EQ(batch.targets[i], batch.tokens[i] + 1);  // also at the end of a sequence
    ASSERT_EQ(batch.positions[i], static_cast<int32_t>(i % 10));
  }
}

TEST(SequenceSampler, SmallestData) {
  const TokenSpan span = Counting(11);
  EXPECT_EQ(SequenceSampler::Create(span, {11, 1, false}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const SequenceSampler sampler = Make(span, 10);
  EXPECT_EQ(sampler.per_epoch(), 1);
  for (int64_t s = 0; s < 20; ++s) EXPECT_EQ(sampler.TrainingStart(s), 0);
  const SequenceSampler two = Make(Counting(21), 10);  // one sequence, anywhere
  std::set<int64_t> starts;
  for (int64_t s = 0; s < 200; ++s) starts.insert(two.TrainingStart(s));
  EXPECT_EQ(*starts.begin(), 0);
  EXPECT_EQ(*starts.rbegin(), 10);
}

TEST(SequenceSampler, EvaluationIsSpreadEvenly) {
  TokenSpan span = Counting(1000);
  span.begin = 100;
  const SequenceSampler sampler = Make(span, 10);
  EXPECT_EQ(sampler.max_evaluation(), 89);
  const GlobalBatch batch = *sampler.Evaluation(0, 4, 4);
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(batch.tokens[i * 10], 100 + 89 * i / 4 * 10);
  const GlobalBatch last = *sampler.Evaluation(88, 1, 89);
  EXPECT_EQ(last.tokens.front(), 980);
  EXPECT_EQ(last.targets.back(), 990);
}

// Joined over all ranks, the slices are the batch, with every token once and its own label.
TEST(SliceForRank, LabelsAtRankBoundariesAreRight) {
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    for (int world_size : {1, 2, 3, 4, 8}) {
      for (int64_t seqlen : {1, 5, 16, 37}) {
        const int64_t rows = 3;
        const GlobalBatch batch = *Make(Counting(4000), seqlen).Training(11, rows);
        std::vector<int> seen(rows * seqlen);
        for (int rank = 0; rank < world_size; ++rank) {
          const auto schedule = Schedule(rank, world_size, layout, seqlen);
          const SequenceBatch slice = SliceForRank(batch, schedule);
          const int64_t length = schedule->shard().group_length(rank);
          ASSERT_EQ(slice.tokens.shape(), (Shape{rows, length}));
          ASSERT_EQ(slice.targets.shape(), (Shape{rows, length}));
          for (int64_t row = 0; row < rows; ++row) {
            for (int64_t i = 0; i < length; ++i) {
              const int64_t at = row * length + i;
              const int32_t position = schedule->shard().group_positions(rank)[i];
              ++seen[row * seqlen + position];
              ASSERT_EQ(slice.positions.data<int32_t>()[at], position);
              ASSERT_EQ(slice.tokens.data<int32_t>()[at], batch.tokens[row * seqlen + position]);
              ASSERT_EQ(slice.targets.data<int32_t>()[at], slice.tokens.data<int32_t>()[at] + 1);
            }
          }
        }
        EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), rows * seqlen);
      }
    }
  }
}

// At every place where a sequence can begin, llm.c's shards teach each token after the previous
// one, and the separator as the end of a document. A separator after a separator is not learned.
TEST(SequenceSampler, PackedShardsTeachTheEndOfEveryDocument) {
  const std::vector<int64_t> separators = {3, 4, 5, 9, 20};
  const TokenSpan span = Counting(23, separators);
  const auto is_separator = [&](int64_t at) {
    return std::count(separators.begin(), separators.end(), at) > 0;
  };
  for (int64_t seqlen : {1, 2, 7, 22}) {
    for (int64_t begin = 0; begin + seqlen < 23; ++begin) {
      const SequenceSampler sampler =
          Make({span.corpus, begin, begin + seqlen + 1}, seqlen, 1, /*packed=*/true);
      const GlobalBatch batch = *sampler.Training(0, 1);
      int64_t learned = 0;
      for (int64_t t = 0; t < seqlen; ++t) {
        const int64_t next = begin + t + 1;
        const bool empty = is_separator(next) && is_separator(next - 1);
        const int64_t expected = empty ? -1 : is_separator(next) ? kGpt2EndOfText : next;
        EXPECT_EQ(batch.targets[t], expected) << seqlen << " from " << begin << " at " << t;
        learned += !empty;
      }
      EXPECT_EQ(batch.num_targets, learned);
      EXPECT_EQ(*sampler.TrainingTargets(0, 1), learned);
    }
  }
}

TEST(SequenceSampler, PackedDocumentsRestartPositionsAndKeepTheirTargets) {
  // Documents start at 0, 13, 14 and 30.
  const TokenSpan span = Counting(41, {0, 13, 14, 30});
  const SequenceSampler sampler = Make(span, 10, 1, /*packed=*/true);
  const GlobalBatch batch = *sampler.Evaluation(0, 4, 4);  // sequences begin at 0, 10, 20, 30
  ASSERT_EQ(batch.documents.size(), 4u);
  EXPECT_EQ(batch.documents[0], (std::vector<int32_t>{0}));
  EXPECT_EQ(batch.documents[1], (std::vector<int32_t>{0, 3, 4}));
  EXPECT_EQ(batch.documents[2], (std::vector<int32_t>{0}));
  EXPECT_EQ(batch.documents[3], (std::vector<int32_t>{0}));
  // The end of a document is learned, also by the last token of the third sequence. The document
  // from 13 to 14 is empty.
  EXPECT_EQ(batch.num_targets, 39);
  for (int64_t t : {12, 29}) EXPECT_EQ(batch.targets[t], kGpt2EndOfText) << t;
  EXPECT_EQ(batch.targets[13], -1);
  EXPECT_EQ(std::count(batch.targets.begin(), batch.targets.end(), -1), 1);
  const std::vector<int32_t> positions(batch.positions.begin() + 10, batch.positions.begin() + 20);
  EXPECT_EQ(positions, (std::vector<int32_t>{0, 1, 2, 0, 0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(batch.targets[11], 12);
  // The ring takes these documents.
  EXPECT_EQ(Schedule(1, 3, Layout::kZigzag, 10, batch.documents)->rows(), 4);
  // Without packing, the same sampler ignores documents.
  const GlobalBatch plain = *Make(span, 10).Evaluation(0, 4, 4);
  EXPECT_TRUE(plain.documents.empty());
  EXPECT_EQ(plain.num_targets, 40);
  for (bool packed : {false, true}) {
    const SequenceSampler sampler = Make(span, 10, /*seed=*/1, packed);
    EXPECT_EQ(*sampler.TrainingTargets(3, 7), sampler.Training(3, 7)->num_targets) << packed;
  }
  EXPECT_EQ(plain.targets[12], kGpt2EndOfText);
}

}  // namespace
}  // namespace burst
