// Measures the peak with which MFU is computed.
#pragma once

#include "burst/tensor/tensor.h"

namespace burst {

// Returns the best rate of this rank's GEMMs in the dtype over about 0.2 s, in FLOP/s with 2 FLOPs
// for a multiply-add. The CPU uses this rank's threads, a GPU cuBLAS.
double MeasurePeakFlops(DeviceType device, DType dtype);

}  // namespace burst
