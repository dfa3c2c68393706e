// Measures whole models over ranks: prefill (time to first token), generation and training.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/scaling/options.h"
#include "benchmarks/scaling/report.h"

namespace burst {

// Returns InvalidArgument that names the option for models and cases that //train would refuse.
// Returns OK for experiments without models.
absl::Status CheckModelExperiment(const ScalingOptions& options);

// The columns of time to first token and a rank's peak memory. The time goes from a prompt's tokens
// on every rank to the logits of the next token on one rank. A model without a vocabulary gets one
// of 256 tokens.
std::vector<ReportColumn> PrefillColumns();
absl::StatusOr<std::vector<ReportRow>> RunPrefillExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

// The columns of generation. The ranks read a prompt of `seqlen` tokens, then tokens follow one at
// a time, without sampling. Columns: milliseconds to the first token, and the median of the others.
// For a rank also the memory of its keys and values, and the rate at which it reads them and the
// weights.
std::vector<ReportColumn> GenerationColumns();
absl::StatusOr<std::vector<ReportRow>> RunGenerationExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

// The columns of training. Speed: milliseconds of the median step (all but the first), tokens a
// second and a rank's peak memory. Quality: the last step's loss, and the validation loss and
// perplexity after it. Agreement: the largest relative difference of a step's loss from the first
// row with the same batch and seqlen.
std::vector<ReportColumn> TrainingColumns();
absl::StatusOr<std::vector<ReportRow>> RunTrainingExperiment(
    const ScalingOptions& options, const std::function<void(const ReportRow&)>& on_row);

}  // namespace burst
