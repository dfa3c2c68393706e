// Makes the inputs of the examples on one page.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/base/philox.h"
#include "examples/ring_on_one_page.h"

namespace burst {

// Returns the rows `positions` of an endless matrix of standard normal numbers with `cols` columns.
// Each stream has another matrix. A token has the same row on any number of ranks.
inline Matrix RandomRows(uint64_t stream, const std::vector<int32_t>& positions, int64_t cols) {
  Matrix matrix(static_cast<int64_t>(positions.size()), cols);
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t c = 0; c < cols; ++c) {
      const PhiloxCounter bits = Philox(/*key=*/1, stream, positions[i] * cols + c);
      matrix[i][c] = NormalFromBits(bits[0], bits[1])[0];
    }
  }
  return matrix;
}

}  // namespace burst
