// The peak that MFU is measured against.
#pragma once

#include "burst/tensor/tensor.h"

namespace burst {

// The best rate of this rank's GEMMs in the dtype over about 0.2 s, in multiply-add FLOPs
// (2 per multiply-add) a second: on the CPU with this rank's threads, on a GPU with cuBLAS.
double MeasurePeakFlops(DeviceType device, DType dtype);

}  // namespace burst
