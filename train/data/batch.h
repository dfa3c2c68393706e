// Makes batches: sequences of a token stream, and the part of them that one rank sees.
//
// Nothing here has state. Sequence number s of a run is a function of (seed, s). An epoch visits
// the sequences of the stream in a random order, without overlap, from a random phase that differs
// from epoch to epoch. So every rank knows every batch, and a run that resumes at a step needs
// nothing else.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/base/check.h"
#include "burst/base/philox.h"
#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"
#include "model/transformer.h"
#include "train/data/corpus.h"

namespace burst {

// Whole sequences, before ranks divide them. All tensors are [batch, seqlen].
struct GlobalBatch {
  int64_t batch = 0;
  int64_t seqlen = 0;
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;  // within the token's document
  std::vector<int32_t> targets;    // the next token of the stream; -1: no target
  DocumentStarts documents;        // by row; only with `packed`
  int64_t num_targets = 0;         // the targets that are not -1
};

// Returns InvalidArgument for a token or target that is not below `vocab`, which would be used as a
// row of a table. The files were checked when they were read, but may have changed.
absl::Status CheckTokens(const GlobalBatch& batch, int64_t vocab);

// A random permutation of [0, n) that is computed, not stored. Element i takes constant time from
// (n, key, stream, i), so a resumed run needs no saved state.
//
// The permutation is a Feistel network over the smallest even number of bits that holds n, with
// Philox as its round function. A result outside of [0, n) is sent through again until it falls
// inside (cycle walking), four times on average at worst.
class RandomPermutation {
 public:
  RandomPermutation(int64_t n, uint64_t key, uint64_t stream) : n_(n), key_(key), stream_(stream) {
    BURST_CHECK_GE(n, 1);
    while (half_bits_ < 31 && (int64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
  }

  int64_t operator()(int64_t i) const {
    uint64_t x = static_cast<uint64_t>(i);
    do x = Encrypt(x);
    while (x >= static_cast<uint64_t>(n_));
    return static_cast<int64_t>(x);
  }

 private:
  static constexpr uint64_t kRounds = 6;

  uint64_t Encrypt(uint64_t x) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t bits = Philox(key_, stream_, round << 32 | right)[0];
      const uint64_t next = left ^ (bits & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  int64_t n_;
  uint64_t key_, stream_;
  int half_bits_ = 1;
};

class SequenceSampler {
 public:
  struct Options {
    int64_t seqlen = 0;
    uint64_t seed = 0;
    // Whether documents are packed: attention ends and positions start again at each document. A
    // target does not cross into the next document, except the separator that ends a document.
    bool packed = false;
  };

  // Creates a sampler. InvalidArgument means that the span, or a part of its mixture, is too short
  // for a sequence: seqlen tokens and the last target. Or a weight is too small.
  static absl::StatusOr<SequenceSampler> Create(const TokenSpan& span, const Options& options);

  // Returns the number of sequences in an epoch; in a mixture, the sum over the parts.
  int64_t per_epoch() const { return per_epoch_; }

  // Returns the sequences [first, first + count) of the run, or an error of Corpus::Read.
  absl::StatusOr<GlobalBatch> Training(int64_t first, int64_t count) const;
  // Returns the number of their targets, without reading them.
  absl::StatusOr<int64_t> TrainingTargets(int64_t first, int64_t count) const;

  // Returns sequences for evaluation: [first, first + count) of `total` that are spread evenly over
  // the span. total is at most max_evaluation().
  absl::StatusOr<GlobalBatch> Evaluation(int64_t first, int64_t count, int64_t total) const;
  int64_t max_evaluation() const { return (span_.size() - 1) / options_.seqlen; }

  // Returns the start of the run's sequence s in the corpus.
  int64_t TrainingStart(int64_t s) const;

 private:
  SequenceSampler(const TokenSpan& span, const Options& options);
  absl::Status AddSequence(int64_t start, GlobalBatch* batch) const;
  // The starts of a sequence's documents, and the dropped targets; empty if not packed.
  struct Boundaries {
    std::vector<int64_t> starts;   // places in the corpus, after the sequence's first token
    std::vector<int64_t> dropped;  // places of dropped targets, up to the sequence's end
  };
  absl::StatusOr<Boundaries> BoundariesOf(int64_t start) const;

  // Each part has a fixed number of kMixed sequences in a row, in random order.
  static constexpr int64_t kMixed = 1000;
  absl::Status AddParts();

  TokenSpan span_;
  Options options_;
  std::vector<SequenceSampler> parts_;  // of a mixture
  std::vector<int64_t> first_;          // by part: which of kMixed sequences is its first; kMixed
  int64_t per_epoch_;
  int64_t phases_;  // an epoch's sequences start at a phase in [0, phases_)
};

// The sequences of a plan, whose ranks share them: a plan treats all sequences alike, except for
// their documents. All ranks' threads may call it.
class PlannedSequences {
 public:
  // As SequenceSampler::Training, whatever `first` is.
  absl::StatusOr<std::shared_ptr<const GlobalBatch>> Training(const SequenceSampler& sampler,
                                                              int64_t first, int64_t count);

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<const GlobalBatch>> by_count_;
};

// A rank's part of a micro-batch, and the place of its dropout.
struct MicroBatch {
  SequenceBatch batch;
  DropoutKey dropout;
};

// Returns the columns of `batch` at this rank's local_positions(), in that order, on a device.
// Targets were taken before the split, so the label of a shard's last token is right on whatever
// rank the next token is.
SequenceBatch SliceForRank(const GlobalBatch& batch, const LayerSchedules& schedules,
                           DeviceType device = DeviceType::kCpu);

}  // namespace burst
