// Checks rules on options that bounds (train_options.cc) and conflicts (conflicts.cc) cannot
// express, such as which number must divide which. Errors are InvalidArgument and name the rule,
// the value and what to do.
#pragma once

#include "absl/status/status.h"
#include "train/config/config.h"

namespace burst {

// Checks that products of options are not too large for any machine.
absl::Status CheckProducts(const TrainConfig& config);

// Checks what kernels require of a model. The device, the precision and the mesh must be known.
absl::Status CheckKernels(const ResolvedConfig& config);

// Checks how stages divide the layers and the micro-batches.
absl::Status CheckStages(const ResolvedConfig& config);

// Checks how ranks divide the heads, and with tensor parallelism the hidden channels.
absl::Status CheckTensorParallel(const ResolvedConfig& config);
absl::Status CheckHeads(const ResolvedConfig& config);

}  // namespace burst
