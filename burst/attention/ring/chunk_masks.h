// The mask of attention that takes queries chunk by chunk (ExactAttention). Each chunk has all keys
// that it sees of the whole sequence. The mask does not depend on how chunks are spread over ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/attention/kernel_mask.h"
#include "burst/kernels/flash_attention.h"
#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"

namespace burst {

struct ChunkMasks {
  // A chunk's queries see keys at the positions [begin, begin + length) alone; length may be 0.
  struct Keys {
    int64_t begin = 0, length = 0;
  };

  int64_t chunk = 0;       // tokens of a chunk
  int64_t rows = 1;        // batch rows that there are masks for; 1: the same for all
  int64_t count = 0;       // chunks of this rank
  std::vector<Keys> keys;  // [rows, count]
  // The keys that all queries see, [rows, count * chunk]; begin and end are counted from the
  // chunk's first key. A chunk that is a whole sequence has all keys.
  KernelKeys visible;

  const Keys& KeysOf(int64_t row, int64_t index) const {
    return keys[(rows == 1 ? 0 : row) * count + index];
  }
  // For the kernels: that of one chunk in one batch row, or, if it is the whole sequence, in the
  // rows from that one on.
  KeyRanges RangesOf(int64_t row, int64_t index, DeviceType device) const;
};

// positions: of this rank's tokens, whole chunks of consecutive tokens; `seqlen` tokens in all.
// The mask is not one of slices.
ChunkMasks ComputeChunkMasks(const Mask& mask, const std::vector<int32_t>& positions,
                             int64_t seqlen, int64_t chunk);

// A layout of whole chunks: what the layout says of tokens, said of chunks of `chunk` tokens, which
// divides seqlen. The positions of each of `ranks` ranks, increasing; some may have none.
std::vector<std::vector<int32_t>> ChunkPositions(Layout layout, const Mask& mask, int64_t seqlen,
                                                 int64_t chunk, int ranks);

}  // namespace burst
