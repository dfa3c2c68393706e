// The values of the options that save memory, among which the planner chooses.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/strings/string_view.h"
#include "train/config/config.h"

namespace burst {

// Says whether an option may be chosen; the others stay.
using MayChoose = std::function<bool(absl::string_view option)>;

using SetOptions = std::function<void(ResolvedConfig* config)>;

struct Recomputation {
  Recompute kind = Recompute::kNone;
  int64_t segment = 1;
  void Set(ResolvedConfig* config) const;
};

// The choices of each option, by growing time and shrinking memory. For segments the memory is the
// host's, with offloaded activations.
struct MemoryChoices {
  std::vector<Recomputation> recomputes;
  std::vector<SetOptions> chunks;  // the parts of layers that are computed at a time
  std::vector<int64_t> stages;     // of ZeRO
  std::vector<Offload> offloads;
};

// Returns the choices of each option by itself. A choice helps, and has no conflict with the
// options that are fixed.
MemoryChoices MemoryChoicesOf(const ResolvedConfig& given, const MayChoose& may_choose);

}  // namespace burst
