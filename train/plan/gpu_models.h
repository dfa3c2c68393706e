// GPUs whose rates are known: what simulated ones (burst/device/simulated_gpu.h) are made from.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/device/simulated_gpu.h"

namespace burst {

// By name: "H100" (by data sheets) or "H200" (measured). Another name is an error that lists them.
absl::StatusOr<GpuModel> FindGpuModel(absl::string_view name);
// The one that a GPU's full name ("NVIDIA H200") is of, by the same names.
absl::StatusOr<GpuModel> FindGpuModelOf(const std::string& full_name);

}  // namespace burst
