// The layout "balanced" deals packed documents to ranks. Every rank has the same number of tokens
// and nearly the same work, and little is sent.
//
// A document stays whole, on one rank, if its work is small compared with a rank's share; it is
// then never sent. A longer one is spread over as many neighboring ranks as its work needs, in
// zigzag under a causal mask. Or it is cut where its first part has most of a share, and only its
// last part goes to another rank. Documents with the most work come first, each to the ranks that
// have the least so far (longest processing time first). At the end, a document for which no rank
// has room is cut to fill the gaps. This is done for several sizes from which on documents are
// spread or cut.
//
// The result is one of these divisions, or the contiguous or the zigzag layout. Candidates are
// those whose busiest rank has at most 1.05 times the mean work. The fastest candidate is taken, by
// an estimate from the pairs with keys of other ranks and the tokens sent. If there is none, the
// most balanced division is taken.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"

namespace burst {

// The positions of each rank, increasing; as many as the zigzag layout gives it. A pure function of
// its arguments, the same on every rank. The mask must fit the sequence. If its documents have
// several rows, one division serves all rows, by their work together, in chunks. Without documents
// the layout is zigzag. Ranks are `groups` times `group_size`; the work is balanced between groups,
// whose ranks divide heads.
std::vector<std::vector<int32_t>> BalancedPositions(const Mask& mask, int64_t seqlen, int groups,
                                                    int group_size = 1);

}  // namespace burst
