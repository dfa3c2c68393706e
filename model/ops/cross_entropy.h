// The LM head and its loss in one op: softmax cross-entropy of x W^T without ever holding all
// logits (as Liger Kernel, arXiv 2410.10989, and cut cross-entropy, arXiv 2411.09009, do on GPUs).
#pragma once

#include <cstdint>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// scale * sum over tokens with a target of -log softmax(x W^T)[target]: a scalar, float32 where x
// is bfloat16.
// x: [..., width]; weight: [vocab, width]; targets: int32, one for each row of x, in [0, vocab), or
// -1: no loss. Logits exist for `chunk` tokens at a time; 0: as many as fit in kLogitBytes.
//
// When a gradient is needed the forward makes it too, chunk by chunk while the logits are there,
// for an upstream gradient of 1; the backward only scales and adds it.
inline constexpr int64_t kLogitBytes = int64_t{128} << 20;  // on the CPU
Variable LinearCrossEntropy(Tape& tape, const Variable& x, const Variable& weight,
                            const Tensor& targets, double scale, int64_t chunk = 0);

}  // namespace burst
