// Attention on Hopper (sm_90a): bf16 operands, fp32 statistics and accumulation. Plain structs, so
// that neither CUDA code nor its callers pay for the other's headers. Notation, masks and semantics
// are those of burst/kernels/flash_attention.h.
//
// Serves any head_dim that is a multiple of 8 up to 128 (64 and 128 at full speed), any lengths.
// Tensors are 16-byte aligned and their strides multiples of 16 bytes (TMA). Nothing allocates and
// nothing synchronises with the host: scratch memory comes from the caller.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace burst {
namespace sm90 {

// [batch, seqlen, num_heads, head_dim]; head_dim has stride 1. Strides in elements.
struct Operand {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t seq_stride = 0;
  int64_t head_stride = 0;
};

struct Shape {
  int64_t batch = 0;
  int64_t q_len = 0;
  int64_t k_len = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;  // divides num_heads
  int64_t head_dim = 0;
  float softmax_scale = 0;  // > 0
  // Query row i sees the keys begin[i] <= j < end[i]; both non-decreasing in i. Null: every key.
  const int32_t* begin = nullptr;   // [batch, q_len], rows ranges_batch_stride apart
  const int32_t* end = nullptr;     // both or neither
  int64_t ranges_batch_stride = 0;  // 0: the same for the whole batch
};

struct ForwardParams {
  Shape shape;
  Operand q, k, v;  // bf16
  Operand out;      // bf16, or fp32 when out_is_float
  bool out_is_float = false;
  // fp32: with lse, what earlier calls have left of every row, which this one is merged with. May
  // be `out`. Null data: this is the first call.
  Operand sum;
  float* lse = nullptr;  // [batch, num_heads, q_len], natural logarithm
  // A block for every tile, instead of as many as run at once: kernels of streams of a higher
  // priority get a multiprocessor whenever a tile is done.
  bool non_persistent = false;
  void* workspace = nullptr;
};

// delta = rowsum(dout * out) - dlse
struct DeltaParams {
  Shape shape;   // k_len, num_kv_heads and the mask are not read
  Operand out;   // bf16, or fp32 when out_is_float
  Operand dout;  // bf16
  bool out_is_float = false;
  const float* dlse = nullptr;  // [batch, num_heads, q_len]; null: zero
  float* delta = nullptr;       // [batch, num_heads, q_len]
};

struct BackwardParams {
  Shape shape;
  Operand q, k, v, dout;         // bf16
  const float* lse = nullptr;    // [batch, num_heads, q_len]
  const float* delta = nullptr;  // [batch, num_heads, q_len]
  Operand dq;                    // fp32, always added to
  Operand dk, dv;                // bf16, assigned; fp32, added to, when `add`
  bool add = false;
  // dQ summed in a fixed order: bitwise the same in every run. (dK and dV always are.)
  bool deterministic = false;
  void* workspace = nullptr;
};

// bf16 target = fp32 source; for dQ after the last hop.
struct ConvertParams {
  int64_t batch = 0, seqlen = 0, num_heads = 0, head_dim = 0;
  Operand source;  // fp32
  Operand target;  // bf16
};

// Bytes of scratch memory a call needs, 16-byte aligned. The forward's must be zero before its
// first use, and every call leaves it zero; calls that may run at the same time need their own. The
// backward's needs no initialisation.
size_t ForwardWorkspaceBytes(const Shape& shape);
size_t BackwardWorkspaceBytes(const Shape& shape, bool deterministic);

// cudaErrorInvalidValue: shapes, strides or alignment that the kernels do not serve.
cudaError_t LaunchForward(const ForwardParams& params, cudaStream_t stream);
cudaError_t LaunchDelta(const DeltaParams& params, cudaStream_t stream);
cudaError_t LaunchBackward(const BackwardParams& params, cudaStream_t stream);
cudaError_t LaunchConvert(const ConvertParams& params, cudaStream_t stream);

}  // namespace sm90
}  // namespace burst
