#include "train/plan/gpu_models.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace burst {
namespace {

constexpr double kGiB = double{1 << 30};

// Rates are measured with the benchmarks of this project (benchmarks/results): products of a 1B
// model (dense_h200.json), attention with head_dim 128 (attention_h200.json), memory-bound kernels
// (ops_h200.json), messages of a ring (scaling_2_h200.json). The network is from a data sheet, 400
// Gbit/s a GPU, and so is the host's link, PCIe 5 x 16. The memory is what CUDA leaves to a
// program.
GpuModel H200() {
  GpuModel gpu;
  gpu.name = "H200";
  gpu.memory = 139 * kGiB;
  gpu.bandwidth = 3.8e12;
  gpu.fp8 = 1150e12;
  gpu.bf16 = 705e12;
  gpu.tf32 = 350e12;
  gpu.fp32 = 45e12;
  gpu.attention_forward = 650e12;
  gpu.attention_backward = 575e12;
  gpu.links = 340e9;
  gpu.network = 45e9;
  gpu.host_link = 50e9;
  gpu.kernel_seconds = 4e-6;
  gpu.message_seconds = 8e-6;
  return gpu;
}

// The H100 is the H200's chip with less memory, which is slower by the data sheets' ratio. These
// rates are not measured.
GpuModel H100() {
  GpuModel gpu = H200();
  gpu.name = "H100";
  gpu.memory = 78 * kGiB;
  gpu.bandwidth *= 3.35 / 4.8;
  return gpu;
}

const std::vector<GpuModel>& GpuModels() {
  static const auto* const models = new std::vector<GpuModel>{H200(), H100()};
  return *models;
}

absl::Status NoSuchModel(absl::string_view name) {
  std::string names;
  for (const GpuModel& model : GpuModels()) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", model.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("must be a GPU of known rates, ", names, "; got ", name));
}

}  // namespace

absl::StatusOr<GpuModel> FindGpuModel(absl::string_view name) {
  for (const GpuModel& model : GpuModels()) {
    if (model.name == name) return model;
  }
  return NoSuchModel(name);
}

absl::StatusOr<GpuModel> FindGpuModelOf(const std::string& full_name) {
  for (const GpuModel& model : GpuModels()) {
    if (absl::StrContains(full_name, model.name)) return model;
  }
  return NoSuchModel(full_name);
}

}  // namespace burst
