// Texts as corpora: their tokens lie in a file of the data cache.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/data/data_cache.h"
#include "train/data/sources.h"

namespace burst {

struct TextCorpora {
  Tokenizer tokenizer;
  std::vector<std::shared_ptr<const Corpus>> corpora;  // one for each source
};

// The tokenizer `vocabulary`, or without one that of `kind`: then the characters of all sources
// make the vocabulary.
absl::StatusOr<TextCorpora> OpenTexts(const std::vector<const Sources*>& sources,
                                      Tokenizer::Kind kind, const Tokenizer* vocabulary,
                                      const DataCache& cache);

}  // namespace burst
