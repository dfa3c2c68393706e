// Scores tokens by a model: the loss of each, given the tokens before it in its sequence.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "model/transformer.h"
#include "train/data/batch.h"
#include "train/generate/loaded_model.h"

namespace burst {

// The sequences that run at once have at most these tokens, unless one is longer.
inline constexpr int64_t kScoredTokens = 16384;

// Returns a batch of sequences of equal length, in which each token has the next one as its target;
// the last token is a target alone. Targets before token `from` of a sequence do not count.
GlobalBatch BatchOf(const std::vector<std::vector<int32_t>>& sequences, int64_t from = 1);

// What an evaluation gives.
struct Evaluation {
  std::string summary;    // lines for people
  std::string json, svg;  // files; svg may be empty
};

class Scorer {
 public:
  // Loads the model on this rank. `comm`: the ranks that share its sequences, which may be this one
  // alone. Collective, as Score is. All arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<Scorer>> Create(const ModelOptions& options,
                                                        const ModelSource& source,
                                                        const Place& place, Communicator* comm);

  // Returns the score of each target of the batch, [batch, seqlen]; {0, false} for a target of -1.
  absl::StatusOr<std::vector<Transformer::TargetScore>> Score(const GlobalBatch& batch);

 private:
  Scorer(const ModelSource& source, Communicator* comm) : source_(source), comm_(comm) {}

  const ModelSource& source_;
  Communicator* const comm_;
  std::unique_ptr<Transformer> model_;
  std::unique_ptr<SequenceParallelAttention> attention_;
  LayerSchedules schedules_;  // of the last length
};

}  // namespace burst
