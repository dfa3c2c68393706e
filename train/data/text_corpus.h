// Texts as corpora: their tokens lie in a file of the data cache.
#pragma once

#include <memory>
#include <string>
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

// With the tokenizer `vocabulary`, or without one that of `kind`: then the characters of all
// sources make the vocabulary. `field`: of lines of JSON, the key of the text.
absl::StatusOr<TextCorpora> OpenTexts(const std::vector<const Sources*>& sources,
                                      Tokenizer::Kind kind, const Tokenizer* vocabulary,
                                      const std::string& field, const DataCache& cache);

}  // namespace burst
