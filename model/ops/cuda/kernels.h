// Declares the functions that model/ops/foo.cc calls on a GPU: kernels of memory-bound ops, and ops
// of GEMMs. There, foo.cc checks shapes, allocates and records on the tape.
//
// Tensors are contiguous and on the calling thread's GPU. The work is queued on its stream and
// never waited for. Activations and parameters are bfloat16, float32 or float64, one dtype per
// call. Kernels compute in the "accumulator type": float32 for bfloat16, else the dtype. Gradients
// of parameters are added to their buffers, or as ParameterGrad says. A buffer has the parameter's
// dtype or its accumulator type. A gradient that is not needed is a null Tensor.
// Every reduction has a fixed order: the same bits in every run on one kind of GPU.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"
#include "model/ops/cuda/float8_weights.h"
#include "model/ops/cuda/matmul.h"
#include "model/ops/loss_terms.h"

namespace burst {

class Tape;
enum class LinearPrecision;
class Variable;
enum class ResultUse;  // burst/autograd/tape.h

// The mask of one dropout site, with the values that all its elements share.
struct DropoutMask {
  uint64_t key = 0;        // the key of Philox
  uint32_t threshold = 0;  // a channel whose random word is below is dropped
  double scale = 1;        // the other channels' factor, 1 / (1 - rate)
  uint32_t first_row = 0;  // number of the batch's first row
};

namespace cuda {

// Where a parameter's gradient goes.
struct ParameterGrad {
  Tensor sum;       // null: not needed
  bool add = true;  // accumulate into `sum`; else overwrite it
};
inline KernelWork WorkOf(const ParameterGrad& grad) { return burst::WorkOf(grad.sum); }

// --- Normalization. x, y, dy, dx: [rows, width]; mean, rstd: [rows] of the accumulator type. dx =
// (`before`, unless null) + the gradient through the normalization. So one pass over memory adds
// the branch to the residual stream's gradient. Unless null, dx_amax, [1] float32, becomes the
// largest magnitude of dx, which is bfloat16 then.

// A forward whose y is float8 (e4m3) rounds y / scale, and sets `scale`, [1] float32. It is the
// smallest power of two that fits sqrt(width) max |weight| + max |bias|, a bound of y. So the scale
// does not depend on x. For other dtypes `scale` is null. The weight of an RMSNorm is `offset` +
// weight.
void RmsNormForward(const Tensor& x, const Tensor& weight, double offset, double eps,
                    const Tensor& y, const Tensor& scale, const Tensor& rstd);
void RmsNormBackward(const Tensor& x, const Tensor& weight, double offset, const Tensor& rstd,
                     const Tensor& dy, const Tensor& before, const Tensor& dx,
                     const Tensor& dx_amax, const ParameterGrad& dweight);

void LayerNormForward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                      const Tensor& y, const Tensor& scale, const Tensor& mean, const Tensor& rstd);
void LayerNormBackward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& dy, const Tensor& before, const Tensor& dx,
                       const Tensor& dx_amax, const ParameterGrad& dweight,
                       const ParameterGrad& dbias);

// RMSNorm of all heads of queries together, and of keys, which several ranks share. A pass has two
// kernels. The first one leaves this rank's share of means over all ranks. The ranks add up their
// shares before the second one.
struct SharedHeads {
  Tensor x;                         // [batch, length, heads, head_dim]: queries, keys, others
  Tensor query_weight, key_weight;  // [channels of all query heads], [channels of all key heads]
  double offset = 0, eps = 0;       // offset is added to the weights
  int ranks = 1;
  Tensor squares;  // [2, tokens] of the accumulator type: means of x^2, of queries and of keys
};
inline KernelWork WorkOf(const SharedHeads& heads) {
  return {burst::WorkOf(heads.x).bytes + burst::WorkOf(heads.squares).bytes, 0};
}
// Sets heads.squares to this rank's share.
void SharedHeadSquares(const SharedHeads& heads);
// Sets y, which is like x. Other heads are copied.
void SharedHeadForward(const SharedHeads& heads, const Tensor& y);
// Sets products, like squares, to this rank's share of mean(g xhat), with xhat = x rstd and g = dy
// (offset + weight).
void SharedHeadProducts(const SharedHeads& heads, const Tensor& dy, const Tensor& products);
// Sets dx = rstd (g - xhat mean(g xhat)), like x. Other heads' gradients are copied.
void SharedHeadBackward(const SharedHeads& heads, const Tensor& dy, const Tensor& products,
                        const Tensor& dx, const ParameterGrad& dquery_weight,
                        const ParameterGrad& dkey_weight);

// --- RoPE.

// cos[t, i] = amplitude cos(positions[t] frequencies[i]), computed in double, and sin likewise.
// positions: [...] int32 of `tokens` elements. cos, sin: [tokens, half], float32 or float64. At
// most 256 frequencies.
void RopeCosSin(const Tensor& positions, const std::vector<double>& frequencies, double amplitude,
                const Tensor& cos, const Tensor& sin);
// y = x, whose first 2 half channels are turned by sign * angle in the first `rotated` heads.
// x, y: [tokens..., heads, head_dim], head_dim even and at least 2 half. cos, sin: [tokens, half]
// of x's accumulator type. y_amax, unless null, becomes the largest magnitude of y, which is
// bfloat16 then: [1] float32.
void RopeRotate(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t rotated, double sign,
                const Tensor& y, const Tensor& y_amax);

// --- Elementwise ops. gate_up, dgate_up: [rows, 2 n]; y, dy: [rows, n].

void SwiGluForward(const Tensor& gate_up, const Tensor& y);
void SwiGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up);
void GeGluForward(const Tensor& gate_up, const Tensor& y);
void GeGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up);
// y = factor x
void ScaleForward(const Tensor& x, double factor, const Tensor& y);
void GeluForward(const Tensor& x, const Tensor& y);
void GeluBackward(const Tensor& x, const Tensor& dy, const Tensor& dx);
void SoftCapForward(const Tensor& x, double cap, const Tensor& y);
// dx = dy (1 - (y / cap)^2)
void SoftCapBackward(const Tensor& y, const Tensor& dy, double cap, const Tensor& dx);
void AddForward(const Tensor& a, const Tensor& b, const Tensor& y);

// --- Embedding. ids: [tokens] int32. table: [rows, width]. y, dy: [tokens, width].

// Sets y[t] = table[ids[t]] + position_table[positions[t]], the latter unless null.
void EmbeddingForward(const Tensor& ids, const Tensor& table, const Tensor& positions,
                      const Tensor& position_table, const Tensor& y);
// Computes dtable[ids[t]] += dy[t], for each row in the order of its tokens.
void EmbeddingBackward(const Tensor& ids, const Tensor& dy, const Tensor& dtable);

// --- Dropout.

// Sets y = residual (unless null) + mask x scale, with the CPU's mask. x, residual, y: [batch,
// length, width]; positions: [length] int32.
void DropoutApply(const DropoutMask& mask, const Tensor& positions, const Tensor& x,
                  const Tensor& residual, const Tensor& y);

// --- Parts of the GEMM ops that epilogues do not do: a bias, for dtypes without epilogues, and
// softmax.

// Computes y[i, :] += bias. y: [..., width] contiguous, bias: [width]; one dtype.
void AddBias(const Tensor& y, const Tensor& bias);

// Sets sum to the sum over i of y[i, :] in a fixed order, or with `add` adds that. y: [..., width]
// contiguous; sum: [width], of the accumulator's type of y.
void ColumnSums(const Tensor& y, const Tensor& sum, bool add);

// losses[i] = the loss of a row (LossTerms), 0 for a target of -1. With `gradient`, the logits
// become their gradient times the scale, 0 for a target of -1 and behind the vocabulary. logits:
// [rows, stride], of which the first vocab count; stride is a multiple of 16 bytes. targets: [rows]
// int32. losses: [rows], in the logits' accumulator type. A target outside [-1, vocab)
// traps: data is checked where it is read. With `gradient`, scale > 0.
void SoftmaxCrossEntropy(const Tensor& logits, int64_t rows, int64_t vocab, int64_t stride,
                         const int32_t* targets, const LossTerms& terms, bool gradient,
                         void* losses);

// total = scale * sum of losses [n], in a fixed order. total: [] of the losses' dtype.
void SumLosses(const Tensor& losses, double scale, const Tensor& total);

// Computes y *= factor, [] of y's accumulator type on the GPU. Reads y only if factor is not 1.
void ScaleBy(const Tensor& y, const Tensor& factor);
// Sets y = factor x, or with `add` y += factor x. x, y: float32 or float64.
void ScaleInto(const Tensor& y, const Tensor& x, const Tensor& factor, bool add);

// --- float8 forms of tensors, for the GEMMs of linear layers (float8.cu). A result has one float8
// dtype in one or two forms, of which either may be null. cols is a multiple of 16.
//
//   as_rows     [rows, cols]
//   as_columns  [cols, rows rounded up to a multiple of 16], zeros in the added columns
//
// A result is its numbers times `scale`, [1] float32. The scale is the smallest power of two for
// which bound / scale fits the dtype, where no magnitude exceeds the bound. It is NaN for a bound
// that is not finite.

// Rounds x, [rows, cols] bfloat16. The bound is amax.
void RoundToFloat8(const Tensor& x, int64_t cols, const Tensor& amax, const Tensor& as_rows,
                   const Tensor& as_columns, const Tensor& scale);

// Makes the columns of a result from its rows. The scale is the same.
void TransposeFloat8(const Tensor& as_rows, int64_t cols, const Tensor& as_columns);

// Sets the largest magnitudes of each row and each column of x, [rows, cols] bfloat16. row_amax:
// [rows], column_amax: [cols], float32.
void RowAndColumnAmax(const Tensor& x, int64_t cols, const Tensor& row_amax,
                      const Tensor& column_amax);

// Rounds x, [rows, cols] bfloat16, to e4m3. as_rows has row_scales, and as_columns has
// column_scales, laid out as `scaling` says (matmul.h), not kTensor. A scale's bound is the largest
// magnitude of its numbers. Only kRow reads row_amax and column_amax.
void RoundWithScales(const Tensor& x, int64_t cols, Scaling scaling, const Tensor& row_amax,
                     const Tensor& column_amax, const Tensor& as_rows, const Tensor& as_columns,
                     const Tensor& row_scales, const Tensor& column_scales);

// Sets largest to the largest magnitudes of silu(gate) up, silu(gate), gate and up. gate_up: [rows,
// 2 n] bfloat16, n a multiple of 8; largest: [kSwiGluMagnitudes] float32.
constexpr int kSwiGluMagnitudes = 4;
void SwiGluMagnitudes(const Tensor& gate_up, const Tensor& largest);

// Rounds silu(gate) up, [rows, n], to e4m3. The bound is its largest magnitude. Unless null, kept,
// [rows, 2 n], becomes gate_up in e4m3, and kept_scales [2] the scales of gate and of up.
void SwiGluToFloat8(const Tensor& gate_up, const Tensor& largest, const Tensor& as_rows,
                    const Tensor& scale, const Tensor& kept, const Tensor& kept_scales);

// Rounds silu(gate) up of the numbers that SwiGluToFloat8 kept. Rounded, they may exceed the
// largest magnitude, so the scale has room for 20 % more; the few above are saturated.
void KeptSwiGluToFloat8(const Tensor& kept, const Tensor& kept_scales, const Tensor& largest,
                        const Tensor& as_columns, const Tensor& scale);

// Rounds the gradient of gate_up, [rows, 2 n], to e5m2. grad is silu(gate) up's, [rows, n]. The
// bound is grad_amax max(1.1 largest up, largest silu(gate)), because |silu'| < 1.1, with what
// rounding gate and up added. It exceeds the largest magnitude, but e5m2 has the same precision
// over 30 powers of two.
void SwiGluGradToFloat8(const Tensor& kept, const Tensor& kept_scales, const Tensor& grad,
                        const Tensor& grad_amax, const Tensor& largest, const Tensor& as_rows,
                        const Tensor& as_columns, const Tensor& scale);

// --- The ops of ops.h that consist of GEMMs, forward and backward (gemm_ops.cc). Every build has
// them, because a simulated GPU runs them too.

Variable Linear(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                const Variable& residual, const Shape& y_shape,
                const std::function<void()>& dx_done, ResultUse use);

// Linear with products of float8 (float8_ops.cc). x is bfloat16, or with kFloat8 also e4m3 with a
// scale.
Variable LinearInFloat8(Tape& tape, const Variable& x, const Variable& weight, const Variable& bias,
                        const Variable& residual, const Shape& y_shape,
                        const std::function<void()>& dx_done, ResultUse use,
                        LinearPrecision precision);

// SwiGluMlp with products of float8 of one scale a tensor; at least one token.
Variable SwiGluMlpInFloat8(Tape& tape, const Variable& x, const Variable& gate_up,
                           const Variable& down, const Variable& down_bias,
                           const Variable& residual, const Shape& y_shape,
                           const std::function<void()>& dx_done, ResultUse use);

// Adds a b to the gradient of x, [rows, cols]. The GEMM itself adds the gradient so far, in place
// unless the gradient's memory has another user.
void AddGemm(const Variable& x, int64_t cols, MatMulParams gemm);
// Adds the sum over rows of dy, [rows, out], to dbias; bias may be undefined.
void BiasBackward(const Tensor& dy, const Variable& bias);

// bfloat16 only.
Variable GeluMlp(Tape& tape, const Variable& x, const Variable& up, const Variable& up_bias,
                 const Variable& down, const Variable& down_bias, const Variable& residual,
                 const std::function<void()>& dx_done, ResultUse use);

Variable LinearCrossEntropy(Tape& tape, const Variable& x, const Variable& weight,
                            const Tensor& targets, const LossTerms& terms, int64_t chunk);

}  // namespace cuda
}  // namespace burst
