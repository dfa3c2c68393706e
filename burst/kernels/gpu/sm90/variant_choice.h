// Chooses the row of variants.bzl that computes a call.
#pragma once

#include <cstdint>

#include "burst/kernels/gpu/sm90/variant_table.h"
#include "burst/kernels/limits.h"

namespace burst {
namespace sm90 {

// The mask of a variant: none, KeyRanges or KeyBlocks.
enum class MaskForm { kFull, kRanges, kLists };

// The properties of a call on which the choice depends.
struct Call {
  HeadWidths widths = 0;
  int64_t q_len = 0, k_len = 0;
  MaskForm mask = MaskForm::kFull;
  int64_t most_queries = 0;  // KeyRanges::most_queries; 0: not known
  // Whether the backward has a fixed order and one block takes all query heads of a tile of keys.
  // Split heads gain nothing by the variants for a fixed order.
  bool ordered = false;

  // Returns whether a row of these widths has room for the call's heads. Heads of one width take
  // rows of one width, and others take the other rows.
  bool FitInto(const HeadWidths& row) const {
    return widths.head_dim <= row.head_dim && widths.value_dim <= row.value_dim &&
           widths.equal() == row.equal();
  }

  // Returns whether a row fits the call: FitsForwardD64Full() and so on.
#define BURST_FITS(name, most_head_dim, most_value_dim, form, when, ...)                 \
  bool Fits##name() const {                                                              \
    return FitInto({most_head_dim, most_value_dim}) && mask == MaskForm::form && (when); \
  }
  BURST_SM90_FORWARD(BURST_FITS)
  BURST_SM90_FORWARD_FP8(BURST_FITS)
  BURST_SM90_BACKWARD(BURST_FITS)
  BURST_SM90_BACKWARD_DV(BURST_FITS)
  BURST_SM90_BACKWARD_DK(BURST_FITS)
#undef BURST_FITS
};

}  // namespace sm90
}  // namespace burst
