// Compares what all ranks of a job must have in common, before they work together. A rank with
// another option, file or version would compute wrong numbers in silence.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"

namespace burst {

struct AgreedItem {
  std::string name;   // for people: "--lr"
  std::string value;  // compared, and shown where it differs
};

struct Disagreement {
  std::string name;
  int rank = 0;  // the lowest rank whose value differs from rank 0's
  std::string value, value_of_rank0;
};

// Returns the first item whose value on some rank differs from rank 0's, or nullopt if all agree.
// Collective: every rank gets the same answer. Ranks give the same names, in the same order.
absl::StatusOr<std::optional<Disagreement>> FindDisagreement(Communicator* comm,
                                                             const std::vector<AgreedItem>& items);

// Returns FailedPrecondition if the ranks disagree: "--lr: 0.2 on rank 1, 0.002 on rank 0; ...".
absl::Status CheckAgreement(Communicator* comm, const std::vector<AgreedItem>& items);

}  // namespace burst
