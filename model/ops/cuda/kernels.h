// The memory-bound ops on a GPU: kernels and nothing around them. model/ops/foo.cc checks shapes,
// allocates, records on the tape, and calls these.
//
// Tensors are contiguous and on the calling thread's GPU; the work is queued on its stream and
// never waited for. Activations and parameters are bfloat16, float32 or float64, one dtype per
// call. "Accumulator type" is what the kernels compute in: float32 for bfloat16, else the dtype
// itself. Gradients of parameters are added to what their buffers hold, or as ParameterGrad says; a
// buffer is of the parameter's dtype or of its accumulator type. A gradient that nobody wants is a
// null Tensor.
// Every sum has a fixed order: the same bits in every run on one kind of GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/tensor/tensor.h"

namespace burst {

// The mask of one dropout site: what is the same for all its elements.
struct DropoutMask {
  uint64_t key = 0;        // of Philox
  uint32_t threshold = 0;  // a channel whose random word is below is dropped
  double scale = 1;        // of the others: 1 / (1 - rate)
  uint32_t first_row = 0;  // what the batch's rows are counted from
};

namespace cuda {

// The dtype of statistics and tables for activations of `dtype`.
inline DType AccumulatorDType(DType dtype) {
  return dtype == DType::kBFloat16 ? DType::kFloat32 : dtype;
}

// Where a parameter's gradient goes.
struct ParameterGrad {
  Tensor sum;       // null: nobody wants it
  bool add = true;  // to what `sum` holds; else that is overwritten
};

// --- model/ops/rmsnorm.h, layernorm.h. x, y, dy, dx: [rows, width]; mean, rstd: [rows] of the
// accumulator type. dx = (`before`, unless null) + the gradient through the norm: one pass adds the
// norm's branch to the gradient of the residual stream.

void RmsNormForward(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                    const Tensor& rstd);
void RmsNormBackward(const Tensor& x, const Tensor& weight, const Tensor& rstd, const Tensor& dy,
                     const Tensor& before, const Tensor& dx, const ParameterGrad& dweight);

void LayerNormForward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                      const Tensor& y, const Tensor& mean, const Tensor& rstd);
void LayerNormBackward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& dy, const Tensor& before, const Tensor& dx,
                       const ParameterGrad& dweight, const ParameterGrad& dbias);

// --- model/ops/rope.h

// cos[t, i] = cos(positions[t] frequencies[i]), computed in double, and sin. positions: [...] int32
// of `tokens` elements; cos, sin: [tokens, half], float32 or float64; at most 256 frequencies.
void RopeAngles(const Tensor& positions, const std::vector<double>& frequencies, const Tensor& cos,
                const Tensor& sin);
// y = x turned by sign * angle, heads behind the first `rotated` copied. x, y: [tokens..., heads,
// 2 half]; cos, sin: [tokens, half] of x's accumulator type.
void RopeRotate(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t rotated, double sign,
                const Tensor& y);

// --- model/ops/swiglu.h, gelu.h, add.h. gate_up, dgate_up: [rows, 2 n]; y, dy: [rows, n].

void SwiGluForward(const Tensor& gate_up, const Tensor& y);
void SwiGluBackward(const Tensor& gate_up, const Tensor& dy, const Tensor& dgate_up);
void GeluForward(const Tensor& x, const Tensor& y);
void GeluBackward(const Tensor& x, const Tensor& dy, const Tensor& dx);
void AddForward(const Tensor& a, const Tensor& b, const Tensor& y);

// --- model/ops/embedding.h. ids: [tokens] int32; table: [rows, width]; y, dy: [tokens, width].

// y[t] = table[ids[t]] + position_table[positions[t]]; positions and their table null: without.
void EmbeddingForward(const Tensor& ids, const Tensor& table, const Tensor& positions,
                      const Tensor& position_table, const Tensor& y);
// dtable[ids[t]] += dy[t], for each row in the order of its tokens.
void EmbeddingBackward(const Tensor& ids, const Tensor& dy, const Tensor& dtable);

// --- model/ops/dropout.h

// y = (residual, unless null) + mask x scale, with the CPU's mask. x, residual, y: [batch, length,
// width]; positions: [length] int32.
void DropoutApply(const DropoutMask& mask, const Tensor& positions, const Tensor& x,
                  const Tensor& residual, const Tensor& y);

}  // namespace cuda
}  // namespace burst
