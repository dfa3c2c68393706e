// The limit that CPU benchmarks are measured against: the rate of large single-precision
// GEMMs, on the same threads, in the same process.
#pragma once

namespace burst {

// FLOP/s of 1024 x 1024 x 1024 GEMMs on the caller's thread pool, every thread with matrices of
// its own; the best of several tries.
double SgemmRate();

}  // namespace burst
