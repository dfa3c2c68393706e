// Rows of tables: token embeddings and learned positions.
#pragma once

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// y[..., :] = table[ids[...], :]. ids: [...] int32, each in [0, rows), on the table's device;
// table: [rows, width]. An id out of range is a bug of the caller (checked on the CPU): data is
// validated where it is read.
Variable Embedding(Tape& tape, const Tensor& ids, const Variable& table);

// y[..., :] = table[ids[...], :] + position_table[positions[...], :]; positions like ids.
Variable Embedding(Tape& tape, const Tensor& ids, const Variable& table, const Tensor& positions,
                   const Variable& position_table);

}  // namespace burst
