// A function of old_glibc.cc for its test.
#pragma once

#include <time.h>

namespace burst {

// Returns the time of CLOCK_REALTIME at which another clock reaches `until`, if nobody sets the
// real time.
timespec OnRealTime(clockid_t clock, const timespec& until);

}  // namespace burst
