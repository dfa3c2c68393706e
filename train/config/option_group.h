// A group of options of //train has a file, NAME_options.cc. There are the rows of its options,
// their conflicts, and the numbers that they must fit. A conflict is in the group of one of its
// options.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "burst/cli/options.h"
#include "train/config/config.h"
#include "train/config/conflicts.h"

namespace burst {

struct OptionGroup {
  // Adds a row for each option, whose field is in `config`.
  void (*add_rows)(TrainConfig* config, OptionTable* table);
  absl::Span<const TrainConflict> conflicts = {};
  // Checks rules that bounds and conflicts cannot express, such as which number must divide which.
  // The mesh, the device and the model must be known. InvalidArgument names the rule, the value and
  // what to do. nullptr: no such rule.
  absl::Status (*check)(const ResolvedConfig& config) = nullptr;
};

extern const OptionGroup kDataOptions, kModelOptions, kOptimizationOptions, kRankOptions,
    kMemoryOptions, kAttentionOptions, kOutputOptions;

// Runs the checks of all groups.
absl::Status CheckNumbers(const ResolvedConfig& config);

// Reads the model that c->model names, and changes it as other options say. The content of a file
// replaces its name, so that the configuration stands alone. The name of a folder with weights
// stays, because weights are too large. It is `lost_folder` if it is gone.
absl::StatusOr<ModelConfig> ReadModel(TrainConfig* c, std::string* name,
                                      std::optional<Pretrained>* pretrained,
                                      std::string* lost_folder);

// Adds advice to an error of --strategy=ulysses.
inline absl::Status OrBurst(const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), ", or --strategy=burst"));
}

// One side of a conflict: options, text, what the first option must be instead, an example, and
// when it holds.
using Config = ResolvedConfig;
using Side = Trait<ResolvedConfig>;

// These sides have conflicts in several groups.
inline constexpr Side kOneRank = {"ranks", "on one rank", "more", "--ranks=1",
                                  [](const Config& c) { return c.ranks == 1; }};
inline constexpr Side kTensorParallel = {"tp", "--tp", "1", "--tp=2",
                                         [](const Config& c) { return c.mesh.tensor > 1; }};
inline constexpr Side kPipeline = {"pp", "--pp", "1", "--pp=2",
                                   [](const Config& c) { return c.pp > 1; }};
inline constexpr Side kExact = {"exact", "--exact", "false", "--exact",
                                [](const Config& c) { return c.exact; }};
inline constexpr Side kCpu = {"device", "on the CPU", "cuda", "--device=cpu",
                              [](const Config& c) { return c.device == DeviceType::kCpu; }};

}  // namespace burst
