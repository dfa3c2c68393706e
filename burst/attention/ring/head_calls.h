// Tracks, for each head, which kernel call is the first and which is the last to add to a gradient.
// The first call assigns the gradient. In a ring, a rank's own block is computed in two calls, half
// of the heads each, with the other blocks in between. So the first and the last call differ per
// head.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/kernels/flash_attention.h"

namespace burst {

class HeadCalls {
 public:
  explicit HeadCalls(int64_t num_heads) : calls_(num_heads) {}

  // Announces `calls` calls for these heads. All calls are announced before the first one.
  void Announce(const HeadRange& heads, int64_t calls);
  // Whether there is a call for every head. If a head has no call, no kernel would write its
  // gradient.
  bool ForAllHeads() const;
  // The gradient holds something already: no call is the first.
  void OnlyAdd();

  // Returns the heads for which the next call is the first, and those for which it is the last,
  // counted from heads.begin.
  struct Ends {
    HeadRange first, last;
  };
  Ends Next(const HeadRange& heads);

 private:
  struct Calls {
    bool begun = false;
    int64_t left = 0;
  };
  std::vector<Calls> calls_;  // the calls of each head
};

}  // namespace burst
