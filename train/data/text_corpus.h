// Makes corpora of texts, whose tokens are in a file of the data cache.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/data/data_cache.h"
#include "train/data/json_line.h"
#include "train/data/sources.h"

namespace burst {

struct TextCorpora {
  Tokenizer tokenizer;
  std::vector<std::shared_ptr<const Corpus>> corpora;  // one for each source
};

// Opens texts with the tokenizer `vocabulary`. Without it, `kind` says whether tokens are bytes, or
// characters of all sources. `format` says how lines of JSON are read.
absl::StatusOr<TextCorpora> OpenTexts(const std::vector<const Sources*>& sources,
                                      Tokenizer::Kind kind, const Tokenizer* vocabulary,
                                      const LineFormat& format, const DataCache& cache);

}  // namespace burst
