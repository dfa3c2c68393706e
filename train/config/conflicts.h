// The options of //train that do not go together, in one table. To add a conflict: a row.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/cli/conflicts.h"
#include "burst/cli/options.h"
#include "train/config/config.h"

namespace burst {

using TrainConflict = Conflict<ResolvedConfig>;

// The table.
absl::Span<const TrainConflict> TrainConflicts();

// InvalidArgument that names both options of the first conflict. After the mesh, the device and the
// model are known.
absl::Status CheckConflicts(const ResolvedConfig& config);

// Whether the planner may propose `config`: it has no conflict.
bool Allowed(const ResolvedConfig& config);

// Adds "Not with ..." to the help of the options of `table`.
void AddConflictsToHelp(OptionTable* table);

// The table of docs/training/options_together.md.
std::string ConflictPage();

}  // namespace burst
