// Rounds Q, K and V to 8 bits (e4m3) for the forward, by FlashAttention-3's block quantization and
// incoherent processing (Shah et al., arXiv 2407.08608, section 3.3).
//
// A block is kFp8Block tokens of one head. Its largest magnitude becomes 448, the largest number of
// e4m3. Before that, Q and K are multiplied by the same orthogonal matrix: signs, then a Hadamard
// matrix of size 128. Q K^T stays as it is. A channel of large values is spread over all channels,
// so it does not take bits from the others.
//
// V is transposed, because wgmma needs 8-bit operands with the summed index innermost. In every 16
// keys, byte p holds key 8 (p % 4 / 2) + 2 (p / 4) + p % 2. In this order a thread's accumulators
// of S are its part of operand P, without a shuffle.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

inline constexpr int64_t kFp8Block = 128;
inline constexpr int64_t kFp8HeadDim = 128;  // all rows are padded to it

// Contiguous operands. x = scale * its 8 bits; Q and K are x after the multiplication.
struct Fp8Operands {
  uint8_t* q = nullptr;  // [batch, num_heads, q_len, 128]
  uint8_t* k = nullptr;  // [batch, num_kv_heads, k_len, 128]
  uint8_t* v = nullptr;  // [batch, num_kv_heads, 128, k_len to whole blocks], zeros beyond k_len
  float* q_scales = nullptr;                       // [batch, num_heads, blocks of q_len]
  float *k_scales = nullptr, *v_scales = nullptr;  // [batch, num_kv_heads, blocks of k_len]
};

// Returns the bytes that the operands take; next, the place of each in memory of that size, which
// is aligned to 256 bytes.
int64_t Fp8OperandBytes(const FlashAttentionShape& shape);
Fp8Operands Fp8OperandsIn(const FlashAttentionShape& shape, uint8_t* memory);

// Quantizes q, k and v of the call, on the thread's stream. Numbers that are not finite become NaN.
void QuantizeFp8(const FlashForwardParams& params, const Fp8Operands& operands);

}  // namespace sm90
}  // namespace burst
