// The options of //train that do not go together. A new conflict needs a row in a group of options
// (option_group.h).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/cli/conflicts.h"
#include "burst/cli/options.h"
#include "train/config/config.h"

namespace burst {

using TrainConflict = Conflict<ResolvedConfig>;

// Returns the conflicts of all groups.
absl::Span<const TrainConflict> TrainConflicts();

// Returns InvalidArgument that names both options of the first conflict. The mesh, the device and
// the model must be known.
absl::Status CheckConflicts(const ResolvedConfig& config);

// Returns whether `config` has no conflict, so that the planner may propose it.
bool Allowed(const ResolvedConfig& config);

// Adds "Not with ..." to the help of the options of `table`.
void AddConflictsToHelp(OptionTable* table);

// Returns the table of docs/training/options_together.md.
std::string ConflictPage();

}  // namespace burst
