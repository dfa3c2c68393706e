// What options must satisfy: ranges, and pairs that contradict each other. InvalidArgument that
// names the option, its value and what would be valid.
#pragma once

#include "absl/status/status.h"
#include "train/config/config.h"

namespace burst {

// Before anything else.
absl::Status CheckRanges(const TrainConfig& config);

// What the kernels of a GPU ask of a model. After the device, the dtype and the model are known.
absl::Status CheckModelFitsDevice(const ResolvedConfig& config);

// Whether --zero=2 and 3 go with the other options. They do not go with --exact. Over stages of a
// pipeline they do not if the first and the last stage share only a part of a unit (ParameterUnit),
// as a tied GPT-2's do.
bool CanDivideGradients(const ResolvedConfig& config);

// What --pp goes with. After the mesh and the model are known.
absl::Status CheckPipeline(const TrainConfig& given, const ResolvedConfig& config);

// Checks gradients in transit, attention in fp8, ZeRO and offload in an otherwise resolved
// configuration.
absl::Status CheckContradictions(const ResolvedConfig& config);

}  // namespace burst
