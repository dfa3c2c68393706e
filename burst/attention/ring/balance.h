// The layout "balanced": packed documents are dealt to ranks such that every rank has the same
// number of tokens and nearly the same work, and little is sent.
//
// A document whose work is small beside a rank's share stays whole, on one rank, and so is never
// sent. A longer one is spread over as many neighboring ranks as its work needs, in zigzag under a
// causal mask. Those with the most work come first, each to the ranks that have the least so far
// (longest processing time first). What no rank has room for at the end is cut to fill the gaps.
// This is done for several sizes from which on documents are spread. Of these divisions, and those
// of the contiguous and the zigzag layout, the one is taken that sends the fewest tokens, by an
// estimate, where the busiest rank has no more than 1.05 times the mean; or else the most balanced
// one.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/attention/ring/mask.h"
#include "burst/sequence/token_shard.h"

namespace burst {

// The positions of each rank, increasing; as many as the zigzag layout gives it. A pure function of
// its arguments, the same on every rank. `documents` of several rows: one division for all, by
// their work together, in chunks. Without documents: the zigzag layout. Ranks are `groups` times
// `group_size`; the work is balanced between groups, whose ranks divide heads.
std::vector<std::vector<int32_t>> BalancedPositions(const AttentionMask& mask,
                                                    const DocumentStarts& documents, int64_t seqlen,
                                                    int groups, int group_size = 1);

}  // namespace burst
