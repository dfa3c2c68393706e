// Makes a corpus of shards, whose tokens stay in their files.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/data/data_cache.h"
#include "train/data/sources.h"

namespace burst {

struct ShardData {
  std::shared_ptr<const Corpus> corpus;
  int64_t vocab = 0;         // the size of the tokenizer that made them
  int32_t end_of_text = -1;  // -1: none
};

// Opens shards. In order they are one stream, and a document starts at every end-of-text token.
absl::StatusOr<ShardData> OpenShards(const Sources& sources, const DataCache& cache);

}  // namespace burst
