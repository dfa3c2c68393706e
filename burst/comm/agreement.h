// What all ranks of a job must have alike, compared before they work together: a rank with another
// option, file or version would make wrong numbers without a word.
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
  int rank = 0;  // whose value is not that of rank 0; the lowest such rank
  std::string value, value_of_rank0;
};

// The first item that a rank has otherwise than rank 0; none if all agree. Collective: every rank
// gets the same answer. Ranks give the same names, in the same order.
absl::StatusOr<std::optional<Disagreement>> FindDisagreement(Communicator* comm,
                                                             const std::vector<AgreedItem>& items);

// Returns FailedPrecondition if the ranks disagree: "--lr: 0.2 on rank 1, 0.002 on rank 0; ...".
absl::Status CheckAgreement(Communicator* comm, const std::vector<AgreedItem>& items);

}  // namespace burst
