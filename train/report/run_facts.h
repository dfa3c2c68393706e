// Keeps what a run's folder says in addition to metrics.jsonl and the options: facts.json, which a
// report reads.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace burst {

inline constexpr char kRunFacts[] = "facts.json";

struct RunFacts {
  double flops_per_token = 0;  // of a forward and backward pass: Transformer::FlopsPerToken::full
  double peak_flops = 0;       // FLOP/s of all ranks together; 0: unknown
  std::string planned;         // a step's planned cost, for people; empty: unknown
  int64_t peak_bytes = 0;      // rank 0's largest tensor memory; 0: the run has not ended
  double seconds = 0;          // of the last start of the run, until its end
  std::string sample;          // a text by the model at the end
};

// Writes FOLDER/facts.json.
absl::Status WriteRunFacts(const std::string& folder, const RunFacts& facts);

// Returns the facts; nothing is known of a run of an earlier version, or if the file is damaged.
RunFacts ReadRunFacts(const std::string& folder);

}  // namespace burst
