#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "train/generate/generate.h"

namespace burst {
namespace {

TEST(SampleToken, ZeroTemperatureTakesTheLikeliest) {
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(SampleToken({0.f, 3.f, 3.f, 1.f}, {0, 0, 1}, i), 1);
}

TEST(SampleToken, FrequenciesAreThoseOfTheSoftmax) {
  const std::vector<float> logits = {0.5f, -1.f, 2.f, 1.f};
  for (double temperature : {0.5, 1.0, 2.0}) {
    std::vector<double> expected;
    double sum = 0;
    for (float logit : logits) sum += std::exp(logit / temperature);
    for (float logit : logits) expected.push_back(std::exp(logit / temperature) / sum);
    const int n = 20000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < n; ++i) ++counts[SampleToken(logits, {temperature, 0, 7}, i)];
    for (size_t t = 0; t < logits.size(); ++t) {
      // The bound is five standard deviations of a binomial.
      const double deviation = std::sqrt(n * expected[t] * (1 - expected[t]));
      EXPECT_NEAR(counts[t], n * expected[t], 5 * deviation) << t;
    }
  }
}

TEST(SampleToken, TopKKeepsTheLikeliest) {
  const std::vector<float> logits = {0.f, 5.f, 5.f, 4.9f, -1.f};
  std::vector<int> counts(logits.size());
  for (int i = 0; i < 1000; ++i) ++counts[SampleToken(logits, {1.0, 2, 3}, i)];
  EXPECT_EQ(counts[0] + counts[3] + counts[4], 0);
  EXPECT_GT(counts[1], 400);
  EXPECT_GT(counts[2], 400);
}

// As in transformers, top_k comes before top_p, and that before min_p.
TEST(SampleToken, TopPAndMinPKeepTheLikeliest) {
  // Probabilities 0.5, 0.25, 0.125, 0.125, in another order.
  const std::vector<float> logits = {std::log(0.125f), std::log(0.5f), std::log(0.25f),
                                     std::log(0.125f)};
  const auto kept = [&](int64_t top_k, double top_p, double min_p) {
    std::vector<bool> seen(logits.size());
    for (int i = 0; i < 500; ++i) {
      seen[SampleToken(logits, {1.0, top_k, 3, top_p, min_p}, i)] = true;
    }
    return seen;
  };
  EXPECT_EQ(kept(0, 1, 0), (std::vector<bool>{true, true, true, true}));
  EXPECT_EQ(kept(0, 0.4, 0), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(kept(0, 0.7, 0), (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(kept(0, 0.8, 0), (std::vector<bool>{true, true, true, false}));
  EXPECT_EQ(kept(0, 1, 0.3), (std::vector<bool>{false, true, true, false}));
  EXPECT_EQ(kept(0, 1, 1), (std::vector<bool>{false, true, false, false}));
  // top_k leaves two tokens, and the first one has 2/3 of their probability.
  EXPECT_EQ(kept(2, 0.6, 0), (std::vector<bool>{false, true, false, false}));
  EXPECT_EQ(kept(2, 0.7, 0), (std::vector<bool>{false, true, true, false}));
}

TEST(PenalizeRepetition, DividesOrMultipliesOnce) {
  std::vector<float> logits = {2.f, -2.f, 3.f};
  PenalizeRepetition({0, 1, 0, 7}, 4, &logits);
  EXPECT_EQ(logits, (std::vector<float>{0.5f, -8.f, 3.f}));
  PenalizeRepetition({2}, 1, &logits);
  EXPECT_EQ(logits[2], 3.f);
}

TEST(SampleToken, IsAFunctionOfSeedAndIndex) {
  const std::vector<float> logits(100, 0.f);
  int equal = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(SampleToken(logits, {1, 0, 1}, i), SampleToken(logits, {1, 0, 1}, i));
    equal += SampleToken(logits, {1, 0, 1}, i) == SampleToken(logits, {1, 0, 2}, i);
  }
  EXPECT_LT(equal, 10);
}

TEST(SampleToken, HugeLogitsDoNotOverflow) {
  EXPECT_EQ(SampleToken({1e30f, -1e30f, 0.f}, {1e-3, 0, 1}, 0), 0);
}

// Characters of one to four bytes come byte by byte. Bytes that are not UTF-8 are shown soon.
TEST(CharacterStream, ShowsWholeCharacters) {
  const std::string characters[] = {"a", "\xC3\xA9", "\xE4\xBD\xA0", "\xF0\x9F\x98\x80"};
  CharacterStream stream;
  for (const std::string& character : characters) {
    for (size_t i = 0; i + 1 < character.size(); ++i) {
      EXPECT_EQ(stream.Append(character.substr(i, 1)), "");
    }
    EXPECT_EQ(stream.Append(character.substr(character.size() - 1)), character);
  }
  EXPECT_EQ(stream.Append("xy\xE4\xBD"), "xy");
  EXPECT_EQ(stream.Append("z"), "\xE4\xBDz");
  EXPECT_EQ(stream.Append("\x80\x80\x80\x80"), "\x80\x80\x80\x80");
  EXPECT_EQ(stream.Append("\xF0\x9F"), "");
  EXPECT_EQ(stream.Rest(), "\xF0\x9F");
  EXPECT_EQ(stream.Rest(), "");
}

// Whatever the pieces, the text ends before the first place of the stop.
TEST(TextBefore, CutsWhateverThePieces) {
  for (const std::string text : {"aabaabaac", "abab", "aab", "", "aaaaab", "xaabaabaabaac"}) {
    for (const std::string stop : {"", "aab", "a", "aabaac", "c", "zz", "abac"}) {
      const std::string expected = stop.empty() ? text : text.substr(0, text.find(stop));
      for (int cuts = 0; cuts < 1 << text.size(); ++cuts) {
        TextBefore before(stop);
        std::string shown, piece;
        for (size_t i = 0; i < text.size() && !before.ended(); ++i) {
          piece += text[i];
          if ((cuts >> i & 1) == 0 && i + 1 < text.size()) continue;
          shown += before.Append(piece);
          piece.clear();
        }
        shown += before.Rest();
        ASSERT_EQ(shown, expected) << text << " " << stop << " " << cuts;
        ASSERT_EQ(before.ended(), expected != text);
      }
    }
  }
}

}  // namespace
}  // namespace burst
