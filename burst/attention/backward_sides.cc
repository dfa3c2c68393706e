#include "burst/attention/backward_sides.h"

#include <algorithm>
#include <cstdint>

#include "burst/attention/kernel_calls.h"

namespace burst {
namespace {

// Adds `addend` to the given rows of a block.
void AddToRows(const Tensor& addend, const Tensor& block, int axis,
               const std::vector<BlockRows>& rows) {
  const Tensor sum = TakeRows(block, axis, rows);
  sum.Add(addend);
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (const BlockRows& range : rows) {
    copies.push_back(
        {sum.Slice(axis, at, range.count), block.Slice(axis, range.begin, range.count)});
    at += range.count;
  }
  CopyAll(copies);
}

}  // namespace

GradientSum::GradientSum(const Tensor& result, bool one_call) : result_(result) {
  const DType sum_dtype = SumDType(result.dtype());
  const bool in_place = one_call || (result.dtype() == sum_dtype && result.is_contiguous());
  sum_ = in_place ? result : Tensor::Empty(result.shape(), sum_dtype, result.device());
}

bool GradientSum::KernelsConvert() const {
  return Is16Bit(result_.dtype()) && result_.is_contiguous() &&
         reinterpret_cast<uintptr_t>(result_.raw_data()) % 16 == 0;
}

void GradientSum::Finish(const Tensor& arrived) const {
  if (sum_.raw_data() != result_.raw_data()) {
    FlashConvert(sum_, result_, arrived);
  } else if (!arrived.null()) {
    sum_.Add(arrived);
  }
}

BackwardSide::BackwardSide(int rank, const Ring::Block& block,
                           std::initializer_list<Tensor> results, bool one_call, bool clears)
    : rank_(rank), block_(block), one_call_(one_call) {
  for (const Tensor& result : results) gradients_.emplace_back(result, one_call);
  if (!clears) return;
  for (const GradientSum& gradient : gradients_) gradient.sum().Fill(0);
}

void BackwardSide::LetKernelsConvert() {
  kernels_convert_ =
      std::all_of(gradients_.begin(), gradients_.end(),
                  [](const GradientSum& gradient) { return gradient.KernelsConvert(); });
}

SideOfStep BackwardSide::OfStep() const {
  SideOfStep side = {rank_, {}, {}, {}};
  for (const Ring::BlockTensor& input : block_) side.inputs.push_back(input.tensor);
  for (const GradientSum& gradient : gradients_) {
    side.sums.push_back(one_call_ ? Tensor() : gradient.sum());
    side.results.push_back(one_call_ || kernels_convert_ ? gradient.result() : Tensor());
  }
  return side;
}

void BackwardSide::Finish(const Ring::Tensors& arrived) const {
  if (kernels_convert_) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    gradients_[i].Finish(arrived.empty() ? Tensor() : arrived[i]);
  }
}

TravelingSide::TravelingSide(const BackwardSide* own, const RingRoute& route,
                             const std::vector<BlockRows>* rows, DType in_transit)
    : own_(*own), rank_(route.rank), rows_(rows), sent_(own->block()) {
  if (route.lengths.size() > 1) sent_ = BlockForSending(sent_, rows);
  gradients_.in_transit = in_transit;
  for (const GradientSum& gradient : own->gradients()) {
    Tensor returning = gradient.sum();
    if (rows != nullptr) {
      Shape shape = returning.shape();
      shape[kSeqAxis] = route.lengths[rank_];
      returning = Tensor::Zeros(shape, returning.dtype(), returning.device());
    }
    gradients_.own.push_back({returning, kSeqAxis});
  }
}

SideOfStep TravelingSide::OfStep(int source, const Ring::Tensors& visiting,
                                 const Ring::Sums& sums) const {
  if (source != rank_) {
    return {source, visiting, sums.tensors, Ring::Tensors(sums.tensors.size()), sums.first};
  }
  SideOfStep side = own_.OfStep();
  if (rows_ == nullptr) side.inputs = visiting;  // contiguous
  return side;
}

// If the ring returns gradients of some rows only, they are added to the full gradients at the end.
void TravelingSide::Finish() {
  if (rows_ != nullptr) {
    for (size_t i = 0; i < gradients_.own.size(); ++i) {
      const Tensor& returned = gradients_.own[i].tensor;
      if (!gradients_.last.empty()) returned.Add(gradients_.last[i]);
      if (returned.numel() > 0) {
        AddToRows(returned, own_.gradients()[i].sum(), kSeqAxis, *rows_);
      }
    }
    gradients_.last.clear();
  }
  own_.Finish(gradients_.last);
}

}  // namespace burst
