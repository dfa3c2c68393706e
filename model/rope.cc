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
                                     {Kind::kYarn, "yarn"},
                                     {Kind::kLongRope, "longrope"}};

// Returns the share of a frequency, 0 to 1, that is kept. The rest is divided by the factor.
double KeptByLlama3(const RopeScaling& scaling, double frequency) {
  const double turns = static_cast<double>(scaling.first_context) * frequency / kTurn;
  return std::clamp((turns - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0);
}

// Returns the channel, a fraction, that makes `turns` turns in first_context tokens.
double ChannelOfTurns(const RopeScaling& scaling, int64_t channels, double theta, double turns) {
  const double context = static_cast<double>(scaling.first_context);
  return static_cast<double>(channels) * std::log(context / (turns * kTurn)) /
         (2 * std::log(theta));
}

double KeptByYarn(const RopeScaling& scaling, int64_t channels, double theta, int64_t channel) {
  double first = ChannelOfTurns(scaling, channels, theta, scaling.fast);
  double last = ChannelOfTurns(scaling, channels, theta, scaling.slow);
  if (scaling.whole) first = std::floor(first), last = std::ceil(last);
  first = std::max(first, 0.0);
  last = std::min(last, static_cast<double>(channels - 1));
  if (first == last) last += 0.001;  // a step
  return 1 - std::clamp((static_cast<double>(channel) - first) / (last - first), 0.0, 1.0);
}

// Returns the factor of cos and sin.
double AmplitudeOf(const RopeScaling& scaling) {
  if (scaling.kind != Kind::kYarn && scaling.kind != Kind::kLongRope) return 1;
  if (scaling.amplitude > 0) return scaling.amplitude;
  const double log = std::log(scaling.factor);
  if (scaling.kind == Kind::kYarn) return 0.1 * log + 1;
  return std::sqrt(1 + log / std::log(static_cast<double>(scaling.first_context)));
}

template <typename T>
absl::Status Invalid(absl::string_view key, const T& value, absl::string_view valid) {
  return absl::InvalidArgumentError(
      absl::StrCat("rope_scaling ", key, ": must be ", valid, "; got ", value));
}

constexpr double kMost = 1e6;

// Checks longrope's factors of texts that are short, or long.
absl::Status CheckFactors(const char* key, const std::vector<double>& factors, int64_t count) {
  if (static_cast<int64_t>(factors.size()) != count) {
    return Invalid(key, absl::StrCat(factors.size(), " numbers"),
                   absl::StrCat(count, " numbers, one for each pair of channels that turn"));
  }
  for (const double factor : factors) {
    if (!(factor >= 1 / kMost && factor <= kMost)) {
      return Invalid(key, factor, "numbers from 1e-6 to 1e6");
    }
  }
  return absl::OkStatus();
}

}  // namespace

const char* Name(Kind kind) { return NameOf(kind, kKinds); }

absl::StatusOr<Kind> ParseRopeScaling(absl::string_view name) { return ParseName(name, kKinds); }

absl::Status RopeScaling::Validate(int64_t channels) const {
  constexpr int64_t kMostTokens = int64_t{1} << 31;
  if (kind == Kind::kNone) return absl::OkStatus();
  if (!(factor >= 1 && factor <= kMost)) return Invalid("factor", factor, "from 1 to 1e6");
  if (kind == Kind::kLinear) return absl::OkStatus();
  const int64_t least = kind == Kind::kLongRope ? 2 : 1;  // longrope divides by its logarithm
  if (first_context < least || first_context >= kMostTokens) {
    return Invalid("first_context", first_context, absl::StrCat("from ", least, " to 2^31 - 1"));
  }
  if (kind == Kind::kLlama3) {
    if (!(low > 0 && low < high)) return Invalid("low", low, "above 0 and below high");
    return high <= kMost ? absl::OkStatus() : Invalid("high", high, "at most 1e6");
  }
  if (!(amplitude >= 0 && amplitude <= kMost)) return Invalid("amplitude", amplitude, "0 to 1e6");
  if (kind == Kind::kLongRope) {
    const absl::Status valid = CheckFactors("short_factors", short_factors, channels / 2);
    return valid.ok() ? CheckFactors("long_factors", long_factors, channels / 2) : valid;
  }
  if (!(slow > 0 && slow < fast)) return Invalid("slow", slow, "above 0 and below fast");
  return fast <= kMost ? absl::OkStatus() : Invalid("fast", fast, "at most 1e6");
}

RopeAngles MakeRopeAngles(int64_t channels, double theta, const RopeScaling& scaling,
                          bool is_long) {
  BURST_CHECK_EQ(channels % 2, 0);
  RopeAngles angles;
  for (int64_t i = 0; i < channels / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / channels);
    if (scaling.kind == Kind::kLongRope) {
      const auto& factors = is_long ? scaling.long_factors : scaling.short_factors;
      angles.frequencies.push_back(frequency / factors[i]);
      continue;
    }
    const double kept = scaling.kind == Kind::kNone     ? 1
                        : scaling.kind == Kind::kLlama3 ? KeptByLlama3(scaling, frequency)
                        : scaling.kind == Kind::kYarn   ? KeptByYarn(scaling, channels, theta, i)
                                                        : 0;
    angles.frequencies.push_back(kept * frequency + (1 - kept) * frequency / scaling.factor);
  }
  angles.amplitude = AmplitudeOf(scaling);
  return angles;
}

}  // namespace burst
