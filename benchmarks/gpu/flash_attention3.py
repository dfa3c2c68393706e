"""FlashAttention-3 through JAX's FFI, a peer of attention_peers.py.

The library is libdew_flash_attn3.so of the wheel dew-flash-attn-cu13 0.3.6.
"""

import ctypes
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch


def load(path):
    library = ctypes.CDLL(path)
    for call in ("fwd", "bwd", "varlen_fwd", "varlen_bwd"):
        function = getattr(library, "dew_flash3_mha_" + call)
        jax.ffi.register_ffi_target("fa3_" + call, jax.ffi.pycapsule(function), platform="CUDA")


wait = jax.block_until_ready


class FlashAttention3:
    """Calls FlashAttention-3 on the tensors of a Case. Packed documents are [tokens, heads, head_dim] and their
    starts."""

    def __init__(self, case):
        self.packed = case.lengths is not None
        shape = jax.ShapeDtypeStruct
        self.source = case.q
        self.q, self.k, self.v, self.dout = (self._jax(x) for x in (case.q, case.k, case.v, case.dout))
        *outer, heads, dim = self.q.shape
        attributes = {"softmax_scale": np.float64(case.scale), "is_causal": case.mask != "full",
                      "window_size_left": np.int64(case.window - 1 if case.window else -1),
                      "window_size_right": np.int64(0 if case.window else -1)}
        begins = ()
        name, sequences = "fa3", outer[0]
        if self.packed:
            begin = jnp.asarray(np.concatenate([[0], np.cumsum(case.lengths)]).astype(np.int32))
            begins = (begin, begin)
            longest = np.int64(max(case.lengths))
            attributes.update(max_seqlen=longest, max_seqlen_k=longest)
            name, sequences = "fa3_varlen", len(case.lengths)
        lse = shape((heads, outer[0]) if self.packed else (outer[0], heads, outer[1]), jnp.float32)
        tokens = outer[0] if self.packed else outer[0] * outer[1]
        scratch = shape((heads * (tokens + 128 * (sequences + 1)),), jnp.float32)
        like = [shape(x.shape, x.dtype) for x in (self.q, self.k, self.v)]
        unused = (shape((1, 1, 1, 1), jnp.float32), shape((1, 1, 1), jnp.float32))

        def forward(q, k, v):
            call = jax.ffi.ffi_call(name + "_fwd", (like[0], lse, *unused))
            return call(q, k, v, *begins, **attributes)[:2]

        def backward(dout, q, k, v, out, lse):
            call = jax.ffi.ffi_call(name + "_bwd", (*like, scratch, scratch))
            return call(dout, q, k, v, out, lse, *begins, **attributes)[:3]

        self._forward, self._backward = jax.jit(forward), jax.jit(backward)
        self.out, self.lse = self._forward(self.q, self.k, self.v)

    def _jax(self, tensor):
        return jnp.asarray(jax.dlpack.from_dlpack((tensor[0] if self.packed else tensor).contiguous()))

    def forward(self):
        return self._forward(self.q, self.k, self.v)[:1]

    def backward(self):
        return self._backward(self.dout, self.q, self.k, self.v, self.out, self.lse)

    def in_order(self, call):
        """Makes a call on JAX's stream between the work of PyTorch's stream before it and after it."""
        self.q = self._jax(self.source)  # JAX's stream waits for PyTorch's
        results = call()
        torch.from_dlpack(results[0])  # PyTorch's stream waits for JAX's
        return results
