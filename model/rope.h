// The angles of rotary position embedding (Su et al., arXiv 2104.09864), and how models that read
// longer texts than they were first trained on change them.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

struct RopeScaling {
  enum class Kind {
    kNone,
    kLinear,    // positions divided by `factor` (Chen et al., arXiv 2306.15595)
    kLlama3,    // low frequencies divided by `factor`, high ones kept (Llama 3.1)
    kYarn,      // the same with a ramp over channels, and larger scores (Peng et al., arXiv
                // 2309.00071)
    kLongRope,  // a factor for each frequency, and larger scores (Ding et al., arXiv 2402.13753)
  };
  Kind kind = Kind::kNone;
  double factor = 1;          // how much longer texts are; at least 1
  int64_t first_context = 0;  // llama3, yarn, longrope: tokens of a text before they became longer

  // llama3: a channel of at most `low` turns in first_context tokens is divided by the factor. A
  // channel of at least `high` turns is kept. In between it is a mean of both.
  double low = 1;
  double high = 4;

  // yarn: likewise, with a mean that is linear in the number of the channel.
  double fast = 32;   // turns: kept
  double slow = 1;    // turns: divided
  bool whole = true;  // the ramp begins and ends at whole numbers of channels

  // longrope: what each frequency is divided by, in texts of up to first_context tokens and in
  // longer ones. [channels / 2] each.
  std::vector<double> short_factors, long_factors;

  // yarn, longrope: the factor of cos and sin. 0: 0.1 ln(factor) + 1 with yarn, and with longrope
  // sqrt(1 + ln(factor) / ln(first_context)).
  double amplitude = 0;

  // Whether a text of this length has other angles than a text of first_context tokens.
  bool IsLong(int64_t tokens) const { return kind == Kind::kLongRope && tokens > first_context; }

  // InvalidArgument naming the field, its value and what would be valid. channels: those of a head
  // that turn.
  absl::Status Validate(int64_t channels) const;
};

const char* Name(RopeScaling::Kind kind);  // "none", "linear", "llama3", ...
absl::StatusOr<RopeScaling::Kind> ParseRopeScaling(absl::string_view name);

// Channel i of a head turns by position * frequencies[i] against channel i + channels / 2, and both
// become `amplitude` times as long. The channels behind `channels` stay as they are.
struct RopeAngles {
  std::vector<double> frequencies;  // [channels / 2]
  double amplitude = 1;
};

// channels: even; theta >= 1. Without scaling frequencies[i] = theta^(-2 i / channels). is_long:
// RopeScaling::IsLong of the text.
RopeAngles MakeRopeAngles(int64_t channels, double theta, const RopeScaling& scaling = {},
                          bool is_long = false);

}  // namespace burst
