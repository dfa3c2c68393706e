#include "burst/tensor/tensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "burst/base/parallel.h"
#include "burst/device/device.h"
#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/number.h"
#include "burst/tensor/tensor_cuda.h"

namespace burst {
namespace {

constexpr int64_t kGrain = 1 << 15;  // the fewest elements of a thread

Shape ContiguousStrides(const Shape& shape) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (int64_t i = static_cast<int64_t>(shape.size()) - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

// Calls visit(offset of row in a, offset of row in b) for every innermost row of two tensors of one
// shape.
template <typename Visit>
void ForEachRow(const Shape& shape, const Shape& a, const Shape& b, Visit visit) {
  const int64_t ndim = static_cast<int64_t>(shape.size());
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  Shape index(shape.size(), 0);
  while (true) {
    int64_t offset_a = 0, offset_b = 0;
    for (int64_t i = 0; i < ndim - 1; ++i) {
      offset_a += index[i] * a[i];
      offset_b += index[i] * b[i];
    }
    visit(offset_a, offset_b);
    int64_t axis = ndim - 2;
    while (axis >= 0 && ++index[axis] == shape[axis]) index[axis--] = 0;
    if (axis < 0) return;
  }
}

template <typename Function>
auto Dispatch(DType dtype, Function&& function) {
  if (dtype == DType::kInt32) return function(int32_t{});
  if (dtype == DType::kBFloat16) return function(BFloat16{});
  if (dtype == DType::kFloat16) return function(Float16{});
  return DispatchFloat(dtype, function);
}

// Converts a number. A double is rounded to float first, because 16-bit types hold results that
// were floats.
template <typename To, typename From>
To Convert(From value) {
  if constexpr (std::is_same_v<From, BFloat16> || std::is_same_v<From, Float16>) {
    return Convert<To>(ToFloat(value));
  } else if constexpr (std::is_same_v<To, BFloat16> || std::is_same_v<To, Float16>) {
    To result;
    Round(static_cast<float>(value), &result);
    return result;
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace

int64_t SizeOf(DType dtype) {
  if (Is8Bit(dtype)) return 1;
  if (Is16Bit(dtype)) return 2;
  return dtype == DType::kFloat64 ? 8 : 4;
}

bool Is8Bit(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

bool Is16Bit(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

DType SumDType(DType dtype) { return Is16Bit(dtype) ? DType::kFloat32 : dtype; }

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kInt32:
      return "int32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
  }
  return "?";
}

std::string ToString(const Shape& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

struct Tensor::Storage {
  Storage(DeviceType device, int64_t bytes) : allocation(AllocateMemory(device, bytes)) {}
  explicit Storage(void* borrowed) : allocation{borrowed}, is_pooled(false) {}
  explicit Storage(std::unique_ptr<HostBuffer> buffer)
      : allocation{buffer->data()}, is_pooled(false), buffer(std::move(buffer)) {}
  ~Storage() {
    if (is_pooled) FreeMemory(allocation);
  }
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  const Allocation allocation;
  const bool is_pooled = true;
  const std::unique_ptr<HostBuffer> buffer;
};

Tensor Tensor::Null(const Shape& shape, DType dtype, DeviceType device) {
  Tensor tensor;
  tensor.shape_ = shape;
  tensor.strides_ = ContiguousStrides(shape);
  tensor.dtype_ = dtype;
  tensor.device_ = device;
  return tensor;
}

Tensor Tensor::Empty(const Shape& shape, DType dtype, DeviceType device) {
  Tensor tensor = Null(shape, dtype, device);
  for (int64_t size : shape) BURST_CHECK_GE(size, 0);
  tensor.storage_ = std::make_shared<Storage>(device, tensor.size_bytes());
  return tensor;
}

Tensor Tensor::Borrow(void* data, const Shape& shape, const Shape& strides, DType dtype,
                      DeviceType device) {
  BURST_CHECK_EQ(shape.size(), strides.size());
  Tensor tensor;
  tensor.shape_ = shape;
  tensor.strides_ = strides;
  tensor.dtype_ = dtype;
  tensor.device_ = device;
  tensor.storage_ = std::make_shared<Storage>(data);
  return tensor;
}

Tensor Tensor::Zeros(const Shape& shape, DType dtype, DeviceType device) {
  Tensor tensor = Empty(shape, dtype, device);
  tensor.Fill(0);
  return tensor;
}

Tensor Tensor::ZerosOnHost(const Shape& shape, DType dtype, DeviceType device) {
  Tensor tensor = Null(shape, dtype, DeviceType::kCpu);
  auto buffer = std::make_unique<HostBuffer>(device, tensor.size_bytes());
  const bool has_memory = buffer->has_memory();
  tensor.storage_ = std::make_shared<Storage>(std::move(buffer));
  if (has_memory) {
    ParallelFor(tensor.size_bytes(), 4 * kGrain, [&](int64_t begin, int64_t end) {
      std::memset(static_cast<char*>(tensor.raw_data()) + begin, 0, end - begin);
    });
  }
  return tensor;
}

Tensor Tensor::EmptyLike(const Tensor& other) {
  return Empty(other.shape_, other.dtype_, other.device_);
}

Tensor Tensor::ZerosLike(const Tensor& other) {
  return Zeros(other.shape_, other.dtype_, other.device_);
}

int64_t Tensor::dim(int64_t axis) const {
  if (axis < 0) axis += ndim();
  BURST_CHECK(axis >= 0 && axis < ndim()) << "axis " << axis << " of " << ToString(shape_);
  return shape_[axis];
}

int64_t Tensor::stride(int64_t axis) const {
  if (axis < 0) axis += ndim();
  BURST_CHECK(axis >= 0 && axis < ndim()) << "axis " << axis << " of " << ToString(shape_);
  return strides_[axis];
}

int64_t Tensor::numel() const {
  int64_t count = 1;
  for (int64_t size : shape_) count *= size;
  return count;
}

bool Tensor::is_contiguous() const {
  int64_t stride = 1;
  for (int64_t i = ndim() - 1; i >= 0; --i) {
    if (shape_[i] != 1 && strides_[i] != stride) return false;
    stride *= shape_[i];
  }
  return true;
}

void* Tensor::raw_data() const {
  BURST_CHECK(!null()) << "a tensor without memory";
  return static_cast<char*>(storage_->allocation.data) + offset_ * SizeOf(dtype_);
}

Tensor Tensor::View(Shape shape) const {
  BURST_CHECK(is_contiguous()) << "View of a strided tensor " << ToString(shape_);
  int64_t known = 1, unknown = -1;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] == -1) {
      BURST_CHECK_EQ(unknown, -1) << "two unknown dimensions";
      unknown = static_cast<int64_t>(i);
    } else {
      known *= shape[i];
    }
  }
  if (unknown >= 0) shape[unknown] = known == 0 ? 0 : numel() / known;
  Tensor view = *this;
  view.shape_ = shape;
  view.strides_ = ContiguousStrides(shape);
  BURST_CHECK_EQ(view.numel(), numel()) << ToString(shape_) << " viewed as " << ToString(shape);
  return view;
}

Tensor Tensor::Slice(int64_t axis, int64_t begin, int64_t length, int64_t step) const {
  if (axis < 0) axis += ndim();
  BURST_CHECK(begin >= 0 && length >= 0 && step >= 1 && begin <= dim(axis) &&
              (length == 0 || begin + (length - 1) * step < dim(axis)))
      << "slice " << begin << " + " << length << " x " << step << " of axis " << axis << " of "
      << ToString(shape_);
  Tensor slice = *this;
  slice.offset_ += begin * strides_[axis];
  slice.shape_[axis] = length;
  slice.strides_[axis] *= step;
  return slice;
}

Tensor Tensor::WithoutMemory() const {
  Tensor tensor = *this;
  tensor.storage_ = nullptr;
  tensor.offset_ = 0;
  return tensor;
}

Tensor Tensor::Clone() const {
  Tensor copy = EmptyLike(*this);
  copy.CopyFrom(*this);
  return copy;
}

void Tensor::CopyFrom(const Tensor& source) const {
  BURST_CHECK(shape_ == source.shape_ && dtype_ == source.dtype_)
      << ToString(shape_) << " from " << ToString(source.shape_);
  if (device_ != source.device_) {
    if (is_contiguous()) {
      const Tensor packed = source.Contiguous();
      CopyMemory(raw_data(), device_, packed.raw_data(), packed.device_, size_bytes());
    } else {
      CopyFrom(source.To(device_));
    }
    return;
  }
  if (device_ == DeviceType::kCuda) {
    const TensorCopy copy = {source, *this};
    BURST_GPU_KERNEL(CopyAll, absl::Span<const TensorCopy>(&copy, 1));
    return;
  }
  if (is_contiguous() && source.is_contiguous()) {
    ParallelFor(size_bytes(), 4 * kGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(static_cast<char*>(raw_data()) + begin,
                  static_cast<const char*>(source.raw_data()) + begin, end - begin);
    });
    return;
  }
  Dispatch(dtype_, [&](auto zero) {
    using T = decltype(zero);
    const int64_t length = shape_.back(), to = strides_.back(), from = source.strides_.back();
    ForEachRow(shape_, strides_, source.strides_, [&](int64_t a, int64_t b) {
      T* y = data<T>() + a;
      const T* x = source.data<T>() + b;
      for (int64_t i = 0; i < length; ++i) y[i * to] = x[i * from];
    });
  });
}

Tensor Tensor::To(DType dtype) const {
  if (dtype == dtype_) return Contiguous();
  Tensor result = Empty(shape_, dtype, device_);
  result.ConvertFrom(Contiguous());
  return result;
}

void Tensor::ConvertFrom(const Tensor& source) const {
  BURST_CHECK(shape_ == source.shape_ && device_ == source.device_ && is_contiguous() &&
              source.is_contiguous())
      << ToString(shape_) << " from " << ToString(source.shape_);
  if (source.dtype_ == dtype_) return CopyFrom(source);
  if (device_ == DeviceType::kCuda) {
    BURST_GPU_KERNEL(Convert, source, *this);
    return;
  }
  Dispatch(source.dtype_, [&](auto from) {
    Dispatch(dtype_, [&](auto to) {
      const auto* x = source.data<decltype(from)>();
      auto* y = data<decltype(to)>();
      ParallelFor(numel(), kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) y[i] = burst::Convert<decltype(to)>(x[i]);
      });
    });
  });
}

Tensor Tensor::To(DeviceType device) const {
  if (device == device_) return Contiguous();
  Tensor result = Empty(shape_, dtype_, device);
  result.CopyFrom(*this);
  return result;
}

void Tensor::Fill(double value) const {
  BURST_CHECK(is_contiguous());
  if (device_ == DeviceType::kCuda) {
    BURST_GPU_KERNEL(Fill, *this, value);
    return;
  }
  if (value == 0 && !std::signbit(value)) {
    std::memset(raw_data(), 0, size_bytes());
    return;
  }
  Dispatch(dtype_, [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(data<T>(), numel(), burst::Convert<T>(value));
  });
}

void Tensor::Add(const Tensor& other) const {
  BURST_CHECK(shape_ == other.shape_ && device_ == other.device_ && is_contiguous() &&
              other.is_contiguous())
      << ToString(shape_) << " += " << ToString(other.shape_);
  if (device_ == DeviceType::kCuda) {
    BURST_GPU_KERNEL(Add, *this, other);
    return;
  }
  if (dtype_ == DType::kFloat32 && Is16Bit(other.dtype_)) return Add(other.To(dtype_));
  if (Is16Bit(dtype_)) {
    const Tensor sum = To(DType::kFloat32);
    sum.Add(other);
    return ConvertFrom(sum);
  }
  DispatchFloat(dtype_, [&](auto zero) {
    using T = decltype(zero);
    T* y = data<T>();
    const T* x = other.data<T>();
    ParallelFor(numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] += x[i];
    });
  });
}

void Tensor::Scale(double factor) const {
  BURST_CHECK(is_contiguous());
  if (device_ == DeviceType::kCuda) {
    BURST_GPU_KERNEL(Scale, *this, factor);
    return;
  }
  if (Is16Bit(dtype_)) {
    const Tensor scaled = To(DType::kFloat32);
    scaled.Scale(factor);
    return ConvertFrom(scaled);
  }
  DispatchFloat(dtype_, [&](auto zero) {
    using T = decltype(zero);
    T* y = data<T>();
    ParallelFor(numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) y[i] *= static_cast<T>(factor);
    });
  });
}

void CopyAll(absl::Span<const TensorCopy> copies) {
  if (copies.empty()) return;
  const DeviceType device = copies[0].from.device();
  for (const TensorCopy& copy : copies) {
    BURST_CHECK(copy.from.shape() == copy.to.shape() && copy.from.dtype() == copy.to.dtype() &&
                copy.from.device() == device && copy.to.device() == device)
        << ToString(copy.from.shape()) << " to " << ToString(copy.to.shape());
  }
  if (device == DeviceType::kCuda) {
    BURST_GPU_KERNEL(CopyAll, copies);
    return;
  }
  for (const TensorCopy& copy : copies) copy.to.CopyFrom(copy.from);
}

template <typename T>
std::vector<T> Tensor::ToVector() const {
  const Tensor source = To(DeviceType::kCpu);
  std::vector<T> values(numel());
  Dispatch(dtype_, [&](auto zero) {
    const auto* x = source.data<decltype(zero)>();
    for (int64_t i = 0; i < numel(); ++i) values[i] = burst::Convert<T>(x[i]);
  });
  return values;
}

template std::vector<float> Tensor::ToVector<float>() const;
template std::vector<double> Tensor::ToVector<double>() const;
template std::vector<int32_t> Tensor::ToVector<int32_t>() const;

}  // namespace burst
