// Rotary position embedding (Su et al., arXiv 2104.09864), channels paired as in Llama on Hugging
// Face: channel i with i + head_dim / 2.
#pragma once

#include <cstdint>
#include <memory>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// cos and sin of position * theta^(-2 i / head_dim) for the tokens of one batch, made once for all
// layers. Angles are computed in double, so that far positions keep their phase in float.
struct RopeTable {
  Tensor cos, sin;  // [batch * length, head_dim / 2]; float32 for bfloat16 activations
};

// positions: [batch, length] int32, >= 0; the table is on their device. dtype: of the activations.
// head_dim is even, on a GPU at most 512.
std::shared_ptr<const RopeTable> MakeRopeTable(const Tensor& positions, int64_t head_dim,
                                               double theta, DType dtype);

// x, y: [batch, length, heads, head_dim], of the table's batch and length. The first
// `rotated_heads` heads (-1: all) turn, the others (values, behind queries and keys) pass.
Variable Rope(Tape& tape, const Variable& x, std::shared_ptr<const RopeTable> table,
              int64_t rotated_heads = -1);

}  // namespace burst
