// Which tokens of the sequence live on which rank.
//
// With G ranks:
//   contiguous  the sequence is cut into G chunks; rank r holds chunk r.
//   zigzag      it is cut into 2G chunks; rank r holds chunks r and 2G-1-r, so that under a causal
//               mask every rank has the same work.
//   striped     rank r holds the tokens t with t mod G = r (Brandon et al., arXiv 2311.09431).
//
// The length need not be divisible: chunks differ by at most one token, and some may be empty.
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
