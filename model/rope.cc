#include "model/rope.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/enum_names.h"

namespace burst {
namespace {

using Kind = RopeScaling::Kind;

constexpr double kTurn = 2 * 3.14159265358979323846;

constexpr EnumName<Kind> kKinds[] = {{Kind::kNone, "none"},
                                     {Kind::kLinear, "linear"},
                                     {Kind::kLlama3, "llama3"},
                                     {Kind::kYarn, "yarn"}};

// Returns the share of a frequency, 0 to 1, that is kept. The rest is divided by the factor.
double KeptByLlama3(const RopeScaling& scaling, double frequency) {
  const double turns = static_cast<double>(scaling.first_context) * frequency / kTurn;
  return std::clamp((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0);
}

// Returns the channel, a fraction, that makes `turns` turns in first_context tokens.
double ChannelOfTurns(const RopeScaling& scaling, int64_t head_dim, double theta, double turns) {
  const double context = static_cast<double>(scaling.first_context);
  return static_cast<double>(head_dim) * std::log(context / (turns * kTurn)) /
         (2 * std::log(theta));
}

double KeptByYarn(const RopeScaling& scaling, int64_t head_dim, double theta, int64_t channel) {
  double first = ChannelOfTurns(scaling, head_dim, theta, scaling.fast);
  double last = ChannelOfTurns(scaling, head_dim, theta, scaling.slow);
  if (scaling.whole) first = std::floor(first), last = std::ceil(last);
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(head_dim - 1));
  if (first == last) last += 0.001;  // a step
  return 1 - std::clamp((static_cast<double>(channel) - first) / (last - first), 0.0, 1.0);
}

template <typename T>
absl::Status Invalid(absl::string_view key, const T& value, absl::string_view valid) {
  return absl::InvalidArgumentError(
      absl::StrCat("rope_scaling ", key, ": must be ", valid, "; got ", value));
}

}  // namespace

const char* Name(Kind kind) { return NameOf(kind, kKinds); }

absl::StatusOr<Kind> ParseRopeScaling(absl::string_view name) { return ParseName(name, kKinds); }

absl::Status RopeScaling::Validate() const {
  constexpr double kMost = 1e6;
  constexpr int64_t kMostTokens = int64_t{1} << 31;
  if (kind == Kind::kNone) return absl::OkStatus();
  if (!(factor >= 1 && factor <= kMost)) return Invalid("factor", factor, "from 1 to 1e6");
  if (kind == Kind::kLinear) return absl::OkStatus();
  if (first_context < 1 || first_context >= kMostTokens) {
    return Invalid("first_context", first_context, "from 1 to 2^31 - 1");
  }
  if (kind == Kind::kLlama3) {
    if (!(low > 0 && low < high)) return Invalid("low", low, "above 0 and below high");
    return high <= kMost ? absl::OkStatus() : Invalid("high", high, "at most 1e6");
  }
  if (!(slow > 0 && slow < fast)) return Invalid("slow", slow, "above 0 and below fast");
  if (!(fast <= kMost)) return Invalid("fast", fast, "at most 1e6");
  if (!(amplitude >= 0 && amplitude <= kMost)) return Invalid("amplitude", amplitude, "0 to 1e6");
  return absl::OkStatus();
}

RopeAngles MakeRopeAngles(int64_t head_dim, double theta, const RopeScaling& scaling) {
  BURST_CHECK_EQ(head_dim % 2, 0);
  RopeAngles angles;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / head_dim);
    const double kept = scaling.kind == Kind::kNone     ? 1
                        : scaling.kind == Kind::kLlama3 ? KeptByLlama3(scaling, frequency)
                        : scaling.kind == Kind::kYarn   ? KeptByYarn(scaling, head_dim, theta, i)
                                                        : 0;
    angles.frequencies.push_back(kept * frequency + (1 - kept) * frequency / scaling.factor);
  }
  if (scaling.kind == Kind::kYarn) {
    angles.amplitude =
        scaling.amplitude > 0 ? scaling.amplitude : 0.1 * std::log(scaling.factor) + 1;
  }
  return angles;
}

}  // namespace burst
