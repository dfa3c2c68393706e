// The mask between a block of queries and a block of keys. Both are lists of tokens in order of
// position; queries and keys are numbered within their blocks.
#pragma once

#include <cstdint>
#include <vector>

namespace burst {

// Shows one interval of keys to each query: query i sees the keys begin[i] <= j < end[i]. begin and
// end never decrease within a row.
struct VisibleKeys {
  VisibleKeys() = default;
  VisibleKeys(int64_t rows, int64_t q_len);  // no query sees a key

  std::vector<int32_t> begin, end;  // [rows, q_len]
  int64_t rows = 1;                 // batch rows described; 1: the same for all
  int64_t q_len = 0;
  int64_t pairs = 0;  // (query, key) pairs seen, summed over rows
  bool all = false;   // every query sees every key

  bool none() const { return pairs == 0; }
  // Sets pairs and all, from begin and end.
  void Count(int64_t k_len);
};

// Shows whole blocks, of a grid of `block` queries by `block` keys, as lists. The last block of a
// row or column has the tokens that are left.
struct VisibleBlocks {
  // Empty at first. The caller adds the key blocks of each query block to key_list, with BeginRow
  // and EndQueryBlock around them, and then calls Finish.
  VisibleBlocks() = default;
  VisibleBlocks(int64_t rows, int64_t q_len, int64_t k_len, int64_t block);
  void BeginRow();
  void EndQueryBlock();
  void Finish();

  int64_t rows = 1;
  int64_t q_len = 0, k_len = 0, block = 1;
  // Query block i sees the key blocks key_list[key_begin[i]], ..., key_list[key_begin[i + 1] - 1],
  // increasing.
  std::vector<int32_t> key_begin;  // [rows, query_blocks() + 1]
  // Key block j is seen by the query blocks query_list[query_begin[j]], ..., increasing. It is
  // number place_list[query_begin[j]], ..., from 0, of the list of each.
  std::vector<int32_t> query_begin;  // [rows, key_blocks() + 1]
  std::vector<int32_t> key_list, query_list, place_list;
  int64_t pairs = 0;  // (query, key) pairs seen, summed over rows

  bool none() const { return key_list.empty(); }
  int64_t query_blocks() const { return (q_len + block - 1) / block; }
  int64_t key_blocks() const { return (k_len + block - 1) / block; }
  // Returns these keys in parts of one interval a query.
  std::vector<VisibleKeys> AsIntervals() const;
};

// The union of disjoint parts: of one interval a query, at least one of them unless there are
// blocks, and of whole blocks.
struct BlockMask {
  std::vector<VisibleKeys> parts;
  VisibleBlocks blocks = {};

  int64_t pairs() const;
  bool none() const { return pairs() == 0; }
};

}  // namespace burst
