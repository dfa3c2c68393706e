#include "train/optimizer/sharded_state.h"

#include <algorithm>
#include <utility>

#include "burst/base/status.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/float8_weights.h"
#include "train/optimizer/adamw.h"

namespace burst {

absl::StatusOr<std::unique_ptr<ShardedState>> ShardedState::Create(ParameterList& parameters,
                                                                   Communicator* world,
                                                                   Communicator* group) {
  std::unique_ptr<ShardedState> state(new ShardedState(parameters, world, group));
  BURST_RETURN_IF_ERROR(state->Connect());
  return state;
}

absl::Status ShardedState::Connect() {
  if (parameters_.sharding().stage < 2) {
    BURST_ASSIGN_OR_RETURN(whole_gradients_, GradientReducer::Create(parameters_, world_, group_));
  }
  gathered_.resize(parameters_.units().size());
  grads_.resize(parameters_.units().size());
  has_gradient_.resize(parameters_.units().size());
  shards_ = world_;
  if (group_ == nullptr) return absl::OkStatus();
  BURST_ASSIGN_OR_RETURN(owned_, world_->Split(group_->rank(), world_->rank()));
  shards_ = owned_.get();
  if (parameters_.sharding().stage < 2) return absl::OkStatus();
  for (const ShardRange& range : parameters_.Ranges(0, parameters_.size())) {
    const int count = range.reduce_ranks;
    if (count == 1 || neighbors_.count(count) > 0) continue;
    BURST_ASSIGN_OR_RETURN(neighbors_[count],
                           group_->Split(group_->rank() / count, group_->rank()));
  }
  return absl::OkStatus();
}

void ShardedState::set_stages(Communicator* stages, Communicator* tied) {
  stages_ = stages;
  tied_ = tied;
  if (whole_gradients_ != nullptr) whole_gradients_->set_stages(stages, tied);
}

std::vector<int64_t> ShardedState::Counts(int unit) const {
  return std::vector<int64_t>(parameters_.sharding().ranks, parameters_.units()[unit].piece);
}

// Completes the posted messages.
absl::Status ShardedState::Wait() {
  BURST_RETURN_IF_ERROR(shards_->Wait(Channel::kCollective));
  for (Gathered& unit : gathered_) unit.arrived = !unit.values.null();
  for (const Reduction& done : reductions_) {
    if (!done.added.null()) parameters_.GradPiece(done.unit).Add(done.added);
  }
  reductions_.clear();
  return absl::OkStatus();
}

// ---- Values.

absl::Status ShardedState::GatherValues() {
  if (parameters_.sharding().stage == 3) return absl::OkStatus();
  for (int unit = 0; unit < static_cast<int>(parameters_.units().size()); ++unit) {
    if (parameters_.units()[unit].piece == 0) continue;  // the unit belongs to another stage
    BURST_RETURN_IF_ERROR(shards_->PostAllGatherParts(parameters_.ValuePiece(unit), Counts(unit),
                                                      parameters_.Values(unit)));
  }
  return shards_->Wait(Channel::kCollective);
}

absl::Status ShardedState::Gather(int unit) {
  Gathered& gathered = gathered_[unit];
  if (!gathered.values.null()) return absl::OkStatus();
  if (HasFloat8(unit)) return GatherInFloat8(unit);
  gathered.values =
      Tensor::Empty({parameters_.units()[unit].numel}, parameters_.dtype(), parameters_.device());
  return shards_->PostAllGatherParts(parameters_.ValuePiece(unit), Counts(unit), gathered.values);
}

// Products in e4m3 read a weight from a multiple of 16 bytes.
bool ShardedState::TravelsInFloat8(int unit, int parameter) const {
  const int64_t at = parameters_[parameter].offset - parameters_.units()[unit].begin;
  return scales_ != nullptr && parameters_.Float8Slot(parameter) >= 0 && at % 16 == 0;
}

bool ShardedState::HasFloat8(int unit) const {
  const ParameterUnit& u = parameters_.units()[unit];
  for (int i = u.first; i < u.last; ++i) {
    if (TravelsInFloat8(unit, i)) return true;
  }
  return false;
}

// Returns where in Gathered::others each of the unit's parameters begins, and the end. Parameters
// that are not there have no length.
std::vector<int64_t> ShardedState::PlacesOfOthers(int unit) const {
  constexpr int64_t kAlign = 64;  // as pieces in the flat order
  const ParameterUnit& u = parameters_.units()[unit];
  std::vector<int64_t> places = {0};
  for (int i = u.first; i < u.last; ++i) {
    const int64_t length = TravelsInFloat8(unit, i) ? 0 : parameters_[i].numel();
    places.push_back(places.back() + (length + kAlign - 1) / kAlign * kAlign);
  }
  return places;
}

// A piece is rounded as the whole weight would be, because all ranks have its scale. Bytes of other
// parameters are sent along, so that pieces are equal; nobody reads them.
absl::Status ShardedState::GatherInFloat8(int unit) {
  const ParameterUnit& u = parameters_.units()[unit];
  const DeviceType device = parameters_.device();
  const Tensor all = Tensor::Empty({u.numel}, DType::kFloat8E4M3, device);
  gathered_[unit].values = all;
  gathered_[unit].others =
      Tensor::Empty({PlacesOfOthers(unit).back()}, parameters_.dtype(), device);
  const Tensor own = all.Slice(0, shards_->rank() * u.piece, u.piece);
  for (int i = u.first; i < u.last; ++i) {
    const ParameterPiece piece = parameters_.PieceOf(i, shards_->rank());
    if (!TravelsInFloat8(unit, i) || piece.length == 0) continue;
    BURST_GPU_KERNEL(RoundPieceToE4M3, parameters_.OwnValue(i),
                     scales_->Of(parameters_.Float8Slot(i)),
                     own.Slice(0, piece.at - u.shard_begin, piece.length));
  }
  BURST_RETURN_IF_ERROR(shards_->PostAllGatherParts(own, Counts(unit), all));
  return GatherOthers(unit);
}

// Ranks have parts of different lengths.
absl::Status ShardedState::GatherOthers(int unit) {
  const ParameterUnit& u = parameters_.units()[unit];
  const std::vector<int64_t> places = PlacesOfOthers(unit);
  const DeviceType device = parameters_.device();
  const Tensor& all = gathered_[unit].others;
  std::vector<TensorCopy> copies;
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  for (int i = u.first; i < u.last; ++i) {
    if (TravelsInFloat8(unit, i)) continue;
    const Tensor own = parameters_.OwnValue(i);
    for (int rank = 0; rank < shards_->world_size(); ++rank) {
      const ParameterPiece piece = parameters_.PieceOf(i, rank);
      const Tensor part = all.Slice(0, places[i - u.first] + piece.begin, piece.length);
      if (rank != shards_->rank()) {
        sends.push_back({own.raw_data(), own.size_bytes(), rank, device});
        receives.push_back({part.raw_data(), part.size_bytes(), rank, device});
      } else if (piece.length > 0) {
        copies.push_back({own, part});
      }
    }
  }
  CopyAll(copies);
  return shards_->Post(Channel::kCollective, sends, receives);
}

void ShardedState::Lend(int unit) {
  const Gathered& gathered = gathered_[unit];
  if (!Is8Bit(gathered.values.dtype())) return parameters_.LendValues(unit, gathered.values);
  const ParameterUnit& u = parameters_.units()[unit];
  const std::vector<int64_t> places = PlacesOfOthers(unit);
  for (int i = u.first; i < u.last; ++i) {
    const Parameter& p = parameters_[i];
    const auto part = [&](const Tensor& flat, int64_t at) {
      return flat.Slice(0, at, p.numel()).View(p.shape);
    };
    if (TravelsInFloat8(unit, i)) {
      p.variable.SetFloat8Value(part(gathered.values, p.offset - u.begin),
                                scales_->Of(parameters_.Float8Slot(i)));
    } else {
      p.variable.SetValue(part(gathered.others, places[i - u.first]));
    }
  }
}

void ShardedState::BeginPass(Tape& tape) {
  if (parameters_.sharding().stage < 3 || parameters_.float8_weights().empty()) return;
  if (scales_ == nullptr) scales_ = std::make_unique<WeightScales>(parameters_, shards_);
  const absl::Status status = scales_->Find();
  if (!status.ok()) tape.Fail(status);
}

void ShardedState::BeginValues(Tape& tape, int unit, int next) {
  if (parameters_.sharding().stage < 3) return;
  Gathered& gathered = gathered_[unit];
  absl::Status status = Gather(unit);
  if (status.ok() && !gathered.arrived) status = Wait();
  if (!std::exchange(gathered.lent, true)) Lend(unit);
  if (status.ok() && next >= 0) status = Gather(next);
  if (!status.ok()) tape.Fail(status);
}

void ShardedState::EndValues(int unit) {
  if (parameters_.sharding().stage < 3) return;
  if (gathered_[unit].lent) parameters_.ForgetValues(unit);
  gathered_[unit] = Gathered();
}

// ---- Gradients.

void ShardedState::BeginStep() {
  if (whole_gradients_ != nullptr) return whole_gradients_->BeginStep();
  has_gradient_.assign(has_gradient_.size(), false);
}

absl::Status ShardedState::Post(int first, int last) {
  return whole_gradients_ == nullptr ? absl::OkStatus() : whole_gradients_->Post(first, last);
}

void ShardedState::BeginGrads(int unit) {
  if (parameters_.sharding().stage < 2) return;
  grads_[unit] = Tensor::Empty({parameters_.units()[unit].numel}, parameters_.master_dtype(),
                               parameters_.device());
  parameters_.LendGrads(unit, grads_[unit]);
}

void ShardedState::EndGrads(Tape& tape, int unit) {
  if (parameters_.sharding().stage < 2) return;
  const Tensor all = std::exchange(grads_[unit], Tensor());
  parameters_.TakeGrads(unit, all);
  const absl::Status status = Reduce(unit, all);
  if (!status.ok()) tape.Fail(status);
}

// The call waits for the unit before. So at most two units' gradients exist at a time.
absl::Status ShardedState::Reduce(int unit, const Tensor& all) {
  BURST_RETURN_IF_ERROR(ReduceOverNeighbors(unit, all));
  BURST_RETURN_IF_ERROR(Wait());
  const Tensor own = parameters_.GradPiece(unit);
  const bool adds = has_gradient_[unit];
  has_gradient_[unit] = true;
  const Tensor added = adds ? Tensor::EmptyLike(own) : Tensor();
  reductions_.push_back({unit, all, added});
  return shards_->PostReduceScatterSum(all, Counts(unit), adds ? added : own);
}

// Each rank that owns the parameter has a part of its gradient.
absl::Status ShardedState::ReduceOverNeighbors(int unit, const Tensor& all) {
  if (group_ == nullptr) return absl::OkStatus();
  const ParameterUnit& u = parameters_.units()[unit];
  for (const ShardRange& range : parameters_.Ranges(u.first, u.last)) {
    if (range.reduce_ranks == 1) continue;
    BURST_RETURN_IF_ERROR(
        neighbors_.at(range.reduce_ranks)
            ->PostAllReduceSum(all.Slice(0, range.begin - u.begin, range.end - range.begin)));
  }
  for (const auto& [count, among] : neighbors_) {
    BURST_RETURN_IF_ERROR(among->Wait(Channel::kCollective));
  }
  return absl::OkStatus();
}

// Returns the parts of the model's gradient that this rank counts: its shard, or with tensor
// parallelism ranges of it. If several ranks of a model own a parameter, the first one counts it.
// If two stages own it, the first stage counts it. Every rank of a stage returns the same number of
// parts, some of them null.
std::vector<Tensor> ShardedState::CountedParts() const {
  std::vector<Tensor> parts;
  const auto own = [&](int64_t begin, int64_t end) {
    return parameters_.GradShard().Slice(0, begin, end - begin);
  };
  if (group_ == nullptr) {
    // The unit of a copy holds the copy alone.
    const ParameterUnit& first = parameters_.units().front();
    const bool copies = first.first < first.last && parameters_[first.first].copy;
    return {own(copies ? first.piece : 0, parameters_.shard_numel())};
  }
  for (const ParameterUnit& unit : parameters_.units()) {
    if (unit.first < unit.last && parameters_[unit.first].copy) continue;
    const int64_t piece_begin = unit.begin + parameters_.sharding().rank * unit.piece;
    for (const ShardRange& range : parameters_.Ranges(unit.first, unit.last)) {
      const int64_t begin = std::max(range.begin, piece_begin);
      const int64_t end = std::min(range.end, piece_begin + unit.piece);
      const bool counts = begin < end && group_->rank() % range.replicas == 0;
      parts.push_back(!counts ? Tensor()
                              : own(unit.shard_begin + begin - piece_begin,
                                    unit.shard_begin + end - piece_begin));
    }
  }
  return parts;
}

// Computes the norm of all ranks' parts, then the norm over the stages.
absl::Status ShardedState::Finish(const Tensor& norm) {
  if (whole_gradients_ != nullptr) return whole_gradients_->Finish(norm);
  BURST_RETURN_IF_ERROR(Wait());
  // The embeddings are a unit with the same pieces on both stages.
  if (tied_ != nullptr) BURST_RETURN_IF_ERROR(tied_->AllReduceSum(parameters_.GradPiece(0)));
  const std::vector<Tensor> parts = CountedParts();
  const int64_t count = static_cast<int64_t>(parts.size());
  const Tensor norms =
      Tensor::Zeros({world_->world_size() * count}, DType::kFloat64, norm.device());
  for (int64_t i = 0; i < count; ++i) {
    if (!parts[i].null()) L2Norm(parts[i], norms.Slice(0, world_->rank() * count + i, 1));
  }
  BURST_RETURN_IF_ERROR(world_->AllReduceSum(norms));
  L2Norm(norms, norm);
  return stages_ == nullptr ? absl::OkStatus() : NormOfStages(stages_, norm);
}

}  // namespace burst
