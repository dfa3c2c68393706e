#include "model/parameters.h"

#include <utility>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"

namespace burst {
namespace {

// init_mean + init_std * normal. Element i takes normal i % 4 of the numbers number i / 4 of the
// stream (seed, index).
template <typename T>
void Draw(uint64_t seed, int64_t index, const Parameter& parameter, T* values) {
  const int64_t n = parameter.numel();
  ParallelFor((n + 3) / 4, 1 << 12, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const PhiloxCounter bits = Philox(seed, index, i);
      const std::array<double, 2> first = NormalFromBits(bits[0], bits[1]);
      const std::array<double, 2> second = NormalFromBits(bits[2], bits[3]);
      const double normals[4] = {first[0], first[1], second[0], second[1]};
      for (int64_t j = 0; j < 4 && 4 * i + j < n; ++j) {
        values[4 * i + j] = static_cast<T>(parameter.init_mean + parameter.init_std * normals[j]);
      }
    }
  });
}

}  // namespace

int64_t Parameter::numel() const {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

int ParameterList::Add(std::string name, const Shape& shape, double init_mean, double init_std,
                       bool decay, Variable* variable) {
  BURST_CHECK(values_.null()) << "Add after Allocate";
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.shape = shape;
  parameter.init_mean = init_mean;
  parameter.init_std = init_std;
  parameter.decay = decay;
  parameter.offset = numel_;
  numel_ += parameter.numel();
  parameters_.push_back(std::move(parameter));
  targets_.push_back(variable);
  return static_cast<int>(parameters_.size()) - 1;
}

void ParameterList::Allocate(DType dtype, DeviceType device) {
  BURST_CHECK(values_.null()) << "Allocate twice";
  const bool mixed = dtype == DType::kBFloat16;
  values_ = Tensor::Zeros({numel_}, dtype, device);
  masters_ = mixed ? Tensor::Zeros({numel_}, DType::kFloat32, device) : values_;
  grads_ = Tensor::ZerosLike(masters_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const auto view = [&](const Tensor& flat) {
      return flat.Slice(0, parameter.offset, parameter.numel()).View(parameter.shape);
    };
    parameter.variable = Variable(view(values_), view(grads_));
    if (targets_[i] != nullptr) *targets_[i] = parameter.variable;
  }
  targets_.clear();
}

void ParameterList::Initialize(uint64_t seed) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    const Tensor master = masters_.Slice(0, parameter.offset, parameter.numel());
    if (parameter.init_std == 0) {
      master.Fill(parameter.init_mean);
      continue;
    }
    // Drawn on the CPU, so that every device starts from the same bits.
    const bool on_cpu = master.device() == DeviceType::kCpu;
    const Tensor drawn = on_cpu ? master : Tensor::Empty(master.shape(), master.dtype());
    DispatchFloat(drawn.dtype(), [&](auto zero) {
      using T = decltype(zero);
      Draw<T>(seed, static_cast<int64_t>(i), parameter, drawn.data<T>());
    });
    if (!on_cpu) master.CopyFrom(drawn);
  }
  RoundMasters();
}

void ParameterList::RoundMasters() {
  if (values_.dtype() != masters_.dtype()) values_.CopyFrom(masters_.To(values_.dtype()));
}

void ParameterList::ZeroGrad() {
  for (const Parameter& parameter : parameters_) parameter.variable.ZeroGrad();
}

Tensor ParameterList::grads(int64_t begin, int64_t end) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.offset < end && parameter.offset + parameter.numel() > begin) {
      (void)parameter.variable.grad();  // writes the zeros that nothing was added to
    }
  }
  return grads_.Slice(0, begin, end - begin);
}

}  // namespace burst
