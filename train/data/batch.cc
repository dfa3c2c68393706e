#include "train/data/batch.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Streams of random bits under the run's seed: the low word is the epoch.
constexpr uint64_t kOrderStream = uint64_t{0x0DA7A} << 32;
constexpr uint64_t kPhaseStream = uint64_t{0x0DA7B} << 32;
constexpr uint64_t kMixtureStream = uint64_t{0x0DA7C} << 32;  // the low word is the block

}  // namespace

absl::StatusOr<SequenceSampler> SequenceSampler::Create(const TokenSpan& span,
                                                        const Options& options) {
  BURST_CHECK_GE(options.seqlen, 1);
  if (span.size() < options.seqlen + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "holds ", span.size(), " tokens, fewer than --seqlen + 1 = ", options.seqlen + 1));
  }
  SequenceSampler sampler(span, options);
  BURST_RETURN_IF_ERROR(sampler.AddParts());
  return sampler;
}

// Rounds the parts' shares of kMixed sequences so that their sums are as near as possible.
absl::Status SequenceSampler::AddParts() {
  if (span_.mixture.empty()) return absl::OkStatus();
  double all = 0, before = 0;
  for (const TokenSpan::Part& part : span_.mixture) all += part.weight;
  per_epoch_ = 0;
  for (const TokenSpan::Part& part : span_.mixture) {
    BURST_ASSIGN_OR_RETURN(SequenceSampler sampler,
                           Create({span_.corpus, part.begin, part.end}, options_));
    per_epoch_ += sampler.per_epoch();
    parts_.push_back(std::move(sampler));
    first_.push_back(std::llround(before / all * kMixed));
    before += part.weight;
    if (std::llround(before / all * kMixed) > first_.back()) continue;
    return absl::InvalidArgumentError(absl::StrCat("has a part of weight ", part.weight,
                                                   ", which must be at least one in ", kMixed,
                                                   " of all weights, ", all));
  }
  first_.push_back(kMixed);
  return absl::OkStatus();
}

SequenceSampler::SequenceSampler(const TokenSpan& span, const Options& options)
    : span_(span), options_(options) {
  // Taking one sequence fewer than fit, where there are several, leaves room for the phase.
  per_epoch_ = std::max<int64_t>(1, max_evaluation() - 1);
  phases_ = span.size() - per_epoch_ * options.seqlen;
}

int64_t SequenceSampler::TrainingStart(int64_t s) const {
  if (!parts_.empty()) {
    const int64_t block = s / kMixed;
    const RandomPermutation order(kMixed, options_.seed,
                                  kMixtureStream | static_cast<uint32_t>(block));
    const int64_t place = order(s % kMixed);
    const auto next = std::upper_bound(first_.begin(), first_.end(), place);
    const size_t part = next - first_.begin() - 1;
    return parts_[part].TrainingStart(block * (*next - first_[part]) + place - first_[part]);
  }
  const uint64_t epoch = static_cast<uint64_t>(s / per_epoch_);
  const int64_t index =
      RandomPermutation(per_epoch_, options_.seed, kOrderStream | epoch)(s % per_epoch_);
  const uint64_t bits = Philox(options_.seed, kPhaseStream | epoch, 0)[0];
  const int64_t phase = static_cast<int64_t>(bits) * phases_ >> 32;
  return span_.begin + phase + index * options_.seqlen;
}

absl::StatusOr<GlobalBatch> SequenceSampler::Training(int64_t first, int64_t count) const {
  GlobalBatch batch;
  for (int64_t i = 0; i < count; ++i) {
    BURST_RETURN_IF_ERROR(AddSequence(TrainingStart(first + i), &batch));
  }
  return batch;
}

absl::StatusOr<int64_t> SequenceSampler::TrainingTargets(int64_t first, int64_t count) const {
  int64_t targets = count * options_.seqlen;
  const bool drops = options_.packed || span_.corpus->has_marks();
  for (int64_t i = 0; i < count && drops; ++i) {
    BURST_ASSIGN_OR_RETURN(const Boundaries boundaries, BoundariesOf(TrainingStart(first + i)));
    targets -= static_cast<int64_t>(boundaries.dropped.size());
  }
  return targets;
}

absl::StatusOr<SequenceSampler::Boundaries> SequenceSampler::BoundariesOf(int64_t start) const {
  Boundaries boundaries;
  const int64_t end = start + options_.seqlen;
  const bool has_marks = span_.corpus->has_marks();
  if (has_marks) {
    BURST_RETURN_IF_ERROR(span_.corpus->NotCounted(start + 1, end + 1, &boundaries.dropped));
  }
  if (!options_.packed) return boundaries;
  std::vector<int64_t> starts;
  BURST_RETURN_IF_ERROR(span_.corpus->DocumentStarts(start, end + 1, &starts));
  for (size_t i = 0; i < starts.size(); ++i) {
    const int64_t at = starts[i];
    if (at == start) continue;
    if (at < end) boundaries.starts.push_back(at);
    if (has_marks) continue;
    // An end after a first token would teach that a document may be empty.
    const bool counts = span_.corpus->StartEndsADocument(at) && (i == 0 || starts[i - 1] != at - 1);
    if (!counts) boundaries.dropped.push_back(at);
  }
  return boundaries;
}

absl::StatusOr<GlobalBatch> SequenceSampler::Evaluation(int64_t first, int64_t count,
                                                        int64_t total) const {
  BURST_CHECK_LE(total, max_evaluation());
  BURST_CHECK_LE(first + count, total);
  GlobalBatch batch;
  for (int64_t i = first; i < first + count; ++i) {
    BURST_RETURN_IF_ERROR(
        AddSequence(span_.begin + i * max_evaluation() / total * options_.seqlen, &batch));
  }
  return batch;
}

absl::Status SequenceSampler::AddSequence(int64_t start, GlobalBatch* batch) const {
  const int64_t seqlen = options_.seqlen;
  batch->seqlen = seqlen;
  ++batch->batch;
  std::vector<int32_t> tokens(seqlen + 1);
  BURST_RETURN_IF_ERROR(span_.corpus->Read(start, seqlen + 1, tokens.data()));
  std::vector<int32_t> targets(tokens.begin() + 1, tokens.end());

  BURST_ASSIGN_OR_RETURN(const Boundaries boundaries, BoundariesOf(start));
  std::vector<int32_t> documents = {0};
  for (const int64_t at : boundaries.starts) documents.push_back(static_cast<int32_t>(at - start));
  for (const int64_t at : boundaries.dropped) targets[at - start - 1] = -1;
  size_t document = 0;
  for (int32_t t = 0; t < seqlen; ++t) {
    if (document + 1 < documents.size() && documents[document + 1] == t) ++document;
    batch->positions.push_back(t - documents[document]);
  }
  batch->tokens.insert(batch->tokens.end(), tokens.begin(), tokens.end() - 1);
  batch->targets.insert(batch->targets.end(), targets.begin(), targets.end());
  batch->num_targets += seqlen - static_cast<int64_t>(boundaries.dropped.size());
  if (options_.packed) batch->documents.push_back(std::move(documents));
  return absl::OkStatus();
}

absl::Status CheckTokens(const GlobalBatch& batch, int64_t vocab) {
  // Targets are the next tokens, or -1. Read as unsigned numbers, negative tokens are too large,
  // too.
  uint32_t largest = 0;
  for (int32_t token : batch.tokens) largest = std::max(largest, static_cast<uint32_t>(token));
  for (int32_t target : batch.targets) {
    largest = std::max(largest, static_cast<uint32_t>(std::max(target, 0)));
  }
  if (largest < vocab) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--data: the token ", static_cast<int32_t>(largest),
                   " is outside of the vocabulary of ", vocab, "; has the file changed?"));
}

absl::StatusOr<std::shared_ptr<const GlobalBatch>> PlannedSequences::Training(
    const SequenceSampler& sampler, int64_t first, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<const GlobalBatch>& batch = by_count_[count];
  if (batch == nullptr) {
    BURST_ASSIGN_OR_RETURN(GlobalBatch read, sampler.Training(first, count));
    batch = std::make_shared<const GlobalBatch>(std::move(read));
  }
  return batch;
}

SequenceBatch SliceForRank(const GlobalBatch& batch, const LayerSchedules& schedules,
                           DeviceType device) {
  const TokenShard& shard = schedules.shard();
  BURST_CHECK_EQ(shard.seqlen(), batch.seqlen);
  const std::vector<int32_t>& columns = shard.local_positions();
  const Shape shape = {batch.batch, static_cast<int64_t>(columns.size())};
  // One tensor holds all three, so that one copy takes them to a GPU.
  const Tensor host = Tensor::Empty({3, shape[0], shape[1]}, DType::kInt32);
  int32_t* out = host.data<int32_t>();
  for (const std::vector<int32_t>* all : {&batch.tokens, &batch.positions, &batch.targets}) {
    for (int64_t row = 0; row < batch.batch; ++row) {
      for (int32_t column : columns) *out++ = (*all)[row * batch.seqlen + column];
    }
  }
  const Tensor all = host.To(device);
  const auto part = [&](int64_t i) { return all.Slice(0, i, 1).View(shape); };
  return {part(0), part(1), part(2), schedules};
}

}  // namespace burst
