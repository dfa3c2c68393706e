// The version of Burst, which every program prints with --version. CHANGELOG.md lists what changed.
#pragma once

namespace burst {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace burst
