// Which of the kernels' calls that add to a gradient is the first for some of its heads, and so
// assigns it, and which the last. In a ring the own block is computed in two calls, half of the
// heads each, with those of the other blocks in between: so heads do not begin and end alike.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/kernels/flash_attention.h"

namespace burst {

class HeadCalls {
 public:
  explicit HeadCalls(int64_t num_heads) : calls_(num_heads) {}

  // Announces so many calls for these heads. All calls are announced before the first one.
  void Announce(const HeadRange& heads, int64_t calls);
  // Whether there is a call for every head. Where there is none, nobody would assign the gradient.
  bool ForAllHeads() const;
  // The gradient holds something already: no call is the first.
  void OnlyAdd();

  // What the next call for these heads is the first and the last for, counted from heads.begin.
  struct Ends {
    HeadRange first, last;
  };
  Ends Next(const HeadRange& heads);

 private:
  struct Calls {
    bool begun = false;
    int64_t left = 0;
  };
  std::vector<Calls> calls_;  // of each head
};

}  // namespace burst
