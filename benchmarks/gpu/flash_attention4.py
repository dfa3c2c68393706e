"""FlashAttention-4's kernels for Hopper, a peer of attention_peers.py.

The package is flash-attn-4 with nvidia-cutlass-dsl[cu13]. It compiles a kernel at its first call.
"""

import importlib.metadata

import flash_attn.cute.interface as interface
import torch


def versions():
    return {"flash_attn_4": importlib.metadata.version("flash-attn-4")}


class FlashAttention4:
    """Computes attention of a Case's tensors. Packed documents are [tokens, heads, head_dim] and their starts."""

    def __init__(self, case):
        self.packed = case.lengths is not None
        self.tensors = [x[0] if self.packed else x for x in (case.q, case.k, case.v)]
        self.dout = case.dout[0] if self.packed else case.dout
        self.options = {"softmax_scale": case.scale, "causal": case.mask in ("causal", "documents")}
        if case.window:
            self.options |= {"window_size_left": case.window - 1, "window_size_right": 0}
        if self.packed:
            starts = torch.tensor([0, *case.lengths], device="cuda", dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self.options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(case.lengths),
                             "max_seqlen_k": max(case.lengths)}
        self.out = torch.empty_like(self.dout)
        *outer, heads, _ = self.dout.shape  # batch and tokens, or the tokens of all documents
        self.lse = torch.empty((*outer[:-1], heads, outer[-1]), device="cuda")
        self.gradients = [torch.empty_like(x) for x in self.tensors]

    def forward(self):
        """Returns the call that computes out, and its log-sum-exps."""
        def call():
            interface._flash_attn_fwd(*self.tensors, out=self.out, lse=self.lse, return_lse=True, **self.options)
            return [self.out]
        return call

    def backward(self, deterministic):
        """Returns the call that computes dq, dk and dv."""
        self.forward()()
        dq, dk, dv = self.gradients

        def call():
            interface._flash_attn_bwd(*self.tensors, self.out, self.dout, self.lse, dq=dq, dk=dk, dv=dv,
                                      deterministic=deterministic, **self.options)
            return self.gradients
        return call
