// Q, K and V in 8 bits (e4m3) for the forward: FlashAttention-3's block quantization and incoherent
// processing (Shah et al., arXiv 2407.08608, section 3.3).
//
// A block is kFp8Block tokens of one head; its largest magnitude becomes 448, the largest number of
// e4m3. Q and K are multiplied by the same orthogonal matrix before, signs and then a Hadamard
// matrix of size 128: Q K^T stays as it is, and a channel of large values is spread over all, where
// it no longer takes the others' bits.
//
// V is transposed, because wgmma wants 8-bit operands with the summed index innermost. In every 16
// keys, byte p holds key 8 (p % 4 / 2) + 2 (p / 4) + p % 2. In this order a thread's accumulators
// of S are its part of the operand P, without a shuffle.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

inline constexpr int64_t kFp8Block = 128;
inline constexpr int64_t kFp8HeadDim = 128;  // all rows are padded to it

// Contiguous; x = scale * its 8 bits, of Q and K after the multiplication.
struct Fp8Operands {
  uint8_t* q = nullptr;  // [batch, num_heads, q_len, 128]
  uint8_t* k = nullptr;  // [batch, num_kv_heads, k_len, 128]
  uint8_t* v = nullptr;  // [batch, num_kv_heads, 128, k_len to whole blocks], beyond k_len zeros
  float* q_scales = nullptr;                       // [batch, num_heads, blocks of q_len]
  float *k_scales = nullptr, *v_scales = nullptr;  // [batch, num_kv_heads, blocks of k_len]
};

// The bytes that the operands take, and the place of each in memory of that size, aligned to 256
// bytes.
int64_t Fp8OperandBytes(const FlashAttentionShape& shape);
Fp8Operands Fp8OperandsIn(const FlashAttentionShape& shape, uint8_t* memory);

// q, k and v of the call -> operands. Not finite ones become NaN. Queued on the thread's stream.
void QuantizeFp8(const FlashForwardParams& params, const Fp8Operands& operands);

}  // namespace sm90
}  // namespace burst
