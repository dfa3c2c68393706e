// What the benchmarks of C++ share: the clock, the median, random inputs and folders.
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

// The lower one of two in the middle. There must be a value.
double Median(std::vector<double> values);

// Normal numbers by (stream, element), repeated after some millions, which time cannot tell from
// more. On the device of the calling thread.
Tensor RandomForTiming(const Shape& shape, DType dtype, DeviceType device, uint64_t stream,
                       double deviation = 1);

// A folder of this process, which is gone at the end.
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
