// Tensor: a strided, typed view of reference-counted device memory.
//
// Copying a Tensor copies the handle, never the elements; Clone copies elements. A const handle
// does not make the elements const (as with shared_ptr). A tensor is not synchronized: threads may
// share it for reading.
//
// Everything works on every device. On a GPU it is queued on the calling thread's stream. Only
// calls that bring elements to the host (ToVector, To(DeviceType::kCpu)) wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "burst/base/check.h"
#include "burst/device/memory.h"

namespace burst {

// The element types. The last two are only operands of matrix products on GPUs. They have a sign, 4
// (or 5) bits of exponent and 3 (or 2) of mantissa (Micikevicius et al., arXiv 2209.05433).
enum class DType { kFloat32, kFloat64, kInt32, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2 };

// BFloat16 is the upper half of a float, Float16 is IEEE 754's binary16. The CPU converts to and
// from them (Tensor::To, number.h) and computes in the other types.
struct BFloat16 {
  uint16_t bits = 0;
};
struct Float16 {
  uint16_t bits = 0;
};

int64_t SizeOf(DType dtype);    // bytes of an element
const char* Name(DType dtype);  // "float32"

bool Is8Bit(DType dtype);  // one of the float8 types

// Returns whether the dtype is bfloat16 or float16.
bool Is16Bit(DType dtype);

// Returns the dtype in which elements are accumulated: float32 for 16-bit types, else the dtype
// itself.
DType SumDType(DType dtype);

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<Float16> {
  static constexpr DType value = DType::kFloat16;
};

using Shape = absl::InlinedVector<int64_t, 6>;

std::string ToString(const Shape& shape);  // "[2, 3]"

class Tensor {
 public:
  // Makes a tensor without memory, whose null() is true.
  Tensor() = default;

  // Makes a contiguous tensor with its own memory. Empty leaves the elements uninitialized.
  static Tensor Empty(const Shape& shape, DType dtype, DeviceType device = DeviceType::kCpu);
  static Tensor Zeros(const Shape& shape, DType dtype, DeviceType device = DeviceType::kCpu);
  // Makes a tensor in the host's memory, page-locked for copies from and to `device` (HostBuffer).
  static Tensor ZerosOnHost(const Shape& shape, DType dtype, DeviceType device);
  static Tensor EmptyLike(const Tensor& other);  // shape, dtype and device of other; contiguous
  static Tensor ZerosLike(const Tensor& other);
  // Wraps memory of another owner, which must outlive the tensor. Strides are in elements.
  static Tensor Borrow(void* data, const Shape& shape, const Shape& strides, DType dtype,
                       DeviceType device);
  template <typename T>
  static Tensor FromVector(const std::vector<T>& values, const Shape& shape,
                           DeviceType device = DeviceType::kCpu);

  bool null() const { return storage_ == nullptr; }
  const Shape& shape() const { return shape_; }
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  int64_t dim(int64_t axis) const;     // negative axes count from the end
  int64_t stride(int64_t axis) const;  // in elements
  int64_t numel() const;
  int64_t size_bytes() const { return numel() * SizeOf(dtype_); }
  DType dtype() const { return dtype_; }
  DeviceType device() const { return device_; }
  bool is_contiguous() const;

  // Returns the first element. T must match the dtype, and the tensor must be on the CPU; kernels
  // of a GPU take raw_data().
  template <typename T>
  T* data() const {
    BURST_CHECK(DTypeOf<T>::value == dtype_ && device_ == DeviceType::kCpu)
        << "the tensor holds " << Name(dtype_) << " on the device " << Name(device_);
    return static_cast<T*>(raw_data());
  }
  void* raw_data() const;

  // Returns the elements under another shape of equal size; *this must be contiguous. One dimension
  // may be -1: it follows from the others.
  Tensor View(Shape shape) const;
  // Returns elements begin, begin + step, ... along axis, `length` of them; shares memory.
  Tensor Slice(int64_t axis, int64_t begin, int64_t length, int64_t step = 1) const;
  // Returns a null tensor of this shape, dtype and device.
  Tensor WithoutMemory() const;
  // Returns a null tensor that never had memory.
  static Tensor Null(const Shape& shape, DType dtype, DeviceType device);
  // Returns a contiguous copy.
  Tensor Clone() const;
  // Returns *this if it is contiguous, else a contiguous copy.
  Tensor Contiguous() const { return is_contiguous() ? *this : Clone(); }
  // Copies the elements of a tensor of the same shape and dtype into this one; either may be
  // strided, and on any device.
  void CopyFrom(const Tensor& source) const;
  // Returns a contiguous tensor with the elements converted (among floating-point types) or copied
  // to another device, or *this if nothing changes.
  Tensor To(DType dtype) const;
  Tensor To(DeviceType device) const;
  void Fill(double value) const;
  // Adds `other`, of the same shape; both are contiguous. The dtypes are equal, or `other` is
  // bfloat16 or float16 and this one is float32.
  void Add(const Tensor& other) const;
  // Multiplies the elements by factor; contiguous.
  void Scale(double factor) const;

  // Sets the elements to those of another tensor, converted among the floating-point types. Both
  // have the same shape and device, and are contiguous.
  void ConvertFrom(const Tensor& source) const;

  // Returns the elements in order, converted, for tests and logging.
  template <typename T>
  std::vector<T> ToVector() const;

 private:
  struct Storage;

  std::shared_ptr<Storage> storage_;
  int64_t offset_ = 0;  // in elements
  Shape shape_;
  Shape strides_;
  DType dtype_ = DType::kFloat32;
  DeviceType device_ = DeviceType::kCpu;
};

// Runs to.CopyFrom(from) for many pairs, all on one device. No `to` may overlap another pair's
// tensors. On a GPU one kernel serves a few dozen pairs.
struct TensorCopy {
  Tensor from, to;
};
void CopyAll(absl::Span<const TensorCopy> copies);

// Calls function(T{}) with T = float or double, as the dtype says. Only here does a runtime dtype
// become a template argument.
template <typename Function>
auto DispatchFloat(DType dtype, Function&& function) {
  BURST_CHECK(dtype == DType::kFloat32 || dtype == DType::kFloat64)
      << "expected a floating-point tensor, got " << Name(dtype);
  if (dtype == DType::kFloat64) return function(double{});
  return function(float{});
}

template <typename T>
Tensor Tensor::FromVector(const std::vector<T>& values, const Shape& shape, DeviceType device) {
  Tensor tensor = Empty(shape, DTypeOf<T>::value);
  BURST_CHECK_EQ(static_cast<int64_t>(values.size()), tensor.numel());
  std::copy(values.begin(), values.end(), tensor.data<T>());
  return tensor.To(device);
}

}  // namespace burst
