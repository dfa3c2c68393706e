// Linear attention over ranks: a ring of states instead of a ring of keys, in plain loops. Compare
// examples/ring_on_one_page.h and docs/other-attention.md.
//
// Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236). With phi(x) = elu(x) + 1 in
// place of the exponential of a score, a token needs only one state for all tokens before it,
// whatever their number:
//
//   S_i = sum_{j <= i} phi(K_j)^T [V_j, 1]        [d, d + 1]
//   [N_i, D_i] = phi(Q_i) S_i                     O_i = N_i / D_i
//
// Each rank has consecutive tokens, and sums their state. It receives the state of all earlier
// tokens from the previous rank, and sends the sum of both to the next rank. That is one message of
// d (d + 1) numbers a head, at any length of the sequence. The backward goes from the last rank to
// the first.
//
// The code is for one sequence and one head in float64 on the CPU.
// //tests/attention:linear_attention_test checks it.
#pragma once

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "examples/ring_on_one_page.h"

namespace burst {

// The tensors that the backward needs in addition to the inputs and out.
struct LinearAttentionState {
  Matrix before;       // S of all tokens before this rank's tokens, [d, d + 1]
  Matrix denominator;  // D of this rank's tokens, [n, 1]
};

// Computes out of q, k and v, all [n, d] for this rank's n >= 0 tokens, which follow the previous
// rank's tokens. Assigns out and state. Collective.
absl::Status LinearAttentionForward(const Matrix& q, const Matrix& k, const Matrix& v,
                                    Communicator& comm, Matrix* out, LinearAttentionState* state);

// Computes the gradients of a loss from dout = d loss / d out, shaped like out. Assigns dq, dk and
// dv, shaped like q, k and v. Collective.
absl::Status LinearAttentionBackward(const Matrix& q, const Matrix& k, const Matrix& v,
                                     const Matrix& out, const LinearAttentionState& state,
                                     const Matrix& dout, Communicator& comm, Matrix* dq, Matrix* dk,
                                     Matrix* dv);

}  // namespace burst
