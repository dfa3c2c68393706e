// Makes the text that a finished run shows.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "train/report/run_folder.h"
#include "train/trainer/rank_state.h"

namespace burst {

// Returns a text by the model that the run has just saved in `folder`. Only rank 0 calls it, and
// the model needs a tokenizer. A signal ends the text early.
absl::StatusOr<std::string> SampleText(const RankState& rank, const RunFolder& folder);

}  // namespace burst
