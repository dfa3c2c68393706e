// Which keys a query sees: the mask by its definition, in global positions of tokens, and the form
// in which the kernels take it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/kernels/flash_attention.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

// A query at position q sees the keys at positions p with ...
struct AttentionMask {
  bool causal = true;  // p <= q
  int64_t window = 0;  // sliding window: |q - p| < window; 0: no limit
  // With packed documents (DocumentStarts), a query sees keys of its own document only. With
  // spans (Spans), it sees all keys of its span in that document, whatever `causal` and `window`
  // say.
};

// InvalidArgument for starts that are out of order or beyond the sequence.
absl::Status CheckDocuments(int64_t seqlen, const DocumentStarts& documents);

// Rows that lists of documents and of spans are for; a list of one row is for all.
int64_t NumRows(const DocumentStarts& documents, const Spans& spans);

// A mask between a block of queries and a block of keys, of which query i sees the keys
// begin[i] <= j < end[i]. begin and end never decrease within a row (KeyRanges).
struct VisibleKeys {
  std::vector<int32_t> begin, end;  // [rows, q_len]; rows: 1, or batch with documents or spans
  int64_t rows = 1;
  int64_t q_len = 0;
  int64_t pairs = 0;         // (query, key) pairs seen, summed over rows
  int64_t seeing = 0;        // queries that see some key, summed over rows
  bool all = false;          // every query sees every key
  int64_t most_queries = 0;  // of any key, from the first to the last that sees it

  mutable Tensor on_gpu;  // [2, rows, q_len]: begin and end, copied there at their first use

  bool none() const { return pairs == 0; }
  // For the kernels of a device: points into begin and end, or into their copy on the GPU. There
  // is one copy, since a schedule serves one rank on one device.
  KeyRanges ranges(DeviceType device = DeviceType::kCpu) const;
  // Sets pairs, seeing, all and most_queries, from begin and end.
  void Count(int64_t k_len);
};

// Nobody sees anything.
VisibleKeys EmptyKeys(int64_t rows, int64_t q_len);

// The whole blocks of such a mask on a grid of `block` queries by `block` keys, as lists
// (KeyBlocks).
struct VisibleBlocks {
  // None, so far. Filled in by a BeginRow for every row and, for each of its query blocks, the key
  // blocks in key_list and an EndQueryBlock; then Finish.
  VisibleBlocks() = default;
  VisibleBlocks(int64_t rows, int64_t q_len, int64_t k_len, int64_t block = kListBlock);
  void BeginRow();
  void EndQueryBlock();
  void Finish();

  int64_t rows = 1;
  int64_t q_len = 0, k_len = 0, block = kListBlock;
  std::vector<int32_t> key_begin;    // [rows, query_blocks() + 1]
  std::vector<int32_t> query_begin;  // [rows, key_blocks() + 1]
  std::vector<int32_t> key_list, query_list, place_list;
  int64_t pairs = 0;  // (query, key) pairs seen, summed over rows

  mutable Tensor on_gpu;                      // all lists, copied there at their first use
  mutable std::vector<VisibleKeys> as_parts;  // made at the first use

  bool none() const { return key_list.empty(); }
  int64_t query_blocks() const { return (q_len + block - 1) / block; }
  int64_t key_blocks() const { return (k_len + block - 1) / block; }
  // For the kernels of a device; block is kListBlock. Points into the vectors or their copy.
  KeyBlocks lists(DeviceType device = DeviceType::kCpu) const;
  // The visible keys for kernels that take no lists.
  const std::vector<VisibleKeys>& parts() const;
};

// The mask between a block of queries and a block of keys: the union of disjoint parts, of one
// interval a query or of whole blocks; at least one. One part of intervals is all that a window,
// documents and spans need: blocks are in order of position, so that the keys which a query sees
// are neighbors. Slices (slices.h) may need more.
struct BlockMask {
  std::vector<VisibleKeys> parts;
  VisibleBlocks blocks = {};

  int64_t pairs() const;
  bool none() const { return pairs() == 0; }
};

// Both lists of positions are increasing. O(queries + keys) for each row.
VisibleKeys ComputeVisibleKeys(const AttentionMask& mask, const DocumentStarts& documents,
                               const Spans& spans, const std::vector<int32_t>& q_positions,
                               const std::vector<int32_t>& k_positions);

// Whether some query sees some key: !ComputeVisibleKeys(...).none(), sooner.
bool SeesAny(const AttentionMask& mask, const DocumentStarts& documents, const Spans& spans,
             const std::vector<int32_t>& q_positions, const std::vector<int32_t>& k_positions);

}  // namespace burst
