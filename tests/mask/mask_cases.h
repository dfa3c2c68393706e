// Masks for tests, clipped to sequences of any length, and the keys that lists of blocks show.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "burst/mask/mask.h"
#include "tests/mask/mask_definition.h"

namespace burst {

struct MaskCase {
  const char* name;
  IntervalMask mask;       // documents and spans are clipped to the sequence
  MaskSlices slices = {};  // in place of `mask`; slices are clipped, too
};

inline constexpr SliceKind kKinds[] = {SliceKind::kFull, SliceKind::kCausal,
                                       SliceKind::kInverseCausal, SliceKind::kBand};

// Returns overlapping slices of any place and size, with a list for each row.
inline MaskSlices RandomSlices(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int32_t>(random() % n); };
  MaskSlices slices(1 + below(3));
  for (std::vector<MaskSlice>& row : slices) {
    for (int n = below(12); n > 0; --n) {
      const int32_t q = below(33), k = below(66) - 33;
      row.push_back({q, q + 1 + below(33 - q), k, k + 1 + below(66), kKinds[below(4)]});
    }
  }
  return slices;
}

inline std::vector<MaskCase> MaskCases() {
  return {{"full", {false, 0}},
          {"causal", {true, 0}},
          {"window", {true, 5}},
          {"window of one", {true, 1}},
          {"two-sided window", {false, 7}},
          {"window of any size", {true, INT64_MAX}},
          {"packed", {true, 0, {{0, 3, 4, 11, 26}, {9}, {0, 1, 2, 30}}}},
          {"packed window", {true, 4, {{5, 12}, {}, {1}}}},
          {"packed full", {false, 0, {{2, 20}}}},
          {"prefix", {true, 0, {}, {{{0, 9}}}}},
          {"packed prefixes", {true, 0, {{0, 3, 11}}, {{{0, 2}, {3, 9}, {11, 30}}}}},
          {"images", {true, 0, {}, {{{1, 4}, {4, 5}, {12, 33}}, {}, {{0, 33}}}}},
          {"images under a window", {true, 4, {{0, 20}}, {{{3, 13}, {20, 31}}}}},
          {"images under a two-sided window", {false, 3, {}, {{{2, 16}}}}},
          {"blocks", {true, 0, {}, {{{0, 8}, {8, 16}, {16, 24}, {24, 32}}}}},
          {"tree", {}, {TreeSlices(9, {6, 1, 17})}},
          {"global tokens", {}, {WindowWithGlobalTokens(33, 6, {0, 1, 17}, true)}},
          {"global tokens", {}, {WindowWithGlobalTokens(33, 3, {5, 16, 17, 32}, false)}},
          {"blocks", {}, {BlockSlices(33, 4, {{0}, {0, 1}, {7}, {}, {3, 4}}, true)}},
          {"one slice", {}, {{{3, 20, 8, 25, SliceKind::kBand}}, {}}},
          {"slices 1", {}, RandomSlices(1)},
          {"slices 2", {}, RandomSlices(2)},
          {"slices 3", {}, RandomSlices(3)}};
}

inline DocumentStarts Clip(const DocumentStarts& documents, int64_t seqlen) {
  DocumentStarts clipped = documents;
  for (auto& row : clipped) {
    row.erase(std::remove_if(row.begin(), row.end(), [&](int32_t p) { return p >= seqlen; }),
              row.end());
  }
  return clipped;
}

inline Spans Clip(const Spans& spans, int64_t seqlen) {
  Spans clipped = spans;
  for (auto& row : clipped) {
    for (Span& span : row) span.end = std::min(span.end, static_cast<int32_t>(seqlen));
    row.erase(std::remove_if(row.begin(), row.end(), [](Span s) { return s.begin >= s.end; }),
              row.end());
  }
  return clipped;
}

// Returns the slices whose queries are inside the sequence.
inline MaskSlices Clip(const MaskSlices& slices, int64_t seqlen) {
  const auto n = static_cast<int32_t>(seqlen);
  MaskSlices clipped = slices;
  for (auto& row : clipped) {
    row.erase(
        std::remove_if(row.begin(), row.end(), [n](const MaskSlice& s) { return s.q_end > n; }),
        row.end());
  }
  return clipped;
}

// Returns the case's mask of a sequence.
inline Mask MaskOf(const MaskCase& c, int64_t seqlen) {
  if (!c.slices.empty()) return Mask::Slices(Clip(c.slices, seqlen));
  return MaskOf(
      {c.mask.causal, c.mask.window, Clip(c.mask.documents, seqlen), Clip(c.mask.spans, seqlen)});
}

// Returns whether a query sees a key by the definition, in global positions.
inline bool Visible(const MaskCase& c, int64_t seqlen, int64_t row, int64_t q, int64_t k) {
  if (!c.slices.empty()) return Visible(Clip(c.slices, seqlen), row, q, k);
  return Visible(IntervalMask{c.mask.causal, c.mask.window, Clip(c.mask.documents, seqlen),
                              Clip(c.mask.spans, seqlen)},
                 row, q, k);
}

// Adds the keys that lists of blocks show to seen[row, query, key]. The lists of queries, the lists
// of keys, and the intervals for kernels without lists must agree.
inline void AddBlocks(const VisibleBlocks& blocks, int64_t rows, int64_t q_len, int64_t k_len,
                      std::vector<int>* seen) {
  if (blocks.none()) {
    EXPECT_EQ(blocks.pairs, 0);
    return;
  }
  EXPECT_EQ(blocks.rows, rows);
  EXPECT_EQ(blocks.q_len, q_len);
  EXPECT_EQ(blocks.k_len, k_len);
  std::vector<int> shown(seen->size());
  std::set<std::array<int64_t, 4>> by_queries, by_keys;  // row, query block, key block, place
  int64_t pairs = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* begin = blocks.key_begin.data() + row * (blocks.query_blocks() + 1);
    for (int64_t i = 0; i < blocks.query_blocks(); ++i) {
      for (int64_t at = begin[i]; at < begin[i + 1]; ++at) {
        const int64_t j = blocks.key_list[at];
        EXPECT_TRUE(at == begin[i] || blocks.key_list[at - 1] < j) << "order";
        by_queries.insert({row, i, j, at - begin[i]});
        for (int64_t q = i * blocks.block; q < std::min(q_len, (i + 1) * blocks.block); ++q) {
          for (int64_t k = j * blocks.block; k < std::min(k_len, (j + 1) * blocks.block); ++k) {
            ++shown[(row * q_len + q) * k_len + k];
            ++pairs;
          }
        }
      }
    }
    begin = blocks.query_begin.data() + row * (blocks.key_blocks() + 1);
    for (int64_t j = 0; j < blocks.key_blocks(); ++j) {
      for (int64_t at = begin[j]; at < begin[j + 1]; ++at) {
        const int64_t i = blocks.query_list[at];
        EXPECT_TRUE(at == begin[j] || blocks.query_list[at - 1] < i) << "order";
        by_keys.insert({row, i, j, blocks.place_list[at]});
      }
    }
  }
  EXPECT_EQ(blocks.pairs, pairs);
  EXPECT_EQ(by_queries, by_keys);
  EXPECT_EQ(by_queries.size(), blocks.key_list.size());
  EXPECT_EQ(by_queries.size(), blocks.query_list.size());
  std::vector<int> in_parts(seen->size());
  for (const VisibleKeys& part : blocks.AsIntervals()) {
    for (int64_t at = 0; at < rows * q_len; ++at) {
      EXPECT_TRUE(at % q_len == 0 ||
                  (part.begin[at - 1] <= part.begin[at] && part.end[at - 1] <= part.end[at]));
      for (int32_t k = part.begin[at]; k < part.end[at]; ++k) ++in_parts[at * k_len + k];
    }
  }
  EXPECT_EQ(in_parts, shown);
  for (size_t n = 0; n < seen->size(); ++n) (*seen)[n] += shown[n];
}

}  // namespace burst
