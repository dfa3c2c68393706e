// Rotary position embedding (Su et al., arXiv 2104.09864), channels paired as in Llama on Hugging
// Face: channel i with i + head_dim / 2.
#pragma once

#include <cstdint>
#include <memory>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// cos and sin of position * theta^(-2 i / head_dim), for the positions of one batch. Angles are
// computed in double, so that far positions keep their phase in float.
struct RopeTable {
  Tensor positions;  // [batch, length] int32, >= 0
  Tensor cos, sin;   // [largest position + 1, head_dim / 2]; rows of absent positions are not set
};

// positions: [batch, length] int32. head_dim is even.
std::shared_ptr<const RopeTable> MakeRopeTable(const Tensor& positions, int64_t head_dim,
                                               double theta, DType dtype);

// x, y: [batch, length, heads, head_dim], of the table's batch and length. The first
// `rotated_heads` heads (-1: all) turn, the others (values, behind queries and keys) pass.
Variable Rope(Tape& tape, const Variable& x, std::shared_ptr<const RopeTable> table,
              int64_t rotated_heads = -1);

}  // namespace burst
