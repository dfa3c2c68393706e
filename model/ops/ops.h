// The catalog of the model's ops: signature, equation, shapes and source of each. Read this
// first.
//
// An op computes its value and records its backward on the tape (burst/autograd/tape.h); the
// equations of a backward stand at its code. "[..., n]" is any number of leading axes. Tensors
// are contiguous, of one device and one dtype: float32, float64 or bfloat16, which is computed in
// float32. Positions, ids and targets are int32. Shapes that do not fit are bugs of the
// caller and abort (BURST_CHECK); no op returns an error. Every reduction has a fixed order, so one
// machine gives the same bits in every run.
//
// Where the code is, by family:
//
//   CPU, checks, tape    GPU kernels (cuda/)                  ops
//   linear.cc            gemm_ops.cc, bias.cu; matmul.{h,cc}  Linear, GeluMlp, SwiGluMlp, GeGluMlp
//                        float8_ops.cc, float8.{cu,cuh}       Linear, SwiGluMlp in float8
//   rows.cc              (copies)                             SelectRows
//   normalization.cc     normalization.{cu,cuh}               RmsNorm, LayerNorm
//   head_norm.cc         normalization.{cu,cuh}, head_norm.cu  RmsNormHeads
//   elementwise.cc       elementwise.cu                       Add, Scale, Gelu, SwiGlu, GeGlu
//   rope.cc              rope.cu                              Rope
//   embedding.cc         embedding.cu                         Embedding
//   dropout.cc           dropout.cu                           Dropout
//   cross_entropy.cc     gemm_ops.cc, cross_entropy.cu        LinearCrossEntropy
//
// cuda/kernels.h declares the GPU functions that these call.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/loss_terms.h"
#include "model/rope.h"

namespace burst {

// ---- Linear layers.

// The precision to which the factors of a linear layer are rounded before they are multiplied. Sums
// are in fp32, or in the tensors' dtype if that is wider.
enum class LinearPrecision {
  kTensors,  // their dtype
  // 8 bits with one scale a tensor: e4m3, and e5m2 for gradients. bfloat16 tensors on a GPU,
  // multiples of 16 channels. The scale is the smallest power of two that fits a bound of the
  // magnitudes. The bound is the largest magnitude, unless an op has a bound that costs less.
  kFloat8,
  // As kFloat8, but all in e4m3, and with a scale for each row of a factor along which the product
  // sums.
  kFloat8Rows,
  // As kFloat8Rows, but a scale is for 128 numbers of such a row, or for 128 x 128 weights
  // (DeepSeek-V3, arXiv 2412.19437). Where 4 does not divide the tokens, as kFloat8Rows.
  kFloat8Blocks,
};

// y = x W^T + bias + residual.
// x: [..., in], where `in` may be several trailing axes ([batch, length, heads, head_dim] counts as
// in = heads head_dim). weight: [out, in]. bias: [out] or undefined. residual (may be undefined),
// y: [..., out]. The GEMM itself adds the residual: it starts from it instead of from zero.
//
// The backward calls `dx_done`, unless null, when dx is complete and before it reads x for dweight.
// The caller may send dx from there, and put x back (Variable::SetValue).
//
// With ResultUse::kUnread y has no memory and is not computed; its gradient flows as usual.
Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias = {},
                const Variable& residual = {}, const std::function<void()>& dx_done = nullptr,
                ResultUse use = ResultUse::kRead,
                LinearPrecision precision = LinearPrecision::kTensors);

// The feed-forward of GPT-2: y = gelu(x up^T + up_bias) down^T + down_bias + residual. One op, so
// that in bfloat16 on a GPU the GEMMs apply GELU and the biases themselves.
// x: [..., width]. up: [ffn, width]. up_bias: [ffn]. down: [width, ffn]. down_bias: [width] or
// undefined. residual (may be undefined), y: [..., width]. `dx_done` and `use` as for Linear.
Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual = {},
                 const std::function<void()>& dx_done = nullptr, ResultUse use = ResultUse::kRead,
                 LinearPrecision precision = LinearPrecision::kTensors);

// The feed-forward of Llama: y = h down^T + down_bias + residual, with h = silu(gate) up and
// [gate, up] = x gate_up^T + gate_up_bias. One op, so that in float8 without gate_up_bias h and the
// gradient of gate_up are rounded by the kernels that compute them. Only gate_up is then kept for
// the backward.
// x: [..., width]. gate_up: [2 ffn, width]. gate_up_bias: [2 ffn] or undefined. down: [width, ffn].
// The others as for GeluMlp.
Variable SwiGluMlp(Tape& tape, const Variable& x, const Variable& gate_up,
                   const Variable& gate_up_bias, const Variable& down, const Variable& down_bias,
                   const Variable& residual = {}, const std::function<void()>& dx_done = nullptr,
                   ResultUse use = ResultUse::kRead,
                   LinearPrecision precision = LinearPrecision::kTensors);

// The feed-forward of Gemma: SwiGluMlp with h = gelu(gate) up, as in GeGlu.
Variable GeGluMlp(Tape& tape, const Variable& x, const Variable& gate_up,
                  const Variable& gate_up_bias, const Variable& down, const Variable& down_bias,
                  const Variable& residual = {}, const std::function<void()>& dx_done = nullptr,
                  ResultUse use = ResultUse::kRead,
                  LinearPrecision precision = LinearPrecision::kTensors);

// y = those rows of x, one range behind the other. For a parameter that several ops use in parts:
// the gradient of y adds to its rows, in the dtype of gradients. x: [rows, ...]; y: [the sum of the
// lengths, ...].
struct RowRange {
  int64_t begin = 0;
  int64_t length = 0;
};
Variable SelectRows(Tape& tape, const Variable& x, const std::vector<RowRange>& ranges);

// ---- Normalization over the last axis. x, y: [..., width]; weight, bias: [width]. `reader` is the
// precision of the linear layers that read y. With kFloat8, y is in e4m3 with a scale
// (Variable::InFloat8). Its bound, sqrt(width) max |weight| + max |bias|, does not depend on x, so
// all ranks have one scale. The gradient of x then comes with its largest magnitude.

// RMSNorm (Zhang and Sennrich, arXiv 1910.07467): y = x / sqrt(mean(x^2) + eps) * (offset +
// weight). offset: 0, or 1 in Gemma, whose weights keep their digits near 0.
Variable RmsNorm(Tape& tape, const Variable& x, const Variable& weight, double eps,
                 LinearPrecision reader = LinearPrecision::kTensors, double offset = 0);

// RMSNorm of queries and of keys. x, y: [batch, length, heads, head_dim]: the heads of queries,
// then those of keys, then others (values), which are copied. The weight's length says what is
// normalized: each head (Qwen3, arXiv 2505.09388), or all heads of queries or keys together (OLMo
// 2, arXiv 2501.00656).
struct NormalizedHeads {
  Variable weight;  // [head_dim] or [count * head_dim]
  int64_t count = 0;
};
// The ranks that share the heads which are normalized together. Every rank has as many heads, and
// every head is on as many ranks.
struct HeadRanks {
  int count = 1;
  // Replaces numbers by their sums over the ranks: [2, tokens] of the accumulator type, for queries
  // and for keys. It is called once in the forward and once in the backward. Null on one rank.
  std::function<void(const Tensor& numbers)> add_up = nullptr;
};
Variable RmsNormHeads(Tape& tape, const Variable& x, const NormalizedHeads& queries,
                      const NormalizedHeads& keys, double eps, double offset = 0,
                      const HeadRanks& ranks = {});

// LayerNorm (Ba et al., arXiv 1607.06450): y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias,
// with the biased variance.
Variable LayerNorm(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                   double eps, LinearPrecision reader = LinearPrecision::kTensors);

// ---- Elementwise ops.

// y = a + b; a, b, y: one shape.
Variable Add(Tape& tape, const Variable& a, const Variable& b);

// y = factor x, with the factor rounded to x's dtype; x, y: one shape. For the embeddings of Gemma
// (arXiv 2403.08295).
Variable Scale(Tape& tape, const Variable& x, double factor);

// GELU in the tanh form of GPT-2 (Hendrycks and Gimpel, arXiv 1606.08415):
// y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); x, y: one shape.
Variable Gelu(Tape& tape, const Variable& x);

// y = cap tanh(x / cap) on the CPU; x, y: one shape. For the logits of Gemma 2 (arXiv 2408.00118).
Variable SoftCap(Tape& tape, const Variable& x, double cap);

// SwiGLU (Shazeer, arXiv 2002.05202): y = gate sigmoid(gate) up.
// gate_up: [..., 2 n], gate before up; y: [..., n].
Variable SwiGlu(Tape& tape, const Variable& gate_up);

// GEGLU (Shazeer, arXiv 2002.05202): y = Gelu(gate) up. Shapes as for SwiGlu.
Variable GeGlu(Tape& tape, const Variable& gate_up);

// ---- Rotary position embedding (Su et al., arXiv 2104.09864). Channels are paired as in Llama on
// Hugging Face: channel i with i + half, where `half` frequencies turn a head's first 2 half
// channels.

// amplitude * cos and amplitude * sin of position * frequency for the tokens of one batch, made
// once for all layers. Angles are computed in double, so that far positions keep their phase in
// float.
struct RopeTable {
  Tensor cos, sin;  // [batch * length, half]; float32 for bfloat16 activations
};

// positions: [batch, length], >= 0; the table is on their device. dtype: of the activations.
// On a GPU at most 256 frequencies (512 channels of a head).
std::shared_ptr<const RopeTable> MakeRopeTable(const Tensor& positions, const RopeAngles& angles,
                                               DType dtype);

// y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin, where x1 and x2 are the halves of a head's first
// 2 half channels; the channels behind them are copied. x, y: [batch, length, heads, head_dim], of
// the table's batch and length; head_dim is even. The first `rotated_heads` heads (-1: all) are
// rotated, the others (values, behind queries and keys) are copied. `maker` is the precision of the
// linear layer that made x: with kFloat8 the gradient of x comes with its largest magnitude.
Variable Rope(Tape& tape, const Variable& x, std::shared_ptr<const RopeTable> table,
              int64_t rotated_heads = -1, LinearPrecision maker = LinearPrecision::kTensors);

// ---- Embedding: rows of tables.

// y[..., :] = table[ids[...], :]. ids: [...], each in [0, rows), on the table's device; table:
// [rows, width]. An id out of range is a bug of the caller (checked on the CPU): data is validated
// where it is read.
Variable Embedding(Tape& tape, const Tensor& ids, const Variable& table);

// y[..., :] = table[ids[...], :] + position_table[positions[...], :]; positions like ids.
Variable Embedding(Tape& tape, const Tensor& ids, const Variable& table, const Tensor& positions,
                   const Variable& position_table);

// ---- Dropout (Srivastava et al., JMLR 2014). Its masks are a pure function of their place. So
// they are equal for any number of ranks and after a resume, and are never stored.

// Names the random bits of a forward pass: a mask is a function of (key, site, batch row, global
// position, channel).
struct DropoutKey {
  uint64_t seed = 0;
  uint64_t step = 0;  // distinct for every micro-batch of the run
  bool enabled = false;
  int64_t first_row = 0;  // the first row of this rank's batch within the micro-batch
};

// One place in the model where dropout applies.
struct DropoutSite {
  double rate = 0;  // in [0, 1)
  DropoutKey key;
  int64_t site = 0;  // distinct for every place of one forward pass
  Tensor positions;  // [length]: global, of this rank's tokens; on the activations' device

  bool active() const { return key.enabled && rate > 0; }
};

// The seed of attention's dropped weights in a layer (KeepsWeight, burst/kernels/scores.h), which
// rows, heads and positions complete.
uint64_t AttentionDropoutSeed(const DropoutKey& key, int64_t layer);

// y = residual + mask x / (1 - rate), where mask is 1 with probability 1 - rate, else 0. Without a
// residual: y = mask x / (1 - rate). When the site is not active, mask = 1 and rate = 0.
// x, residual, y: [batch, length, width].
Variable Dropout(Tape& tape, const Variable& x, const DropoutSite& site,
                 const Variable& residual = {});

// ---- The LM head and its loss in one op: softmax cross-entropy of x W^T without ever holding all
// logits, like Liger Kernel (arXiv 2410.10989) and cut cross-entropy (arXiv 2411.09009).

// x: [..., width]. weight: [vocab, width]. targets: one for each row of x, in [0, vocab), or -1: no
// loss. Logits exist for `chunk` tokens at a time; 0: as many as fit in kLogitBytes (on the CPU).
//
// Returns a scalar, float32 where x is bfloat16.
//
// When a gradient is needed, the forward computes it, too, chunk by chunk while the logits are
// there, for an upstream gradient of 1. The backward only scales and adds it.
inline constexpr int64_t kLogitBytes = int64_t{128} << 20;
Variable LinearCrossEntropy(Tape& tape, const Variable& x, const Variable& weight,
                            const Tensor& targets, const LossTerms& terms, int64_t chunk = 0);

}  // namespace burst
