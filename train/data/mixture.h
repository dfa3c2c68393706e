// Mixtures of data: --data=web:0.7,books:0.3.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"

namespace burst {

// A part of --data, and its share of the sequences: positive, not necessarily of a sum of 1.
struct MixturePart {
  std::string path;
  double weight = 1;
};

// Splits PATH:WEIGHT,PATH:WEIGHT. Other texts, and paths that are there, are one part. Errors name
// the option.
absl::StatusOr<std::vector<MixturePart>> ParseMixture(const std::string& data);

// Returns the text of parts, which ParseMixture reads.
std::string MixtureText(const std::vector<MixturePart>& parts);

// Joins spans into one corpus, in order. `salt` is a part of its digest.
std::shared_ptr<const Corpus> JoinCorpora(std::vector<TokenSpan> spans, uint64_t salt);

}  // namespace burst
