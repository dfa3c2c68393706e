#include "burst/attention/cached_attention.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {

CachedAttention::CachedAttention(const std::vector<int32_t>& positions, bool has_newest,
                                 int64_t begin, int64_t n, int64_t window, double softcap,
                                 DeviceType device, Communicator* ranks)
    : softcap_(softcap), ranks_(ranks != nullptr && ranks->world_size() > 1 ? ranks : nullptr) {
  const int64_t older = static_cast<int64_t>(positions.size());
  // Counts this rank's keys at positions below `position`.
  const auto keys_below = [&](int64_t position) {
    const auto found = std::lower_bound(positions.begin(), positions.end(), position);
    const int64_t newest = has_newest ? std::max<int64_t>(0, position - begin) : 0;
    return static_cast<int32_t>(found - positions.begin() + newest);
  };
  std::vector<int32_t> visible(2 * n, 0);
  for (int64_t i = 0; i < n; ++i) {
    if (window > 0) visible[i] = keys_below(std::max<int64_t>(0, begin + i + 1 - window));
    visible[n + i] = has_newest ? static_cast<int32_t>(older + i + 1) : static_cast<int32_t>(older);
  }
  visible_ = Tensor::FromVector<int32_t>(visible, {2, n}, device);
}

absl::StatusOr<Tensor> CachedAttention::Forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                const Tensor& given_sinks) const {
  const int64_t batch = q.dim(0), n = q.dim(1), heads = q.dim(2), value_dim = v.dim(3);
  const int64_t rows = batch * n * heads;
  const HeadWidths widths = {q.dim(3), value_dim};
  const AttentionKernels& kernels = KernelsOf(q.device());
  BURST_RETURN_IF_ERROR(kernels.Check(q.device(), q.dtype(), widths));
  if (softcap_ != 0 && !kernels.ChangesScores(q.dtype(), widths)) {
    return absl::InvalidArgumentError(absl::StrCat("softcap: the attention kernels of ",
                                                   Name(q.device()), " do not change scores of ",
                                                   Name(q.dtype()), " with ", ToString(widths)));
  }
  const Tensor out = Tensor::Empty({batch, n, heads, value_dim}, q.dtype(), q.device());
  const DType sum_dtype = SumDType(q.dtype());
  const Tensor sinks = given_sinks.null() ? Tensor() : given_sinks.To(sum_dtype);
  const auto* begin = static_cast<const int32_t*>(visible_.raw_data());
  FlashForwardParams params;
  params.shape.batch = batch;
  params.shape.q_len = n;
  params.shape.k_len = k.dim(1);
  params.shape.num_heads = heads;
  params.shape.num_kv_heads = k.dim(2);
  params.shape.head_dim = widths.head_dim;
  params.shape.value_dim = value_dim;
  params.shape.softmax_scale = 1 / std::sqrt(static_cast<double>(widths.head_dim));
  params.shape.dtype = q.dtype();
  params.shape.scores.softcap = softcap_;
  params.shape.visible = {begin, begin + n, /*batch_stride=*/0};
  params.q = Operand(q);
  params.k = Operand(k);
  params.v = Operand(v);
  if (ranks_ == nullptr) {
    const Tensor lse = Tensor::Empty({rows}, sum_dtype, q.device());
    params.out = Operand(out);
    params.lse = lse.raw_data();
    if (!sinks.null()) params.sinks = sinks.raw_data();
    params.out_dtype = out.dtype();
    kernels.Forward(params);
    return out;
  }
  // The buffer holds out and lse of each rank's part. Each begins where kernels can store vectors.
  constexpr int64_t kAlign = 32;
  const int64_t count = (rows * (value_dim + 1) + kAlign - 1) / kAlign * kAlign;
  const int64_t ranks = ranks_->world_size();
  const Tensor parts = Tensor::Empty({ranks, count}, sum_dtype, q.device());
  const Tensor own = parts.Slice(0, ranks_->rank(), 1).View({count});
  const Tensor own_out = own.Slice(0, 0, rows * value_dim).View(out.shape());
  params.out = Operand(own_out);
  params.lse = own.Slice(0, rows * value_dim, rows).raw_data();
  params.out_dtype = sum_dtype;
  kernels.Forward(params);
  const std::vector<int64_t> counts(ranks, count);
  BURST_RETURN_IF_ERROR(ranks_->PostAllGatherParts(own, counts, parts.View({ranks * count})));
  BURST_RETURN_IF_ERROR(ranks_->Wait(Channel::kCollective));
  FlashMerge(parts, out, sinks);
  return out;
}

}  // namespace burst
