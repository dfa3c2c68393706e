#include "benchmarks/harness/harness.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"

namespace burst {

double Median(std::vector<double> values) {
  BURST_CHECK(!values.empty());
  const auto middle = values.begin() + (static_cast<int64_t>(values.size()) - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Tensor RandomForTiming(const Shape& shape, DType dtype, DeviceType device, uint64_t stream,
                       double deviation) {
  constexpr int64_t kDistinct = 1 << 22;
  const Tensor tensor = Tensor::Empty(shape, dtype, device);
  const Tensor flat = tensor.View({-1});
  const int64_t distinct = std::min(kDistinct, flat.numel());
  const Tensor numbers = Tensor::Empty({distinct}, DType::kFloat32);
  float* data = numbers.data<float>();
  ParallelFor((distinct + 1) / 2, 1 << 12, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const PhiloxCounter bits = Philox(/*key=*/1, stream, i);
      const auto pair = NormalFromBits(bits[0], bits[1]);
      data[2 * i] = static_cast<float>(deviation * pair[0]);
      if (2 * i + 1 < distinct) data[2 * i + 1] = static_cast<float>(deviation * pair[1]);
    }
  });
  const Tensor converted = numbers.To(dtype).To(device);
  for (int64_t begin = 0; begin < flat.numel(); begin += distinct) {
    const int64_t length = std::min(distinct, flat.numel() - begin);
    flat.Slice(0, begin, length).CopyFrom(converted.Slice(0, 0, length));
  }
  return tensor;
}

TemporaryFolder::TemporaryFolder()
    : path_(std::filesystem::temp_directory_path() / absl::StrCat("burst_benchmark_", getpid())) {
  std::filesystem::create_directories(path_);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace burst
