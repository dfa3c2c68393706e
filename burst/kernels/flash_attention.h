// The interface of the attention kernels: plain parameter structs, the same for every device. A
// kernel knows nothing of ranks. The ring (burst/attention) calls it once for every block of keys
// it receives, and the kernel merges its result with that of the earlier calls.
//
// Method: FlashAttention (Dao et al., arXiv 2205.14135 and 2307.08691): tile by tile with online
// softmax, never a q_len x k_len matrix in main memory, forward or backward.
//
// Notation: S = softmax_scale Q K^T, masked. P = exp(S - lse). O = P V. lse = log sum exp S
// (natural).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "burst/base/check.h"
#include "burst/kernels/limits.h"
#include "burst/kernels/scores.h"
#include "burst/tensor/tensor.h"

namespace burst {

// A [batch, seqlen, num_heads, columns] tensor; the columns, head_dim or value_dim, have stride 1.
// Strides in elements.
struct AttentionOperand {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

// tensor: [batch, seqlen, num_heads, columns], innermost stride 1.
inline AttentionOperand Operand(const Tensor& tensor) {
  BURST_CHECK(tensor.ndim() == 4 && (tensor.stride(3) == 1 || tensor.dim(3) <= 1))
      << "expected [batch, seqlen, heads, head_dim] with head_dim innermost, got "
      << ToString(tensor.shape());
  return {tensor.raw_data(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

// A mask as one range of keys for each query: query row i sees the keys begin[i] <= j < end[i].
// Causal masks, sliding windows, packed documents and spans have this form in every layout, because
// a rank holds its tokens in order of their global position. Other masks are several calls, or
// KeyBlocks.
//
// begin and end never decrease with i. So the rows of a tile see [begin[first], end[last]), and the
// rows that see a key tile are one range. A row with begin >= end sees nothing. Null arrays: every
// row sees every key.
struct KeyRanges {
  const int32_t* begin = nullptr;  // [batch, q_len], rows batch_stride apart
  const int32_t* end = nullptr;
  int64_t batch_stride = 0;  // 0: the same for the whole batch
  // An upper bound, over all keys, on the number of queries from the first to the last that sees
  // the key. A small value means that the work on neighboring keys reads neighboring queries. 0:
  // unknown.
  int64_t most_queries = 0;
  // Whether some rows are of different packed documents. A GPU's 16-bit kernels then keep NaN and
  // infinity of a document away from the rows of other documents. CPU kernels, and the GPU's
  // float32 and float64 kernels, always do so for every row that does not see them.
  bool documents = false;
};

// A mask as blocks of kListBlock queries by kListBlock keys, counted from the first query and the
// first key. The queries of a block see all keys of a key block or none. The last block of queries
// and the last of keys may be smaller. Kernels loop over lists of blocks instead of intervals, for
// sparse masks whose rows see many intervals. Null arrays: the mask is not given in this form.
inline constexpr int64_t kListBlock = 128;

struct KeyBlocks {
  // Query block i sees the key blocks key_list[key_begin[i]], ..., key_list[key_begin[i + 1] - 1],
  // increasing.
  const int32_t* key_begin = nullptr;  // [batch, query blocks + 1], rows key_stride apart
  const int32_t* key_list = nullptr;
  // The query blocks query_list[query_begin[j]], ... see key block j. It is the
  // place_list[query_begin[j]]-th, ..., of each one's list, counted from 0. On the CPU they
  // increase; on a GPU they are in the order in which a backward walks them.
  const int32_t* query_begin = nullptr;  // [batch, key blocks + 1], rows query_stride apart
  const int32_t* query_list = nullptr;
  const int32_t* place_list = nullptr;
  int64_t key_stride = 0, query_stride = 0;  // 0: the same for the whole batch
};

struct FlashAttentionShape {
  int64_t batch = 0;
  int64_t q_len = 0;  // any length, also 0
  int64_t k_len = 0;
  int64_t num_heads = 0;
  // Divides num_heads; query head h reads KV head h / (num_heads / num_kv_heads).
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;   // columns of q and k; at least 1
  int64_t value_dim = 0;  // columns of v and out; at least 1, also where it equals head_dim
  double softmax_scale = 0;
  // The dtype of q, k, v and dout: float32, float64, bfloat16 or float16.
  DType dtype = DType::kFloat32;
  KeyRanges visible;         // arrays on the device of the kernel
  KeyBlocks blocks = {};     // arrays on the device of the kernel; without `visible`
  ScoreChanges scores = {};  // for kernels that say ChangesScores

  constexpr HeadWidths widths() const { return {head_dim, value_dim}; }
};

// Says which of several calls finishes each row of O, in groups of kRowGroup rows. The last call in
// which some row of a group sees a key writes the group to `out`. Earlier calls write it to `sum`.
// Later calls leave it alone. A group that never sees a key is finished by call 0.
inline constexpr int64_t kRowGroup = 64;

struct RowCalls {
  const int32_t* last = nullptr;  // [batch, groups], the last call of each; null: this one
  int64_t batch_stride = 0;       // 0: the same for the whole batch
  int32_t call = 0;               // the number of this call
  int64_t begin = 0, end = 0;     // all rows that see a key in this call are in [begin, end)

  // Returns how many calls are left for a row after this one. Negative: the row is finished.
  constexpr int64_t Left(int64_t batch, int64_t row) const {
    return last == nullptr ? 0 : last[batch * batch_stride + row / kRowGroup] - call;
  }
};

// Computes (out, lse) = attention(q, k, v), or with `merge` the merge of (sum, lse) with it. A row
// that has seen no key gets out = 0 and lse = -inf, or its sink.
struct FlashForwardParams {
  FlashAttentionShape shape;
  AttentionOperand q;    // [batch, q_len, num_heads, head_dim]
  AttentionOperand k;    // [batch, k_len, num_kv_heads, head_dim]
  AttentionOperand v;    // [batch, k_len, num_kv_heads, value_dim]
  AttentionOperand out;  // [batch, q_len, num_heads, value_dim]
  void* lse = nullptr;   // [batch, num_heads, q_len], contiguous
  bool merge = false;
  // The dtype of out: shape.dtype or float32. It is read for 16-bit inputs only.
  DType out_dtype = DType::kFloat32;
  // For 16-bit inputs: the result of the calls so far, float32, like out. Null data: `out` itself.
  AttentionOperand sum = {};
  // For 16-bit inputs with a sum that has the strides of out. Its array is on the kernel's device.
  RowCalls rows = {};
  // On a GPU: one block for every tile of queries. Kernels of streams with a higher priority
  // (NCCL's) then start as soon as some tile is done. It costs up to 3 %.
  bool non_persistent = false;
  // Rounds Q, K and V to 8 bits (e4m3, a scale for every 128 tokens of a head) and multiplies at
  // twice the rate, where AttentionKernels::CheckFp8 allows it. Results and the backward's inputs
  // keep their dtypes. docs/kernels.md has the error.
  bool fp8 = false;
  // [batch, num_heads], or null. Each is raised to the largest S (natural, after softcap and ALiBi)
  // of a visible pair. For kernels with ChangesScores.
  float* max_logits = nullptr;
  // Attention sinks: a logit for each query head that takes part in the softmax and has no value
  // (gpt-oss, arXiv 2508.10925; "off-by-one" attention, Miller 2023, is a sink of 0):
  //   lse = log(exp(sink) + sum exp S), O = exp(S - lse) V.
  // [num_heads] of SumDType(shape.dtype); null: no sinks. Give them to the first of several calls,
  // which does not merge. The others merge with its result. The backward needs only lse and out,
  // which include the sinks; FlashSinkGrads gives the sinks' own gradients.
  const void* sinks = nullptr;
};

// Computes delta = rowsum(dout * out) - dlse, which the softmax's backward subtracts. Call it once
// per backward, before the other calls, so that a ring need not send out.
struct FlashDeltaParams {
  FlashAttentionShape shape;  // k_len, num_kv_heads and the mask unused
  AttentionOperand out;
  AttentionOperand dout;
  const void* dlse = nullptr;  // [batch, num_heads, q_len]; null: zero
  void* delta = nullptr;       // [batch, num_heads, q_len]
};

// Heads begin, ..., end - 1 of a tensor; none by default.
struct HeadRange {
  int64_t begin = 0, end = 0;
  constexpr bool has(int64_t head) const { return begin <= head && head < end; }
  constexpr bool empty() const { return begin >= end; }
};

// Where a call of the backward leaves a gradient. The only call assigns it; several calls add to a
// sum.
struct GradientTarget {
  // The sum of several calls, of SumDType(shape.dtype). Null data: the call is the only one.
  AttentionOperand sum = {};
  AttentionOperand result = {};  // the gradient, of shape.dtype
  // The heads for which this call is the first of several. It overwrites their sums.
  HeadRange first = {};
  // The heads for which this call is the last of several. It writes `result`, and their sums may be
  // anything after it. For dK and dV of 16-bit inputs.
  HeadRange last = {};

  constexpr bool assigned() const { return sum.data == nullptr; }
  constexpr bool Begins(int64_t head) const { return assigned() || first.has(head); }
  constexpr bool Ends(int64_t head) const { return assigned() || last.has(head); }
  // Returns where the call writes a head.
  constexpr const AttentionOperand& Of(int64_t head) const { return Ends(head) ? result : sum; }
};

inline GradientTarget Assigns(const AttentionOperand& result) { return {{}, result}; }

// first: the heads whose sums the call overwrites.
inline GradientTarget AddsTo(const AttentionOperand& sum, const HeadRange& first = {}) {
  return {sum, {}, first};
}

// Computes P = exp(S - lse), dS = P * (dO V^T - delta), and then dV += P^T dO, dK += softmax_scale
// dS^T Q and dQ += softmax_scale dS K. dK and dV sum a KV head's query heads.
struct FlashBackwardParams {
  FlashAttentionShape shape;
  AttentionOperand q, k, v;
  AttentionOperand dout;        // like the forward's out
  const void* lse = nullptr;    // [batch, num_heads, q_len], of the whole row, over all calls
  const void* delta = nullptr;  // [batch, num_heads, q_len]
  GradientTarget dq;            // like q
  GradientTarget dk, dv;        // like k and v, with the same calls and heads for both
  // Gives the same bits in every run. The CPU kernels always do.
  bool deterministic = true;
};

// The kernels of a device, or others that compute the same (benchmarks/study). They have no
// state; any thread may call them.
class AttentionKernels {
 public:
  virtual ~AttentionKernels() = default;
  // Returns OK if they serve such tensors, else InvalidArgument with the reason.
  virtual absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const = 0;
  // Returns whether they take FlashAttentionShape::blocks of such tensors. If not, callers give the
  // mask as ranges, in several calls.
  virtual bool TakesBlocks(DType dtype, const HeadWidths& widths) const = 0;
  // Returns OK if they take FlashForwardParams::fp8, else InvalidArgument with the reason.
  virtual absl::Status CheckFp8(DeviceType, DType, const HeadWidths&) const {
    return absl::InvalidArgumentError("attention in fp8 needs a Hopper GPU and its kernels");
  }
  // Returns whether they take FlashAttentionShape::scores and FlashForwardParams::max_logits of
  // such tensors.
  virtual bool ChangesScores(DType, const HeadWidths&) const { return false; }
  // Returns whether they take those together with FlashAttentionShape::blocks.
  virtual bool ChangesScoresOfBlocks() const { return false; }
  // On a GPU, these calls are queued on the thread's stream.
  virtual void Forward(const FlashForwardParams& params) const = 0;
  virtual void Delta(const FlashDeltaParams& params) const = 0;
  virtual void Backward(const FlashBackwardParams& params) const = 0;
};

// Returns the kernels of a device.
//
// CPU: parallel over the caller's thread pool, with the same bits for any number of threads. It
// computes 16-bit tensors in float32 and rounds only results. Scratch memory is one or two MiB a
// thread, for any batch, heads and lengths, and assigned 16-bit gradients in float32.
// GPU: see docs/kernels.md.
const AttentionKernels& KernelsOf(DeviceType device);

// Computes to = from + addend, converted, for accumulated results: [batch, seqlen, num_heads,
// columns], innermost stride 1. `addend` is null, or has the dtype of `from` or `to`. Then it and
// `from` are contiguous, and `from` may be changed. addend_rows: [seqlen] on the GPU, for float32
// to 16 bits there. Row i adds the addend's row addend_rows[i], or nothing if that is negative.
void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend = Tensor(),
                  const int32_t* addend_rows = nullptr);

// Computes the gradients of the sinks of FlashForwardParams, with FlashDeltaParams' delta:
//   dsinks[h] = -sum over b, i of exp(sinks[h] - lse[b, h, i]) delta[b, h, i]
// The gradient of a sink of -inf is 0. lse, delta: [batch, num_heads, q_len]. sinks, dsinks:
// [num_heads]. All are contiguous, and all float32 or all float64. The sum is in float64, in an
// order that depends on the shape alone.
void FlashSinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks,
                    const Tensor& dsinks);

// Merges attention to `n` disjoint sets of keys into attention to all of them, in the order of the
// sets. A row that sees no key becomes 0.
//
// out: [batch, q_len, num_heads, value_dim], contiguous. parts: [n, at least rows * (value_dim +
// 1)], contiguous, of SumDType(out's dtype), where rows = batch * q_len * num_heads. Each part has
// its set's out first, then its lse [batch, num_heads, q_len]. `sinks` are as in FlashForwardParams
// and count once for all sets; null: no sinks.
void FlashMerge(const Tensor& parts, const Tensor& out, const Tensor& sinks = Tensor());

}  // namespace burst
