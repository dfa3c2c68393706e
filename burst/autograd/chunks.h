// Functions that process a batch in chunks of `chunk` tokens. A chunk is a range of one sequence's
// tokens, or several whole sequences. A chunk's result has the same bits, whatever else the rank
// holds. So it does not depend on how sequences and their chunks are spread over ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/exact_sum.h"

namespace burst {

// The tokens [begin, begin + length) of the batch rows [row, row + rows) that this rank has.
struct TokenChunk {
  int64_t row = 0, rows = 1;
  int64_t begin = 0, length = 0;

  // Returns the chunk's part of a contiguous tensor [batch, length, ...], as [rows, length of the
  // chunk, ...].
  Tensor Of(const Tensor& all) const;
};

struct ChunkOptions {
  int64_t batch = 0, length = 0;  // shape of the inputs
  int64_t tokens = 0;             // a chunk's tokens of one sequence; divides length
  // The number of sequences in a chunk; the last chunk of a batch may have fewer. More than one
  // only if `tokens` is the whole length.
  int64_t rows = 1;
  // Called after the backward of every chunk, to take the gradients of parameters: they then belong
  // to this chunk alone.
  std::function<void()> chunk_done;
};

// Computes y, or the loss, of a chunk of the inputs, on the tape that it is given.
using ChunkFunction = std::function<Variable(Tape& tape, const std::vector<Variable>& inputs,
                                             const TokenChunk& chunk)>;

// Runs `function` on each chunk and returns the results as one tensor [batch, length, trailing...]
// of `dtype`. inputs: [batch, length, ...], contiguous; may be empty. `use` says whether the
// result's value is read, also on the tapes of the function.
Variable InChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                  const Shape& trailing, DType dtype, DeviceType device,
                  const ChunkFunction& function, ResultUse use = ResultUse::kRead);

// Returns the sum of the chunks' losses, each a scalar, as a float64 scalar. It is added exactly
// (burst/tensor/exact_sum.h), so the sums of several ranks add up to the same bits in any order.
//
// On a tape that records, each chunk's backward follows its forward at once, and only the gradients
// of `inputs` are kept. The parameters have their gradients when this returns. So the sum must be
// the value from which the backward starts, with a gradient of 1.
Variable SumOfChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                     DeviceType device, const ExactGrid& grid, const ChunkFunction& function);

}  // namespace burst
