// Places in a text, in increasing order, that a form of the text moves.
#pragma once

#include <cstddef>

#include "absl/types/span.h"

namespace burst {

// Removes the places before `end` from the beginning of `*places`. Returns them, counted from
// `begin`.
inline absl::Span<size_t> TakePlaces(size_t begin, size_t end, absl::Span<size_t>* places) {
  size_t count = 0;
  for (; count < places->size() && (*places)[count] < end; ++count) (*places)[count] -= begin;
  const absl::Span<size_t> taken = places->subspan(0, count);
  places->remove_prefix(count);
  return taken;
}

// Moves places by a number of bytes.
inline void MovePlaces(size_t bytes, absl::Span<size_t> places) {
  for (size_t& place : places) place += bytes;
}

}  // namespace burst
