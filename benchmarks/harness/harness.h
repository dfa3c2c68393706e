// Clocks, medians, random inputs and folders for the C++ benchmarks.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Returns the median; of two values in the middle, the lower one. There must be a value.
double Median(std::vector<double> values);

// Returns normal numbers by (stream, element), on the device of the calling thread. They repeat
// after some millions, which does not change the time.
Tensor RandomForTiming(const Shape& shape, DType dtype, DeviceType device, uint64_t stream,
                       double deviation = 1);

// A folder of this process. The destructor removes it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  const std::string path_;
};

}  // namespace burst
