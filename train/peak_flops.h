// The peak that MFU is measured against.
#pragma once

namespace burst {

// The best rate of single-precision matrix products on this rank's threads over about 0.2 s, in
// multiply-add FLOPs (2 per multiply-add) a second.
double MeasurePeakFlops();

}  // namespace burst
