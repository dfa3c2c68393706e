// The instantiations of the kernels, one a file.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm80 {

// Where rows of results go.
enum class Store {
  kBf16,            // assigned
  kFloat,           // assigned
  kFloatAccumulate  // row = keep * row + result
};

void ForwardD64(const FlashForwardParams& params);
void ForwardD128(const FlashForwardParams& params);
void ForwardD256(const FlashForwardParams& params);

// params.dq is float32 and added to; dk and dv as `store` says.
void BackwardD64(const FlashBackwardParams& params, Store store);
void BackwardD128(const FlashBackwardParams& params, Store store);
void BackwardD256(const FlashBackwardParams& params, Store store);

}  // namespace sm80
}  // namespace burst
