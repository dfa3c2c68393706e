#include "burst/kernels/gpu/flash_attention_gpu.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/elementwise.h"
#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/kernels/gpu/sm80/flash_attention_sm80.h"
#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"
#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/limits.h"

namespace burst {
namespace cuda {
namespace {

using MaybeFamily = std::optional<KernelFamily>;

constexpr DType kFloat = DType::kFloat32;

// ---- What a call must satisfy.

void CheckShape(const FlashAttentionShape& shape) {
  constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max() - 1024;
  BURST_CHECK(shape.q_len <= kMaxLength && shape.k_len <= kMaxLength)
      << "attention on a GPU takes up to " << kMaxLength << " tokens, not " << shape.q_len
      << " queries and " << shape.k_len << " keys";
  BURST_CHECK(shape.head_dim > 0 && shape.value_dim > 0) << ToString(shape.widths());
  BURST_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0)
      << shape.num_kv_heads << " KV heads do not divide " << shape.num_heads << " query heads";
  BURST_CHECK((shape.visible.begin == nullptr) == (shape.visible.end == nullptr))
      << "a mask needs both begin and end";
  BURST_CHECK(shape.visible.begin != nullptr || !shape.visible.documents)
      << "only ranges of keys have documents";
  BURST_CHECK(shape.visible.begin == nullptr || shape.blocks.key_begin == nullptr)
      << "a mask is ranges or lists of blocks, not both";
}

// Checks an operand of the kernels for tensor cores, which read 16 bytes at a time. The stride of a
// dimension of size one is never used.
void CheckOperand(const char* name, const AttentionOperand& operand, DType dtype, int64_t batch,
                  int64_t seqlen, int64_t heads) {
  const int64_t elements = 16 / SizeOf(dtype);
  const auto fits = [=](int64_t size, int64_t stride) {
    return size <= 1 || stride % elements == 0;
  };
  BURST_CHECK(reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&
              fits(batch, operand.batch_stride) && fits(seqlen, operand.seq_stride) &&
              fits(heads, operand.head_stride))
      << name << ": the rows of " << Name(dtype)
      << " tensors must begin at multiples of 16 bytes in attention on tensor cores";
}

// Checks the inputs of attention on tensor cores.
void CheckInputs(const FlashAttentionShape& s, const AttentionOperand& q, const AttentionOperand& k,
                 const AttentionOperand& v) {
  BURST_CHECK(s.softmax_scale > 0) << Name(s.dtype) << " attention needs a positive softmax_scale";
  CheckOperand("q", q, s.dtype, s.batch, s.q_len, s.num_heads);
  CheckOperand("k", k, s.dtype, s.batch, s.k_len, s.num_kv_heads);
  CheckOperand("v", v, s.dtype, s.batch, s.k_len, s.num_kv_heads);
}

void CheckCall(const FlashForwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  CheckShape(s);
  BURST_CHECK(params.sinks == nullptr || !params.merge) << "sinks are for the first call";
  if (!Is16Bit(s.dtype)) {
    BURST_CHECK(params.sum.data == nullptr) << Name(s.dtype) << " is merged in place";
    return;
  }
  CheckInputs(s, params.q, params.k, params.v);
  const auto strides = [](const AttentionOperand& x) {
    return std::array<int64_t, 3>{x.batch_stride, x.seq_stride, x.head_stride};
  };
  BURST_CHECK(params.rows.last == nullptr ||
              (params.sum.data != nullptr && strides(params.sum) == strides(params.out)))
      << "rows need a sum with the strides of out";
  BURST_CHECK(params.out_dtype == s.dtype || params.out_dtype == kFloat)
      << "out is " << Name(params.out_dtype) << ", q is " << Name(s.dtype);
  CheckOperand("out", params.out, params.out_dtype, s.batch, s.q_len, s.num_heads);
  if (params.sum.data != nullptr) {
    CheckOperand("sum", params.sum, kFloat, s.batch, s.q_len, s.num_heads);
  } else if (params.merge) {
    BURST_CHECK(params.out_dtype == kFloat) << "merging needs a float32 sum";
  }
}

void CheckTarget(const char* name, const GradientTarget& target, const FlashAttentionShape& s,
                 int64_t length, int64_t heads) {
  const bool ends = target.assigned() || !target.last.empty();
  if (ends) CheckOperand(name, target.result, s.dtype, s.batch, length, heads);
  if (!target.assigned()) CheckOperand(name, target.sum, kFloat, s.batch, length, heads);
}

void CheckCall(const FlashBackwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  CheckShape(s);
  if (!Is16Bit(s.dtype)) {
    BURST_CHECK(params.dk.last.empty()) << Name(s.dtype) << " gradients are added up in place";
    return;
  }
  CheckInputs(s, params.q, params.k, params.v);
  CheckOperand("dout", params.dout, s.dtype, s.batch, s.q_len, s.num_heads);
  BURST_CHECK(params.dq.last.empty()) << "dQ is converted by another kernel";
  CheckTarget("dq", params.dq, s, s.q_len, s.num_heads);
  CheckTarget("dk", params.dk, s, s.k_len, s.num_kv_heads);
  CheckTarget("dv", params.dv, s, s.k_len, s.num_kv_heads);
}

// ---- The choice.

bool Serves(KernelFamily family, DType dtype, const HeadWidths& widths) {
  const int capability = CurrentContext().compute_capability;
  switch (family) {
    case KernelFamily::kSimt:
      return (dtype == kFloat || dtype == DType::kFloat64) && WideKernelsServe(widths) &&
             simt::Fits(dtype, widths);
    case KernelFamily::kSm80:
    case KernelFamily::kDecode:
      return Is16Bit(dtype) && widths.equal() && k16BitHeadDims.Has(widths.head_dim) &&
             capability >= 80;
    case KernelFamily::kSm90:
      return Is16Bit(dtype) && HopperKernelsServe(widths) && capability == 90 &&
             SharedMemoryPerBlock() >= sm90::kSharedBytes;
  }
  return false;
}

// Returns the best kernels for the calling thread's GPU, or `only`. Returns null when they do not
// serve such tensors; NotServed gives the reason.
MaybeFamily FamilyFor(MaybeFamily only, DType dtype, const HeadWidths& widths) {
  if (only) return Serves(*only, dtype, widths) ? only : MaybeFamily();
  for (KernelFamily family : {KernelFamily::kSimt, KernelFamily::kSm90, KernelFamily::kSm80}) {
    if (Serves(family, dtype, widths)) return family;
  }
  return {};
}

std::string NotServed(DType dtype, const HeadWidths& widths) {
  std::ostringstream text;
  text << "no attention kernel for " << Name(dtype) << " with " << ToString(widths)
       << " on a GPU of compute capability " << CurrentContext().compute_capability / 10.0
       << " with " << SharedMemoryPerBlock() / 1024
       << " KB of shared memory a block: float32 goes up to " << kWideHeadDims.most
       << ", float64 too where a block has 131 KB, else to 128; bfloat16 and float16 need a "
          "multiple "
       << "of " << k16BitHeadDims.multiple << " up to " << k16BitHeadDims.most << " and 8.0";
  if (!widths.equal()) {
    text << "; if v has another width, they need 9.0, a head_dim up to " << kHeadDimsOfTwo.most
         << " and a value_dim up to " << kValueDimsOfTwo.most;
  }
  return text.str();
}

// Returns whether the kernels that serve such tensors take FlashAttentionShape::blocks.
bool TakesBlocks(MaybeFamily only, DType dtype, const HeadWidths& widths) {
  return FamilyFor(only, dtype, widths) == KernelFamily::kSm90;
}

// Returns whether the kernels that serve such tensors take FlashForwardParams::fp8.
bool TakesFp8(MaybeFamily only, DType dtype, const HeadWidths& widths) {
  return TakesBlocks(only, dtype, widths) && Fp8KernelsServe(widths);
}

// Returns whether the kernels that serve such tensors, without lists of blocks and fp8, take
// FlashAttentionShape::scores and FlashForwardParams::max_logits.
bool ChangesScores(MaybeFamily only, DType dtype, const HeadWidths& widths) {
  return only != KernelFamily::kSm90 && only != KernelFamily::kDecode &&
         Serves(Is16Bit(dtype) ? KernelFamily::kSm80 : KernelFamily::kSimt, dtype, widths);
}

// changed: whether scores are changed or the largest is asked for. Ampere's kernels serve such
// calls on Hopper, too.
KernelFamily ServedBy(MaybeFamily only, const FlashAttentionShape& shape, bool changed) {
  MaybeFamily family = FamilyFor(only, shape.dtype, shape.widths());
  BURST_CHECK(family.has_value()) << NotServed(shape.dtype, shape.widths());
  BURST_CHECK(!changed || ChangesScores(only, shape.dtype, shape.widths()))
      << "the attention kernels for Hopper and for few queries do not change scores";
  if (changed && *family == KernelFamily::kSm90) family = KernelFamily::kSm80;
  BURST_CHECK(shape.blocks.key_begin == nullptr || *family == KernelFamily::kSm90)
      << "only the kernels for Hopper take lists of blocks, and they do not change scores";
  return *family;
}

// Returns whether sm80::Decode serves the forward: it has few queries and enough keys. The other
// kernels read K and V once for every head, in tiles that are mostly empty. Their time grows with
// the heads, the time of Decode with the rows, but it starts later (docs/kernels-notebook.md).
bool IsDecoding(const FlashAttentionShape& shape) {
  if (!Is16Bit(shape.dtype) || shape.q_len > 16 || shape.blocks.key_begin != nullptr ||
      !shape.widths().equal()) {
    return false;
  }
  const int64_t heads_per_kv = shape.num_heads / shape.num_kv_heads;
  return shape.k_len * heads_per_kv >= std::max<int64_t>(256, 64 * shape.q_len);
}

// ---- The calls, with their scratch memory.

// Returns `count` words of memory; null for none.
Tensor Words(int64_t count) {
  return count == 0 ? Tensor() : Tensor::Empty({count}, DType::kInt32, DeviceType::kCuda);
}
// Returns counters, set to zero, that the blocks of a kernel share.
Tensor Counters(int64_t count) {
  return count == 0 ? Tensor() : Tensor::Zeros({count}, DType::kInt32, DeviceType::kCuda);
}
int32_t* DataOf(const Tensor& words) {
  return words.null() ? nullptr : static_cast<int32_t*>(words.raw_data());
}

Tensor Floats(int64_t count) {
  return count == 0 ? Tensor() : Tensor::Empty({count}, kFloat, DeviceType::kCuda);
}
float* FloatsOf(const Tensor& floats) {
  return floats.null() ? nullptr : static_cast<float*>(floats.raw_data());
}

// Sets these heads of fp32 [batch, q_len, num_heads, head_dim] to zero.
void ClearHeads(const FlashAttentionShape& shape, const AttentionOperand& dq,
                const HeadRange& heads) {
  if (heads.empty() || shape.batch == 0 || shape.q_len == 0) return;
  BURST_CHECK(shape.num_heads == 1 || dq.head_stride == shape.head_dim)
      << "the heads of a sum of dq must lie one after the other";
  const int64_t row_bytes = dq.seq_stride * SizeOf(kFloat);
  const int64_t bytes = (heads.end - heads.begin) * shape.head_dim * SizeOf(kFloat);
  for (int64_t b = 0; b < shape.batch; ++b) {
    float* first =
        static_cast<float*>(dq.data) + b * dq.batch_stride + heads.begin * dq.head_stride;
    if (bytes == row_bytes) {
      // Clears rows without gaps in one call.
      const bool all = dq.batch_stride == shape.q_len * dq.seq_stride;
      const int64_t rows = all ? shape.batch * shape.q_len : shape.q_len;
      BURST_CUDA_CHECK(cudaMemsetAsync(first, 0, rows * row_bytes, CurrentStream()));
      if (all) return;
    } else {
      BURST_CUDA_CHECK(cudaMemset2DAsync(first, row_bytes, 0, bytes, shape.q_len, CurrentStream()));
    }
  }
}

void Decode(const FlashForwardParams& params) {
  const int parts = sm80::DecodeParts(params.shape);
  const Tensor scratch = Floats(sm80::DecodeScratch(params.shape, parts));
  const Tensor counters = Counters(sm80::ForwardCounters(params));
  sm80::Decode(params, parts, FloatsOf(scratch), DataOf(counters));
}

void Fp8Forward(const FlashForwardParams& params) {
  const Tensor counters = Counters(sm90::ForwardCounters(params));
  const Tensor scratch =
      Tensor::Empty({sm90::Fp8Scratch(params) / 4}, DType::kInt32, DeviceType::kCuda);
  sm90::Fp8Forward(params, DataOf(counters), static_cast<uint8_t*>(scratch.raw_data()));
}

void Forward(MaybeFamily only, const FlashForwardParams& params) {
  const bool changed = params.shape.scores.any() || params.max_logits != nullptr;
  const KernelFamily family = ServedBy(only, params.shape, changed);
  CheckCall(params);
  if (params.fp8) {
    BURST_CHECK(!changed) << "attention in fp8 does not change scores";
    BURST_CHECK(TakesFp8(only, params.shape.dtype, params.shape.widths()))
        << "no attention in fp8 for " << Name(params.shape.dtype) << " with "
        << ToString(params.shape.widths());
    return Fp8Forward(params);
  }
  if (family == KernelFamily::kDecode || (!only && !changed && IsDecoding(params.shape))) {
    return Decode(params);
  }
  if (family == KernelFamily::kSimt) return simt::Forward(params);
  const bool ampere = family == KernelFamily::kSm80;
  const Tensor counters =
      Counters(ampere ? sm80::ForwardCounters(params) : sm90::ForwardCounters(params));
  ampere ? sm80::Forward(params, DataOf(counters)) : sm90::Forward(params, DataOf(counters));
}

void Backward(MaybeFamily only, const FlashBackwardParams& params) {
  const KernelFamily family = ServedBy(only, params.shape, params.shape.scores.any());
  BURST_CHECK(family != KernelFamily::kDecode) << "the kernel for few queries has no backward";
  CheckCall(params);
  if (family == KernelFamily::kSimt) return simt::Backward(params);
  const FlashAttentionShape& s = params.shape;
  // dQ is always accumulated over the blocks of keys, in float32.
  FlashBackwardParams own = params;
  Tensor dq;
  if (params.dq.assigned()) {
    dq = Tensor::Empty({s.batch, s.q_len, s.num_heads, s.head_dim}, kFloat, DeviceType::kCuda);
    own.dq = AddsTo(Operand(dq), {0, s.num_heads});
  }
  if (family != KernelFamily::kSm90 || !sm90::AssignsDq(own)) {
    ClearHeads(s, own.dq.sum, own.dq.first);
    own.dq.first = {};
  }
  if (family == KernelFamily::kSm80) {
    const Tensor counters = Counters(sm80::BackwardCounters(own));
    sm80::Backward(own, DataOf(counters));
  } else {
    const Tensor counters = Words(sm90::BackwardCounters(own));
    const Tensor query_tiles = Words(sm90::BackwardQueryTiles(own));
    const Tensor sums = Floats(sm90::HeadSplitsOf(own).sum_floats);
    sm90::Backward(own, {DataOf(counters), DataOf(query_tiles), FloatsOf(sums)});
  }
  if (!dq.null()) Convert(dq, /*addend=*/{}, /*addend_rows=*/nullptr, params.dq.result, s.dtype);
}

// ---- The interface.

class Kernels : public AttentionKernels {
 public:
  explicit Kernels(MaybeFamily only) : only_(only) {}

  absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const override {
    if (device != DeviceType::kCuda) {
      return absl::InvalidArgumentError("the GPU's attention kernels serve tensors on a GPU only");
    }
    if (FamilyFor(only_, dtype, widths)) return absl::OkStatus();
    return absl::InvalidArgumentError(NotServed(dtype, widths));
  }
  bool TakesBlocks(DType dtype, const HeadWidths& widths) const override {
    return cuda::TakesBlocks(only_, dtype, widths);
  }
  absl::Status CheckFp8(DeviceType device, DType dtype, const HeadWidths& widths) const override {
    BURST_RETURN_IF_ERROR(Check(device, dtype, widths));
    if (TakesFp8(only_, dtype, widths)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "attention in fp8 is for bfloat16 and float16 with a head_dim from ", kFp8HeadDims.least,
        " to ", kFp8HeadDims.most, ", of q, k and v, on a Hopper GPU, not for ", Name(dtype),
        " with ", ToString(widths)));
  }
  bool ChangesScores(DType dtype, const HeadWidths& widths) const override {
    return cuda::ChangesScores(only_, dtype, widths);
  }
  void Forward(const FlashForwardParams& params) const override { cuda::Forward(only_, params); }
  void Delta(const FlashDeltaParams& params) const override { cuda::Delta(params); }
  void Backward(const FlashBackwardParams& params) const override { cuda::Backward(only_, params); }

 private:
  const MaybeFamily only_;
};

}  // namespace

const AttentionKernels* GpuKernels() {
  static const Kernels kernels({});
  return &kernels;
}

const AttentionKernels* GpuKernels(KernelFamily family) {
  static const Kernels simt(KernelFamily::kSimt), sm80(KernelFamily::kSm80),
      sm90(KernelFamily::kSm90), decode(KernelFamily::kDecode);
  switch (family) {
    case KernelFamily::kSimt:
      return &simt;
    case KernelFamily::kSm80:
      return &sm80;
    case KernelFamily::kSm90:
      return &sm90;
    case KernelFamily::kDecode:
      return &decode;
  }
  return nullptr;
}

void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend,
                  const int32_t* addend_rows) {
  if (from.dtype() == to.dtype()) {
    BURST_CHECK(addend_rows == nullptr);
    if (!addend.null()) from.Add(addend);
    return to.CopyFrom(from);
  }
  BURST_CHECK(from.dtype() == DType::kFloat32 && Is16Bit(to.dtype()))
      << Name(from.dtype()) << " to " << Name(to.dtype());
  Convert(from, addend, addend_rows, Operand(to), to.dtype());
}

void FlashMerge(const Tensor& parts, const Tensor& out, const Tensor& sinks) {
  MergeParts(parts, out, sinks);
}

void FlashSinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks,
                    const Tensor& dsinks) {
  SinkGrads(lse, delta, sinks, dsinks);
}

}  // namespace cuda
}  // namespace burst
