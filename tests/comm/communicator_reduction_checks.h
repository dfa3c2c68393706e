// The checks of reductions, for communicator_checks.h.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "tests/comm/communicator_checks.h"

namespace burst {

// Returns the n numbers that a rank contributes. T is float or double.
template <typename T>
Tensor SumInputs(int rank, int64_t n, DeviceType device);

// Checks the sum of all ranks' SumInputs against long double, within the bound of n - 1 roundings.
// With fixed_order it also checks to the bit, in the order that Communicator specifies, so that all
// ranks and all transports agree. Checks every stride-th element.
template <typename T>
void CheckSum(const Tensor& sum, int ranks, bool fixed_order, int64_t stride = 1);

absl::Status CheckAllReduce(Communicator& comm, const CheckOptions& options);
// Checks sums whose segments have more than one piece, the last one short.
absl::Status CheckAllReduceInPieces(Communicator& comm, const CheckOptions& options);

}  // namespace burst
