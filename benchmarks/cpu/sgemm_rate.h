// Measures the limit of CPU benchmarks: the rate of large single-precision GEMMs, on the same
// threads, in the same process.
#pragma once

namespace burst {

// Returns the FLOP/s of 1024 x 1024 x 1024 GEMMs on the caller's thread pool, the best of several
// tries. Every thread has matrices of its own.
double SgemmRate();

}  // namespace burst
