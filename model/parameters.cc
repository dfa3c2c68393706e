#include "model/parameters.h"

#include <algorithm>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"

namespace burst {
namespace {

int64_t Product(const Shape& shape) {
  int64_t product = 1;
  for (int64_t size : shape) product *= size;
  return product;
}

// Calls copy(slice of `full`, slice of `shard`) for each slice of a rank's shard.
template <typename Copy>
void ForEachSlice(const Parameter& parameter, int rank, const Tensor& full, const Tensor& shard,
                  Copy copy) {
  const ParameterSharding& sharding = parameter.sharding;
  BURST_CHECK(full.shape() == parameter.full_shape && shard.shape() == parameter.ShardShape(rank))
      << parameter.name << " " << ToString(full.shape()) << ", " << ToString(shard.shape());
  if (sharding.shards.empty()) return copy(full, shard);
  int64_t at = 0;
  for (const ShardSlice& slice : sharding.shards[rank]) {
    copy(full.Slice(sharding.axis, slice.begin, slice.length),
         shard.Slice(sharding.axis, at, slice.length));
    at += slice.length;
  }
}

// The order in the flat buffers: sharded parameters come first, then the replicated ones.
int Zone(const ParameterSharding& sharding) {
  if (sharding.ranks == 1 || !sharding.shards.empty()) return 0;
  return sharding.replicated_gradient ? 1 : 2;
}
constexpr int kZones = 3;

// init_mean + init_std * normal. Element i takes normal i % 4 of the numbers number i / 4 of the
// stream (seed, index).
template <typename T>
void Draw(uint64_t seed, int64_t index, const Parameter& parameter, T* values) {
  const int64_t n = Product(parameter.full_shape);
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

int64_t Parameter::numel() const { return Product(shape); }

Shape Parameter::ShardShape(int rank) const {
  if (sharding.shards.empty()) return full_shape;
  Shape shard = full_shape;
  shard[sharding.axis] = 0;
  for (const ShardSlice& slice : sharding.shards[rank]) shard[sharding.axis] += slice.length;
  return shard;
}

void Parameter::TakeShard(int rank, const Tensor& full, const Tensor& shard) const {
  ForEachSlice(*this, rank, full, shard,
               [](const Tensor& from, const Tensor& to) { to.CopyFrom(from); });
}

void Parameter::PutShard(int rank, const Tensor& shard, const Tensor& full) const {
  ForEachSlice(*this, rank, full, shard,
               [](const Tensor& to, const Tensor& from) { to.CopyFrom(from); });
}

int ParameterList::Add(std::string name, const Shape& full_shape, double init_mean, double init_std,
                       bool decay, Variable* variable, const ParameterSharding& sharding) {
  BURST_CHECK(values_.null()) << "Add after Allocate";
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.full_shape = full_shape;
  parameter.sharding = sharding;
  parameter.shape = parameter.ShardShape(sharding.rank);
  parameter.init_mean = init_mean;
  parameter.init_std = init_std;
  parameter.decay = decay;
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
  int64_t offset = 0;
  for (int zone = 0; zone < kZones; ++zone) {
    for (Parameter& parameter : parameters_) {
      if (Zone(parameter.sharding) != zone) continue;
      parameter.offset = offset;
      offset += parameter.numel();
    }
  }
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
    const bool in_place =
        master.device() == DeviceType::kCpu && parameter.shape == parameter.full_shape;
    const Tensor drawn = in_place ? master : Tensor::Empty(parameter.full_shape, master.dtype());
    DispatchFloat(drawn.dtype(), [&](auto zero) {
      using T = decltype(zero);
      Draw<T>(seed, static_cast<int64_t>(i), parameter, drawn.data<T>());
    });
    if (in_place) continue;
    parameter.TakeShard(parameter.sharding.rank, drawn, master.View(parameter.shape));
  }
  RoundMasters();
}

std::vector<ShardRange> ParameterList::Ranges(int first, int last) const {
  std::vector<ShardRange> ranges;
  for (int i = first; i < last; ++i) {
    const Parameter& parameter = parameters_[i];
    const ParameterSharding& sharding = parameter.sharding;
    if (sharding.shards.empty()) {
      const int reduce_ranks = sharding.replicated_gradient ? 1 : sharding.ranks;
      ranges.push_back(
          {parameter.offset, parameter.offset + parameter.numel(), sharding.ranks, reduce_ranks});
      continue;
    }
    int64_t begin = parameter.offset;
    for (const ShardSlice& slice : sharding.shards[sharding.rank]) {
      // Slices of rows are ranges. Slices of columns are interleaved: one range, the whole shard.
      const bool rows = sharding.axis == 0;
      const int64_t numel =
          rows ? parameter.numel() / parameter.shape[0] * slice.length : parameter.numel();
      BURST_CHECK(rows || sharding.shards[sharding.rank].size() == 1) << parameter.name;
      ranges.push_back({begin, begin + numel, slice.replicas, slice.replicas});
      begin += numel;
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const ShardRange& a, const ShardRange& b) { return a.begin < b.begin; });
  std::vector<ShardRange> merged;
  for (const ShardRange& range : ranges) {
    if (!merged.empty() && merged.back().end == range.begin &&
        merged.back().replicas == range.replicas &&
        merged.back().reduce_ranks == range.reduce_ranks) {
      merged.back().end = range.end;
    } else {
      merged.push_back(range);
    }
  }
  return merged;
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
