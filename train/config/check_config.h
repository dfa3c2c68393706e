// Rules on the values of options that bounds (train_options.cc) and conflicts (conflicts.cc) cannot
// say, such as what must divide what. Errors are InvalidArgument and name the rule, the value and
// what to do.
#pragma once

#include "absl/status/status.h"
#include "train/config/config.h"

namespace burst {

// Products of options that no machine could serve.
absl::Status CheckProducts(const TrainConfig& config);

// What kernels ask of a model. After the device, the precision and the mesh are known.
absl::Status CheckKernels(const ResolvedConfig& config);

// How the layers and the micro-batches are divided over stages.
absl::Status CheckStages(const ResolvedConfig& config);

// How the heads, and with tensor parallelism the hidden channels, are divided over ranks.
absl::Status CheckTensorParallel(const ResolvedConfig& config);
absl::Status CheckHeads(const ResolvedConfig& config);

}  // namespace burst
