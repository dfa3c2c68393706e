// Prepares a training on all cores and GPUs of this machine.
#pragma once

#include "absl/status/statusor.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/device/device.h"
#include "train/config/config.h"
#include "train/run/setup.h"

namespace burst {

inline absl::StatusOr<TrainingSetup> PrepareHere(const TrainConfig& options) {
  Launch launch;
  launch.cores = NumCores();
  launch.gpus = CudaDeviceCount();
  BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ResolveConfig(options, launch));
  return PrepareTraining(config);
}

}  // namespace burst
