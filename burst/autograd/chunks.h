// Functions that take a batch in chunks of `chunk` tokens: consecutive tokens of one sequence, or
// several whole sequences. The result for a chunk has the same bits, whatever else the rank holds.
// So it does not depend on how sequences and their chunks are spread over ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/exact_sum.h"

namespace burst {

// Tokens [begin, begin + length) of the batch rows [row, row + rows), of a rank's tokens.
struct TokenChunk {
  int64_t row = 0, rows = 1;
  int64_t begin = 0, length = 0;

  // Its part of a contiguous tensor [batch, length, ...], as [rows, length of the chunk, ...].
  Tensor Of(const Tensor& all) const;
};

struct ChunkOptions {
  int64_t batch = 0, length = 0;  // of the inputs
  int64_t tokens = 0;             // of a sequence in a chunk; divides length
  // Sequences of a chunk, the last one of a batch may have fewer. More than one if `tokens` is the
  // whole length.
  int64_t rows = 1;
  // Called in the backward after that of every chunk: to take the gradients of parameters, which
  // then are of this chunk alone.
  std::function<void()> chunk_done;
};

// y, or the loss, of a chunk of the inputs; on the tape it is given.
using ChunkFunction = std::function<Variable(Tape& tape, const std::vector<Variable>& inputs,
                                             const TokenChunk& chunk)>;

// inputs: [batch, length, ...], contiguous; maybe none. The result of the chunks, of such shape and
// of `dtype`: [batch, length, trailing...]. `use`: of it; the tapes of the function have the same.
Variable InChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                  const Shape& trailing, DType dtype, DeviceType device,
                  const ChunkFunction& function, ResultUse use = ResultUse::kRead);

// The sum of the chunks' losses, [] each: float64, [], added exactly (burst/tensor/exact_sum.h), so
// that sums of several ranks add up to the same bits in any order. On a tape that records, each
// chunk's backward follows its forward at once, and nothing of it is kept but the gradients of
// `inputs`: parameters have theirs when this returns. So it must be what the backward starts from,
// with a gradient of 1.
Variable SumOfChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                     DeviceType device, const ExactGrid& grid, const ChunkFunction& function);

}  // namespace burst
