#include "train/evaluate/perplexity.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/status.h"
#include "burst/cli/line_plot.h"
#include "burst/cli/options.h"
#include "burst/cli/text.h"

namespace burst {
namespace {

constexpr int64_t kFirstRange = 128;  // tokens

// The sum of losses by the number of tokens before, less one.
struct LossByPosition {
  std::vector<double> sum;
  std::vector<int64_t> count;

  explicit LossByPosition(int64_t seqlen) : sum(seqlen), count(seqlen) {}
  void Add(int64_t position, double loss) { sum[position] += loss, ++count[position]; }
  // Returns the mean loss over tokens with `first` to `last` tokens before.
  double Mean(int64_t first, int64_t last) const {
    double total = 0;
    int64_t targets = 0;
    for (int64_t i = first - 1; i < last; ++i) total += sum[i], targets += count[i];
    return total / static_cast<double>(targets);
  }
};

// Returns the first tokens of the documents that are long enough.
absl::StatusOr<std::vector<GlobalBatch>> LongDocuments(const TokenSpan& data,
                                                       const PerplexityOptions& options) {
  std::vector<int64_t> starts;
  BURST_RETURN_IF_ERROR(data.corpus->DocumentStarts(data.begin, data.end, &starts));
  if (starts.empty() || starts[0] != data.begin) starts.insert(starts.begin(), data.begin);
  starts.push_back(data.end);
  std::vector<GlobalBatch> batches;
  int64_t longest = 0;
  for (size_t i = 0; i + 1 < starts.size(); ++i) {
    const int64_t tokens = starts[i + 1] - starts[i];
    longest = std::max(longest, tokens);
    const bool more =
        options.sequences == 0 || static_cast<int64_t>(batches.size()) < options.sequences;
    if (tokens <= options.seqlen || !more) continue;
    std::vector<int32_t> text(options.seqlen + 1);
    BURST_RETURN_IF_ERROR(data.corpus->Read(starts[i], options.seqlen + 1, text.data()));
    batches.push_back(BatchOf({text}));
    if (!data.corpus->has_marks()) continue;
    std::vector<int64_t> dropped;
    BURST_RETURN_IF_ERROR(
        data.corpus->NotCounted(starts[i] + 1, starts[i] + options.seqlen + 1, &dropped));
    for (const int64_t at : dropped) batches.back().targets[at - starts[i] - 1] = -1;
    batches.back().num_targets -= static_cast<int64_t>(dropped.size());
  }
  if (!batches.empty()) return batches;
  return InvalidOption("seqlen", "must be less than the ", longest,
                       " tokens of the longest document; got ", options.seqlen);
}

// Returns the sequences, each as a batch.
absl::StatusOr<std::vector<GlobalBatch>> SequencesOf(const TokenSpan& data,
                                                     const PerplexityOptions& options) {
  if (options.documents) return LongDocuments(data, options);
  const absl::StatusOr<SequenceSampler> sampler =
      SequenceSampler::Create(data, {options.seqlen, /*seed=*/0, /*packed=*/false});
  if (!sampler.ok()) return InvalidOption("data", sampler.status().message());
  const int64_t all = sampler->max_evaluation();
  const int64_t count = options.sequences == 0 ? all : std::min(all, options.sequences);
  std::vector<GlobalBatch> batches(count);
  for (int64_t i = 0; i < count; ++i) {
    BURST_ASSIGN_OR_RETURN(batches[i], sampler->Evaluation(i, 1, count));
  }
  return batches;
}

// Adds the losses of the sequence's tokens, each predicted from `last` / 2 to `last` tokens before:
// from pieces of `last` tokens, which overlap by a half.
absl::Status AddLosses(Scorer* scorer, const GlobalBatch& sequence, int64_t last,
                       LossByPosition* losses) {
  const int64_t half = last / 2;
  const int64_t pieces = sequence.seqlen / half - 1;
  const int64_t most = std::max<int64_t>(1, kScoredTokens / last);
  for (int64_t first = 0; first < pieces; first += most) {
    const int64_t count = std::min(most, pieces - first);
    GlobalBatch batch;
    batch.batch = count;
    batch.seqlen = last;
    for (int64_t piece = first; piece < first + count; ++piece) {
      for (int64_t i = 0; i < last; ++i) {
        const bool counts = piece == 0 || i >= half;
        batch.tokens.push_back(sequence.tokens[piece * half + i]);
        batch.positions.push_back(static_cast<int32_t>(i));
        batch.targets.push_back(counts ? sequence.targets[piece * half + i] : -1);
      }
    }
    BURST_ASSIGN_OR_RETURN(const auto scores, scorer->Score(batch));
    for (int64_t i = 0; i < count * last; ++i) {
      if (batch.targets[i] < 0) continue;
      losses->Add((first + i / last) * half + i % last, scores[i].loss);
    }
  }
  return absl::OkStatus();
}

Curve CurveOf(const std::vector<std::pair<int64_t, int64_t>>& ranges,
              const std::vector<double>& values) {
  Curve curve;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (std::isfinite(values[i]))
      curve.push_back({static_cast<double>(ranges[i].second), values[i]});
  }
  return curve;
}

}  // namespace

absl::Status CheckPerplexity(const PerplexityOptions& options) {
  if (options.last == 0) return absl::OkStatus();
  if (options.last % 2 != 0 || options.last > options.seqlen) {
    return InvalidOption("last", "must be 0, or even and at most --seqlen=", options.seqlen,
                         "; got ", options.last);
  }
  if (options.seqlen % (options.last / 2) != 0) {
    return InvalidOption("last", "its half must divide --seqlen=", options.seqlen, "; got ",
                         options.last, "; give a power of two for both");
  }
  return absl::OkStatus();
}

absl::StatusOr<Evaluation> EvaluatePerplexity(Scorer* scorer, const TokenSpan& data,
                                              const PerplexityOptions& options) {
  BURST_ASSIGN_OR_RETURN(const std::vector<GlobalBatch> sequences, SequencesOf(data, options));
  if (std::none_of(sequences.begin(), sequences.end(),
                   [](const GlobalBatch& sequence) { return sequence.num_targets > 0; })) {
    return InvalidOption("data", "must have a token that counts in the loss; got ",
                         sequences.size(),
                         " sequences without one; give a longer --seqlen or more --sequences");
  }
  LossByPosition whole(options.seqlen), last(options.seqlen);
  for (const GlobalBatch& sequence : sequences) {
    BURST_ASSIGN_OR_RETURN(const auto scores, scorer->Score(sequence));
    for (int64_t i = 0; i < options.seqlen; ++i) {
      if (sequence.targets[i] >= 0) whole.Add(i, scores[i].loss);
    }
    if (options.last > 0) {
      BURST_RETURN_IF_ERROR(AddLosses(scorer, sequence, options.last, &last));
    }
  }
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int64_t begin = 0; begin < options.seqlen;) {
    const int64_t end = std::min(options.seqlen, std::max(kFirstRange, 2 * begin));
    ranges.emplace_back(begin + 1, end);
    begin = end;
  }
  std::vector<double> of_whole, of_last;
  const double loss = whole.Mean(1, options.seqlen);
  Evaluation evaluation;
  evaluation.summary = absl::StrFormat("%s sequences of %s tokens: loss %.4f, perplexity %.4f\n",
                                       Thousands(static_cast<int64_t>(sequences.size())),
                                       Thousands(options.seqlen), loss, std::exp(loss));
  for (const auto& [first, end] : ranges) {
    of_whole.push_back(std::exp(whole.Mean(first, end)));
    absl::StrAppendFormat(&evaluation.summary, "  %9s to %9s tokens before  %10.4f",
                          Thousands(first), Thousands(end), of_whole.back());
    if (options.last > 0) {
      of_last.push_back(std::exp(last.Mean(first, end)));
      absl::StrAppendFormat(&evaluation.summary, "  from the last %s alone %10.4f",
                            Thousands(options.last), of_last.back());
    }
    evaluation.summary += "\n";
  }
  nlohmann::ordered_json json = {
      {"sequences", sequences.size()}, {"seqlen", options.seqlen}, {"loss", loss},
      {"perplexity", std::exp(loss)},  {"ranges", ranges},         {"by_range", of_whole}};
  LinePlot plot;
  plot.title = "Perplexity by position";
  plot.x_label = "tokens before, at most";
  plot.y_label = "perplexity";
  plot.log_x = true;
  plot.series.push_back({0, "all tokens before", CurveOf(ranges, of_whole), /*dots=*/true});
  if (options.last > 0) {
    json["last"] = options.last;
    json["by_range_of_last"] = of_last;
    plot.series.push_back({1, absl::StrCat("the last ", options.last), CurveOf(ranges, of_last),
                           /*dots=*/true});
  }
  evaluation.json = json.dump(1) + "\n";
  evaluation.svg = LinePlotSvg(plot);
  return evaluation;
}

}  // namespace burst
