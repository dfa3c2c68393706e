// Models of GPUs whose rates are known, for simulated GPUs (burst/device/simulated_gpu.h).
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/device/simulated_gpu.h"

namespace burst {

// Finds a model by name: "H100" (by data sheets) or "H200" (measured). Another name is an error
// that lists them.
absl::StatusOr<GpuModel> FindGpuModel(absl::string_view name);
// Finds the model of a GPU's full name, such as "NVIDIA H200".
absl::StatusOr<GpuModel> FindGpuModelOf(const std::string& full_name);

}  // namespace burst
