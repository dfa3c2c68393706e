// The table of options of //train, from its groups. It has a row for each field of TrainConfig.
#include <vector>

#include "burst/base/status.h"
#include "train/config/conflicts.h"
#include "train/config/option_group.h"

namespace burst {
namespace {

// The groups in the order of --help. Their conflicts are looked for, and their numbers checked, in
// this order, too.
constexpr const OptionGroup* kGroups[] = {&kDataOptions,  &kModelOptions,  &kOptimizationOptions,
                                          &kRankOptions,  &kMemoryOptions, &kAttentionOptions,
                                          &kOutputOptions};

}  // namespace

// A resumed run may change how long, how fast and on which devices it trains, and what it prints.
// With another value of any other option it would be another run.
//
// The processes of a job must have equal values, except in rows with another scope.
OptionTable TrainOptions(TrainConfig* config) {
  OptionTable table;
  for (const OptionGroup* group : kGroups) group->add_rows(config, &table);
  AddConflictsToHelp(&table);
  return table;
}

absl::Span<const TrainConflict> TrainConflicts() {
  static const auto* const conflicts = [] {
    auto* all = new std::vector<TrainConflict>;
    for (const OptionGroup* group : kGroups) {
      all->insert(all->end(), group->conflicts.begin(), group->conflicts.end());
    }
    return all;
  }();
  return *conflicts;
}

absl::Status CheckConflicts(const ResolvedConfig& config) {
  if (Allowed(config)) return absl::OkStatus();
  TrainConfig given;
  const OptionTable table = TrainOptions(&given);
  given = config.given();  // set after the table has seen the defaults
  return CheckConflicts(TrainConflicts(), config, table);
}

bool Allowed(const ResolvedConfig& config) { return Allowed(TrainConflicts(), config); }

void AddConflictsToHelp(OptionTable* table) { AddConflictsToHelp(TrainConflicts(), table); }

std::string ConflictPage() { return ConflictPage(TrainConflicts()); }

absl::Status CheckNumbers(const ResolvedConfig& config) {
  for (const OptionGroup* group : kGroups) {
    if (group->check != nullptr) BURST_RETURN_IF_ERROR(group->check(config));
  }
  return absl::OkStatus();
}

}  // namespace burst
