// ExactSchedule: the schedule of attention that takes queries in chunks (ExactAttention). Each
// chunk has all keys that it sees of the whole sequence, so that a call does not depend on how
// chunks are spread over ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/kernel_mask.h"
#include "burst/kernels/flash_attention.h"
#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"

namespace burst {

class ExactSchedule {
 public:
  // For chunks of `chunk` tokens. The mask is not of slices. InvalidArgument for a mask that does
  // not fit the sequence, and if a rank's tokens are not whole chunks.
  static absl::StatusOr<ExactSchedule> Create(TokenShard shard, int64_t chunk, const Mask& mask);

  const TokenShard& shard() const { return shard_; }
  int64_t rows() const {
    return visible_.rows;
  }  // batch rows with masks of their own; 1: all alike

  int64_t chunk() const { return chunk_; }                   // tokens of a chunk
  int64_t count() const { return visible_.q_len / chunk_; }  // chunks of this rank

  // A chunk's queries see keys at the positions [begin, begin + length) alone; length may be 0.
  struct Keys {
    int64_t begin = 0, length = 0;
  };
  const Keys& KeysOf(int64_t row, int64_t index) const {
    return keys_[(rows() == 1 ? 0 : row) * count() + index];
  }
  // Gives the kernels which of these keys the queries of one chunk see, in one batch row. If the
  // chunk is the whole sequence, it is for the rows from that one on.
  KeyRanges RangesOf(int64_t row, int64_t index, DeviceType device) const;

 private:
  ExactSchedule(TokenShard shard, int64_t chunk, const Mask& mask);

  TokenShard shard_;
  int64_t chunk_;
  std::vector<Keys> keys_;  // [rows, count]
  // The keys that all queries see, [rows, count * chunk]; begin and end are counted from the
  // chunk's first key. A chunk that is a whole sequence has all keys.
  KernelKeys visible_;
};

// A layout of whole chunks: what the layout says of tokens, said of chunks of `chunk` tokens, which
// divides seqlen. The positions of each of `ranks` ranks, increasing; some may have none. The mask
// is not of slices, and fits the sequence.
std::vector<std::vector<int32_t>> ChunkPositions(Layout layout, const Mask& mask, int64_t seqlen,
                                                 int64_t chunk, int ranks);

}  // namespace burst
