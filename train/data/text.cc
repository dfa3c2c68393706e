#include "train/data/text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace burst {

std::string Thousands(int64_t value) {
  std::string digits = absl::StrCat(value);
  for (int64_t i = static_cast<int64_t>(digits.size()) - 3; i > 0; i -= 3) digits.insert(i, ",");
  return digits;
}

std::string ShortDuration(double seconds) {
  const int64_t total = static_cast<int64_t>(seconds + 0.5);
  const int64_t hours = total / 3600, minutes = total / 60 % 60;
  if (hours > 0) return absl::StrFormat("%d:%02d:%02d", hours, minutes, total % 60);
  return absl::StrFormat("%d:%02d", minutes, total % 60);
}

}  // namespace burst
