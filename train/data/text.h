// Numbers for people.
#pragma once

#include <cstdint>
#include <string>

namespace burst {

std::string Thousands(int64_t value);       // "1,234,567"
std::string ShortDuration(double seconds);  // "1:05", "2:03:10"

}  // namespace burst
