// Shards as a corpus: their tokens are read where they are.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/data/data_cache.h"
#include "train/data/sources.h"

namespace burst {

// The shards in order are one stream; a document starts at every end-of-text token.
absl::StatusOr<std::shared_ptr<const Corpus>> OpenShards(const Sources& sources,
                                                         const DataCache& cache);

}  // namespace burst
