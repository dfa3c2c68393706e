// Batches: windows of a token stream, and the part of them that one rank sees.
//
// Nothing here has state. Sequence number s of a run is a function of (seed, s): an epoch visits
// the windows of the stream in a random order, the windows do not overlap, and they start at a
// random phase that differs from epoch to epoch. So every rank knows every batch, and a run that
// resumes at a step needs nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/sequence/token_shard.h"
#include "model/transformer.h"
#include "train/data/corpus.h"

namespace burst {

// Whole sequences, before they are split over ranks. All [batch, seqlen].
struct GlobalBatch {
  int64_t batch = 0;
  int64_t seqlen = 0;
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;  // within the token's document
  std::vector<int32_t> targets;    // the next token of the stream; -1 where it begins a document
  DocumentStarts documents;        // packed only: per row
  int64_t num_targets = 0;         // those that are not -1
};

class Windows {
 public:
  struct Options {
    int64_t seqlen = 0;
    uint64_t seed = 0;
    // Documents end attention, positions start again at each, and no target crosses into the next.
    bool packed = false;
  };

  // InvalidArgument when the span holds no window: seqlen tokens and the target of the last.
  static absl::StatusOr<Windows> Create(const TokenSpan& span, const Options& options);

  // Windows an epoch visits.
  int64_t per_epoch() const { return per_epoch_; }

  // Sequences [first, first + count) of the run.
  GlobalBatch Training(int64_t first, int64_t count) const;
  // The targets they have, without reading them.
  int64_t TrainingTargets(int64_t first, int64_t count) const;

  // For evaluation: windows [first, first + count) of `total` spread evenly over the span; total is
  // at most max_evaluation().
  GlobalBatch Evaluation(int64_t first, int64_t count, int64_t total) const;
  int64_t max_evaluation() const { return (span_.size() - 1) / options_.seqlen; }

  // Where sequence s of the run starts in the corpus.
  int64_t TrainingStart(int64_t s) const;

 private:
  Windows(const TokenSpan& span, const Options& options);
  void AddWindow(int64_t start, GlobalBatch* batch) const;
  // Starts of documents after the first token of the window at `start`; one at its end, too, which
  // is that of the last target.
  std::vector<int64_t> DocumentStartsIn(int64_t start) const;

  TokenSpan span_;
  Options options_;
  int64_t per_epoch_;
  int64_t phases_;  // an epoch's windows start at a phase in [0, phases_)
};

// The columns of `batch` at this rank's local_positions(), in that order, on a device. Targets were
// taken before the split, so the label of a shard's last token is right wherever the next token
// lives.
SequenceBatch SliceForRank(const GlobalBatch& batch, std::shared_ptr<const RingSchedule> schedule,
                           DeviceType device = DeviceType::kCpu);

}  // namespace burst
