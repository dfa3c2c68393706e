// Whole models over ranks: prefill (time to first token), generation and training.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/scaling/options.h"
#include "benchmarks/scaling/report.h"

namespace burst {

// InvalidArgument, naming the option, for models and cases that //train would refuse; OK for the
// experiments without models.
absl::Status CheckModelExperiment(const ScalingOptions& options);

// Time to first token: from the tokens of a prompt on every rank to the logits of the next token on
// one of them, and the peak memory of a rank. A model without a vocabulary of its own gets one of
// 256.
std::vector<ReportColumn> PrefillColumns();
absl::StatusOr<std::vector<ReportRow>> RunPrefillExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

// A prompt of `seqlen` tokens is read over the ranks, then tokens follow one at a time, without a
// choice between them. Columns: milliseconds to the first token, and the median of the others. For
// a rank, the memory of its keys and values, and the rate at which it reads these and the weights,
// as every token must.
std::vector<ReportColumn> GenerationColumns();
absl::StatusOr<std::vector<ReportRow>> RunGenerationExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

// Speed: milliseconds of the median step (all but the first), tokens a second and the peak memory
// of a rank. Quality: the loss of the last step, and the validation loss and perplexity after it.
// Agreement: the largest relative difference of any step's loss from the first row with its batch
// and seqlen.
std::vector<ReportColumn> TrainingColumns();
absl::StatusOr<std::vector<ReportRow>> RunTrainingExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

}  // namespace burst
