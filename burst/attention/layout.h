// Which tokens of the sequence live on which rank.
//
// Contiguous: rank r holds the r-th G-th of the sequence. Zigzag: the sequence is cut in 2G chunks
// and rank r holds chunks r and 2G-1-r, so that under a causal mask every rank has the same work.
// Striped: rank r holds the tokens t = r mod G (Brandon et al., arXiv 2311.09431).
//
// Lengths need not divide: chunks differ by at most one token, and some may be empty.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

enum class Layout { kContiguous, kZigzag, kStriped };

absl::StatusOr<Layout> ParseLayout(absl::string_view name);  // "contiguous", "zigzag", "striped"
const char* Name(Layout layout);

// The global positions of the tokens on `rank`, increasing. Every position of [0, seqlen) is on
// exactly one of the world_size ranks.
std::vector<int32_t> LocalPositions(Layout layout, int64_t seqlen, int rank, int world_size);

}  // namespace burst
