// Checks that every communicator must pass, with any transport, in host and in GPU memory.
#pragma once

#include <cstdint>
#include <ostream>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"

namespace burst {

// Says which memory to move, and where the transports differ.
struct CheckOptions {
  DeviceType device = DeviceType::kCpu;
  bool fixed_order = true;     // AllReduceSum accumulates in the order of the base class
  bool posts_in_turn = false;  // a channel's Post starts when the one before it is done
};

// Called on every rank of the communicator. Errors fail the test by EXPECT; a status is returned
// only where the rank cannot continue.
struct CommunicatorCheck {
  const char* name;
  absl::Status (*run)(Communicator& communicator, const CheckOptions& options);
};
inline void PrintTo(const CommunicatorCheck& check, std::ostream* out) { *out << check.name; }

const std::vector<CommunicatorCheck>& CommunicatorChecks();

// Returns a digest of the bits of AllReduceSum's results for fixed inputs, to compare transports.
absl::StatusOr<uint64_t> AllReduceDigest(Communicator& communicator);

}  // namespace burst
