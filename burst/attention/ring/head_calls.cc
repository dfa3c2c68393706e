#include "burst/attention/ring/head_calls.h"

#include <algorithm>

#include "burst/base/check.h"

namespace burst {
namespace {

void Append(int64_t head, HeadRange* range) {
  if (range->empty()) *range = {head, head};
  BURST_CHECK_EQ(range->end, head);  // heads that begin or end together are neighbors
  ++range->end;
}

}  // namespace

void HeadCalls::Announce(const HeadRange& heads, int64_t calls) {
  for (int64_t head = heads.begin; head < heads.end; ++head) calls_[head].left += calls;
}

bool HeadCalls::ForAllHeads() const {
  return std::all_of(calls_.begin(), calls_.end(),
                     [](const Calls& calls) { return calls.begun || calls.left > 0; });
}

void HeadCalls::OnlyAdd() {
  for (Calls& calls : calls_) calls.begun = true;
}

HeadCalls::Ends HeadCalls::Next(const HeadRange& heads) {
  Ends ends;
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    Calls& calls = calls_[head];
    BURST_CHECK_GT(calls.left, 0);
    if (!calls.begun) Append(head - heads.begin, &ends.first);
    calls.begun = true;
    if (--calls.left == 0) Append(head - heads.begin, &ends.last);
  }
  return ends;
}

}  // namespace burst
