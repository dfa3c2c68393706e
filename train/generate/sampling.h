// Choosing the next token from logits.
#pragma once

#include <cstdint>

#include "absl/types/span.h"

namespace burst {

struct SamplingOptions {
  double temperature = 0.8;  // 0: always the likeliest
  int64_t top_k = 0;         // only among the k likeliest; 0: all
  uint64_t seed = 1;
};

// Token number `index` of a text: a function of (logits, options, index).
int32_t SampleToken(absl::Span<const float> logits, const SamplingOptions& options, int64_t index);

}  // namespace burst
