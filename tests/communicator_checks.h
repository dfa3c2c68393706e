// What every communicator must do, whatever carries its messages: run for threads by
// communicator_test, for processes by mpi_communicator_test.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"

namespace burst {

// Called on every rank of the communicator. What is wrong fails the test by EXPECT; a status is
// returned only where the rank cannot go on.
struct CommunicatorCheck {
  const char* name;
  absl::Status (*run)(Communicator& communicator);
};
inline void PrintTo(const CommunicatorCheck& check, std::ostream* out) { *out << check.name; }

const std::vector<CommunicatorCheck>& CommunicatorChecks();

// A digest of the bits that AllReduceSum leaves of fixed inputs, to compare transports.
absl::StatusOr<uint64_t> AllReduceDigest(Communicator& communicator);

}  // namespace burst
