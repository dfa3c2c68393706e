// Softmax and cross-entropy of logits in place, and scaling by a number on the GPU.
#pragma once

#include <cstdint>

#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// losses[i] = -log softmax(logits[i])[targets[i]], 0 for a target of -1. With `gradient`, the
// logits become scale (softmax - onehot), 0 for a target of -1 and behind the vocabulary. logits:
// [rows, stride], of which the first vocab count; stride is a multiple of 16 bytes; targets: [rows]
// int32; losses: [rows], of the accumulator's type of the logits. A target outside [-1, vocab)
// traps: data is checked where it is read. With `gradient`, scale > 0.
void SoftmaxCrossEntropy(const Tensor& logits, int64_t rows, int64_t vocab, int64_t stride,
                         const int32_t* targets, double scale, bool gradient, void* losses);

// total = scale * sum of losses [n], in a fixed order. total: [] of the losses' dtype.
void SumLosses(const Tensor& losses, double scale, const Tensor& total);

// y *= factor, factor: [] of y's accumulator type, on the GPU. Reads y only when factor is not 1.
void ScaleBy(const Tensor& y, const Tensor& factor);
// y = factor x, or with `add` y += that; y: float32 or float64; x: like y.
void ScaleInto(const Tensor& y, const Tensor& x, const Tensor& factor, bool add);

}  // namespace cuda
}  // namespace burst
