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

// Returns the parameter's zone in the flat buffers: sharded parameters come before replicated ones.
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

Tensor Parameter::OwnShard(const Tensor& full) const {
  if (sharding.shards.empty()) return full;
  const Tensor shard = Tensor::Empty(shape, full.dtype());
  TakeShard(sharding.rank, full, shard);
  return shard;
}

void ParameterList::Add(std::string name, const Shape& full_shape, double init_mean,
                        double init_std, bool decay, Variable* variable,
                        const ParameterSharding& sharding) {
  BURST_CHECK(!allocated_) << "Add after Allocate";
  const int64_t number = added_++;
  if (elsewhere_) return;
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.number = number;
  parameter.full_shape = full_shape;
  parameter.sharding = sharding;
  parameter.shape = parameter.ShardShape(sharding.rank);
  parameter.init_mean = init_mean;
  parameter.init_std = init_std;
  parameter.decay = decay;
  numel_ += parameter.numel();
  parameters_.push_back(std::move(parameter));
  targets_.push_back(variable);
}

// Makes one unit, unless gradients are divided while they are computed. Then units end as EndUnit
// says.
void ParameterList::MakeUnits() {
  // A piece begins where a GPU can make vectorized loads, in every unit.
  constexpr int64_t kAlign = 64;
  // A parameter begins there, too. Parameters that are not whole vectors of 16 bytes come after the
  // others.
  constexpr int64_t kVector = 8;
  std::vector<int> ends = {size()};
  if (sharding_.stage >= 2 && !unit_ends_.empty()) ends = unit_ends_;
  BURST_CHECK_EQ(ends.back(), size()) << "parameters after the last EndUnit";
  int first = 0;
  int64_t begin = 0;
  for (const int last : ends) {
    ParameterUnit unit{first, last, begin, 0, 0, shard_numel_};
    int64_t numel = 0;
    for (int zone = 0; zone < 2 * kZones; ++zone) {
      for (int i = first; i < last; ++i) {
        Parameter& parameter = parameters_[i];
        const bool in_vectors = parameter.numel() % kVector == 0;
        if (Zone(parameter.sharding) + (in_vectors ? 0 : kZones) != zone) continue;
        parameter.offset = begin + numel;
        numel += parameter.numel();
      }
    }
    const int64_t ranks = sharding_.ranks, align = sharding_.stage > 0 ? kAlign : 1;
    unit.piece = ((numel + ranks - 1) / ranks + align - 1) / align * align;
    unit.numel = ranks * unit.piece;
    units_.push_back(unit);
    shard_numel_ += unit.piece;
    begin += unit.numel;
    first = last;
  }
}

void ParameterList::Allocate(DType dtype, DeviceType device, const StateSharding& sharding) {
  BURST_CHECK(!allocated_) << "Allocate twice";
  BURST_CHECK(sharding.stage > 0 || sharding.ranks == 1);
  BURST_CHECK(sharding.stage == 0 || !sharding.values_alone);
  allocated_ = true;
  dtype_ = dtype;
  device_ = device;
  sharding_ = sharding;
  MakeUnits();
  const int stage = sharding.stage;
  const int64_t whole = units_.back().begin + units_.back().numel;
  const DType master = master_dtype();
  values_ = Tensor::Zeros({stage < 3 ? whole : shard_numel_}, dtype, device);
  const bool alone = sharding.values_alone;
  if (!alone) grads_ = Tensor::Zeros({stage < 2 ? whole : shard_numel_}, master, device);
  if (master == dtype) {
    if (stage == 0 || stage == 3) masters_ = values_;
  } else if (!alone) {
    masters_ = sharding.optimizer_on_host ? Tensor::ZerosOnHost({shard_numel_}, master, device)
                                          : Tensor::Zeros({shard_numel_}, master, device);
  }
  for (const ParameterUnit& unit : units_) {
    for (int i = unit.first; i < unit.last; ++i) {
      Parameter& parameter = parameters_[i];
      const auto view = [&](const Tensor& flat, bool divided) {
        if (divided) return Tensor::Null(parameter.shape, flat.dtype(), device);
        return flat.Slice(0, parameter.offset, parameter.numel()).View(parameter.shape);
      };
      const Tensor value = view(values_, stage >= 3);
      parameter.variable = alone ? Variable(value) : Variable(value, view(grads_, stage >= 2));
      if (targets_[i] != nullptr) *targets_[i] = parameter.variable;
    }
  }
  targets_.clear();
}

void ParameterList::Initialize(uint64_t seed) {
  for (int i = 0; i < size(); ++i) {
    const Parameter& parameter = parameters_[i];
    // The CPU draws the values, so that every device starts from the same bits.
    const bool in_place = sharding_.stage == 0 && device_ == DeviceType::kCpu &&
                          dtype_ == master_dtype() && parameter.shape == parameter.full_shape;
    const Tensor drawn =
        in_place ? Masters(i) : Tensor::Empty(parameter.full_shape, master_dtype());
    if (parameter.init_std == 0) {
      drawn.Fill(parameter.init_mean);
    } else {
      DispatchFloat(drawn.dtype(), [&](auto zero) {
        using T = decltype(zero);
        Draw<T>(seed, parameter.number, parameter, drawn.data<T>());
      });
    }
    if (!in_place) Set(i, parameter.OwnShard(drawn));
  }
}

// ---- The buffers and their pieces.

Tensor ParameterList::values() const {
  BURST_CHECK_LT(sharding_.stage, 3);
  return values_.Slice(0, 0, numel_);
}

const Tensor& ParameterList::masters() const {
  BURST_CHECK(has_masters());
  return masters_;
}

ParameterList::KeptBytes ParameterList::kept_bytes() const {
  if (sharding_.values_alone) return {values_.size_bytes(), 0, 0, 0};
  const int64_t masters = dtype_ != master_dtype() ? masters_.size_bytes() : 0;
  const bool on_host = sharding_.optimizer_on_host;
  const int64_t sums = exact_sums_.null() ? 0 : exact_sums_.size_bytes();
  return {values_.size_bytes(), grads_.size_bytes() + sums, on_host ? 0 : masters,
          on_host ? masters : 0};
}

ParameterPiece ParameterList::PieceOf(int index, int rank) const {
  const Parameter& parameter = parameters_[index];
  const auto unit = std::partition_point(units_.begin(), units_.end(),
                                         [&](const ParameterUnit& u) { return u.last <= index; });
  const int64_t piece_begin = unit->begin + rank * unit->piece;
  const int64_t begin = std::max(parameter.offset, piece_begin);
  const int64_t end = std::min(parameter.offset + parameter.numel(), piece_begin + unit->piece);
  if (begin >= end) return {};
  return {begin - parameter.offset, end - begin, unit->shard_begin + begin - piece_begin};
}

Tensor ParameterList::MasterPiece(int unit) const {
  if (masters_.null()) return ValuePiece(unit);
  return masters_.Slice(0, units_[unit].shard_begin, units_[unit].piece);
}

Tensor ParameterList::ValuePiece(int unit) const {
  const ParameterUnit& u = units_[unit];
  return values_.Slice(0, sharding_.stage < 3 ? u.begin + sharding_.rank * u.piece : u.shard_begin,
                       u.piece);
}

Tensor ParameterList::GradPiece(int unit) const {
  const ParameterUnit& u = units_[unit];
  if (sharding_.stage >= 2) return grads_.Slice(0, u.shard_begin, u.piece);
  (void)grads();  // writes the zeros that nothing was added to
  return grads_.Slice(0, u.begin + sharding_.rank * u.piece, u.piece);
}

const Tensor& ParameterList::GradShard() const {
  BURST_CHECK_GE(sharding_.stage, 2);
  return grads_;
}

Tensor ParameterList::Values(int unit) const {
  BURST_CHECK_LT(sharding_.stage, 3);
  return values_.Slice(0, units_[unit].begin, units_[unit].numel);
}

Tensor ParameterList::Masters(int index) const {
  const ParameterPiece piece = PieceOf(index, sharding_.rank);
  return masters_.null() ? OwnValue(index) : masters_.Slice(0, piece.at, piece.length);
}

Tensor ParameterList::OwnValue(int index) const {
  const ParameterPiece piece = PieceOf(index, sharding_.rank);
  const int64_t at = sharding_.stage < 3 ? parameters_[index].offset + piece.begin : piece.at;
  return values_.Slice(0, at, piece.length);
}

int ParameterList::Float8Slot(int index) const {
  const auto at = std::find(float8_weights_.begin(), float8_weights_.end(), index);
  return at == float8_weights_.end() ? -1 : static_cast<int>(at - float8_weights_.begin());
}

void ParameterList::Set(int index, const Tensor& value) {
  const Parameter& parameter = parameters_[index];
  BURST_CHECK(value.shape() == parameter.shape && value.dtype() == master_dtype());
  const Tensor flat = value.Contiguous().View({-1});
  const ParameterPiece piece = PieceOf(index, sharding_.rank);
  if (!masters_.null()) Masters(index).CopyFrom(flat.Slice(0, piece.begin, piece.length));
  const bool rounded = dtype_ != master_dtype();
  if (sharding_.stage == 1 || sharding_.stage == 2) {
    const Tensor values = parameter.variable.value().View({-1});
    rounded ? values.ConvertFrom(flat.To(device_)) : values.CopyFrom(flat);
  } else if (rounded) {
    const Tensor own = flat.Slice(0, piece.begin, piece.length);
    values_.Slice(0, piece.at, piece.length)
        .ConvertFrom(masters_.null() ? own.To(device_) : Masters(index).To(device_));
  }
}

Tensor ParameterList::ExchangeValues(const Tensor& values) {
  BURST_CHECK(values.shape() == values_.shape() && values.dtype() == values_.dtype());
  for (const Parameter& p : parameters_) {
    if (sharding_.stage == 3) break;  // the variables have no values between passes
    p.variable.ForgetValue();
    p.variable.SetValue(values.Slice(0, p.offset, p.numel()).View(p.shape));
  }
  return std::exchange(values_, values);
}

Tensor ParameterList::PartOf(const Tensor& flat, const ParameterUnit& unit,
                             const Parameter& parameter) const {
  return flat.Slice(0, parameter.offset - unit.begin, parameter.numel()).View(parameter.shape);
}

void ParameterList::LendValues(int unit, const Tensor& flat) const {
  for (int i = units_[unit].first; i < units_[unit].last; ++i) {
    parameters_[i].variable.SetValue(PartOf(flat, units_[unit], parameters_[i]));
  }
}

void ParameterList::ForgetValues(int unit) const {
  for (int i = units_[unit].first; i < units_[unit].last; ++i) {
    parameters_[i].variable.ForgetValue();
  }
}

void ParameterList::LendGrads(int unit, const Tensor& flat) const {
  for (int i = units_[unit].first; i < units_[unit].last; ++i) {
    parameters_[i].variable.LendGrad(PartOf(flat, units_[unit], parameters_[i]));
  }
}

void ParameterList::TakeGrads(int unit, const Tensor& flat) const {
  int64_t used = 0;
  for (int i = units_[unit].first; i < units_[unit].last; ++i) {
    (void)parameters_[i].variable.grad();
    parameters_[i].variable.ForgetGrad();
    used += parameters_[i].numel();
  }
  flat.Slice(0, used, units_[unit].numel - used).Fill(0);
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
      // Slices of rows are ranges. Slices of columns are interleaved, so there is one range, the
      // whole shard.
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
  if (values_.dtype() == masters().dtype()) return;
  for (const Parameter& p : parameters_) {  // one at a time, for masters that are on the host
    const Tensor masters = masters_.Slice(0, p.offset, p.numel());
    values_.Slice(0, p.offset, p.numel()).ConvertFrom(masters.To(device_));
  }
}

void ParameterList::ZeroGrad() {
  BURST_CHECK_LT(sharding_.stage, 2);
  for (const Parameter& parameter : parameters_) parameter.variable.ZeroGrad();
  sum_is_zero_.assign(sum_is_zero_.size(), true);
}

void ParameterList::SumGradsExactly(const ExactGrid& grid) {
  BURST_CHECK(allocated_ && sharding_.stage < 2);
  exact_sums_ = Tensor::Empty({numel_}, DType::kFloat64, device_);
  sum_is_zero_.resize(parameters_.size());
  exact_grid_ = grid;
  ZeroGrad();
}

void ParameterList::AddGradsToSums() const {
  for (int i = 0; i < size(); ++i) {
    const Parameter& p = parameters_[i];
    if (p.variable.grad_is_zero()) continue;
    AddExactly(p.variable.grad(), exact_grid_, exact_sums_.Slice(0, p.offset, p.numel()),
               /*assign=*/sum_is_zero_[i]);
    sum_is_zero_[i] = false;
    p.variable.ZeroGrad();
  }
}

Tensor ParameterList::exact_sums(int64_t begin, int64_t end) const {
  for (int i = 0; i < size(); ++i) {
    const Parameter& p = parameters_[i];
    if (!sum_is_zero_[i] || p.offset >= end || p.offset + p.numel() <= begin) continue;
    exact_sums_.Slice(0, p.offset, p.numel()).Fill(0);
    sum_is_zero_[i] = false;
  }
  return exact_sums_.Slice(0, begin, end - begin);
}

void ParameterList::RoundSums() const {
  for (const Parameter& p : parameters_) {
    bool add = false;
    const Tensor gradient = p.variable.GradToWrite(&add).View({-1});
    gradient.ConvertFrom(exact_sums(p.offset, p.offset + p.numel()));
  }
}

Tensor ParameterList::grads(int64_t begin, int64_t end) const {
  BURST_CHECK_LT(sharding_.stage, 2);
  for (const Parameter& parameter : parameters_) {
    if (parameter.offset < end && parameter.offset + parameter.numel() > begin) {
      (void)parameter.variable.grad();  // writes the zeros that nothing was added to
    }
  }
  return grads_.Slice(0, begin, end - begin);
}

}  // namespace burst
