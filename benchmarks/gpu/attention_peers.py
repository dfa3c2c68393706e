#!/usr/bin/env python3
"""Compares the Hopper attention kernels with FlashAttention-3, cuDNN and other builds of ours, in one process.

    attention_peers.py LIBRARY fa3=LIBRARY [NAME=LIBRARY...] [OPTION...]

LIBRARY is libburst_sm90.so. NAME=LIBRARY is another build, for example an earlier commit's. fa3 is
libdew_flash_attn3.so of the wheel dew-flash-attn-cu13 0.3.6, which is called through JAX's FFI.

Options: forward or backward (else both), quick (up to 16K tokens), only=REGEX, rounds=N (9), FILE.json (where to write).

A forward has 4 * batch * heads * head_dim * (visible query-key pairs) FLOPs, a backward 2.5 times as many. In each
round every side makes calls for about 30 ms. The sides come in random order, because a GPU at its power limit is
faster after a side that took less power. A figure in TFLOP/s is the median of the rounds by wall clock. Our backward
is timed in a fixed order (the default) and free; the peers' backward passes are not deterministic. First, every side's
results are compared with FlashAttention-3's.
"""

import ctypes
import os
import random
import re
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import torch

import sm90_kernels as base
from harness import document_lengths, medians, turns, write

BATCH_SECONDS = 0.03
LARGEST_DIFFERENCE = 0.02  # a relative difference of norms; two roundings to bfloat16 make 0.004


def load_fa3(path):
    library = ctypes.CDLL(path)
    for call in ("fwd", "bwd", "varlen_fwd", "varlen_bwd"):
        function = getattr(library, "dew_flash3_mha_" + call)
        jax.ffi.register_ffi_target("fa3_" + call, jax.ffi.pycapsule(function), platform="CUDA")


class FlashAttention3:
    """Calls FlashAttention-3 on the tensors of a Case. Packed documents are [tokens, heads, head_dim] and their
    starts."""

    def __init__(self, case):
        self.packed = case.lengths is not None
        shape = jax.ShapeDtypeStruct
        tensors = (case.q, case.k, case.v, case.dout)
        self.q, self.k, self.v, self.dout = (self._jax(x[0] if self.packed else x) for x in tensors)
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

    @staticmethod
    def _jax(tensor):
        return jnp.asarray(jax.dlpack.from_dlpack(tensor.contiguous()))

    def forward(self):
        return self._forward(self.q, self.k, self.v)[:1]

    def backward(self):
        return self._backward(self.dout, self.q, self.k, self.v, self.out, self.lse)


class Case:
    def __init__(self, name, batch, tokens, heads, kv_heads, dim, mask, lengths=None, window=None):
        self.name, self.batch, self.tokens, self.mask = name, batch, tokens, mask
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.lengths, self.window = lengths, window
        self.scale = dim ** -0.5
        self.label = f"{name} {batch}x{tokens} {heads}/{kv_heads} D{dim} {mask}"

    def allocate(self):
        self.q, self.k, self.v, self.dout = base.make(self.batch, self.tokens, self.tokens, self.heads,
                                                      self.kv_heads, self.dim, 1.0)
        self.ranges = {"full": lambda: None,
                       "causal": lambda: base.causal(self.tokens, self.tokens),
                       "window": lambda: base.window(self.tokens, self.tokens, self.window),
                       "documents": lambda: base.documents(self.lengths)}[self.mask]()
        self.flop = 4 * base.visible_pairs(self.q, self.k, self.ranges) * self.heads * self.dim


def our_sides(libraries, case, backward):
    """Returns by name a function that calls a library, and the tensors that it fills."""
    sides = {}
    for name, kernels in libraries.items():
        out = torch.full_like(case.q, float("nan"))
        lse = torch.empty((case.batch, case.heads, case.tokens), device="cuda")
        forward = lambda kernels=kernels, out=out, lse=lse: kernels.forward(
            case.q, case.k, case.v, case.scale, case.ranges, out, lse)
        if not backward:
            sides[name] = forward, [out]
            continue
        forward()
        delta = torch.empty_like(lse)
        gradients = [torch.full_like(x, float("nan")) for x in (case.q, case.k, case.v)]
        for suffix, deterministic in (("", True), (" free", False)):
            sides[name + suffix] = (
                lambda kernels=kernels, out=out, lse=lse, delta=delta, gradients=gradients,
                deterministic=deterministic: kernels.backward(
                    case.q, case.k, case.v, case.scale, case.ranges, out, lse, case.dout,
                    *gradients, delta, deterministic=deterministic)), gradients
    return sides


def cudnn_side(case, backward):
    if not backward:
        return lambda: base.cudnn_forward(case.q, case.k, case.v, case.scale, case.mask == "causal")
    return base.cudnn_backward(case.q, case.k, case.v, case.dout, case.scale, case.mask == "causal")


def seconds(functions, seconds_a_call, rounds):
    """Returns by name the median of seconds a call."""
    calls = max(1, min(20, int(BATCH_SECONDS / seconds_a_call)))

    def timed(function):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)  # returns at once, unless the call is FlashAttention-3's
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls
    return medians(turns(functions, rounds, timed, order=random.Random(0).shuffle))


def measure(case, libraries, backward, rounds):
    fa3 = FlashAttention3(case)
    ours = our_sides(libraries, case, backward)
    functions = {"fa3": fa3.backward if backward else fa3.forward}
    truth = [torch.from_dlpack(x) for x in functions["fa3"]()]
    row = {"pass": "backward" if backward else "forward", "case": case.name, "batch": case.batch,
           "tokens": case.tokens, "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.dim,
           "mask": case.mask}
    differences = {}
    for name, (function, results) in ours.items():
        function()
        torch.cuda.synchronize()
        differences[name] = max(
            ((x.view(t.shape).float() - t.float()).norm() / t.float().norm()).item()
            for x, t in zip(results, truth))
        functions[name] = function
        if not differences[name] <= LARGEST_DIFFERENCE:
            sys.exit(f"{case.label}: results of {name} differ from FlashAttention-3's by "
                     f"{differences[name]:.2g}")
    if case.mask in ("full", "causal") and case.dim <= 128:
        functions["cudnn"] = cudnn_side(case, backward)
    flop = case.flop * (2.5 if backward else 1)
    tflops = {name: flop / s / 1e12 for name, s in seconds(functions, flop / 6e14, rounds).items()}
    row.update(tflops=tflops, largest_difference_from_fa3=max(differences.values()))
    print(f"{row['pass']:8} {case.label:38} " + "  ".join(
        f"{name} {x:.0f}" + ("" if name == "fa3" else f" ({x / tflops['fa3']:.2f})")
        for name, x in tflops.items()), flush=True)
    return row


def all_cases(quick):
    lengths = (4096, 8192, 16384) if quick else (4096, 8192, 16384, 32768, 65536)
    for dim in (128, 64):
        for mask in ("full", "causal"):
            for tokens in lengths:
                yield Case("long", 1, tokens, 32, 32, dim, mask)
    for dim in (96, 192, 256):
        for mask in ("full", "causal"):
            yield Case("wide", 1, 16384, 16, 16, dim, mask)
    for heads, kv_heads in ((64, 8), (32, 8), (16, 8), (8, 1)):
        for tokens in (8192, 16384):
            yield Case("grouped", 1, tokens, heads, kv_heads, 128, "causal")
    yield Case("gpt2", 64, 1024, 12, 12, 64, "causal")
    for batch, tokens in ((16, 512), (16, 2048), (8, 4096)):
        for mask in ("full", "causal"):
            yield Case("short", batch, tokens, 32, 32, 128, mask)
    if quick:
        return
    yield Case("packed", 1, 65536, 32, 32, 128, "documents", lengths=document_lengths(65536))
    yield Case("window", 1, 65536, 32, 32, 128, "window", window=4096)


def main():
    libraries, fa3, passes, quick, pattern, rounds, path = {}, None, (False, True), False, "", 9, None
    for argument in sys.argv[1:]:
        key, equals, value = argument.partition("=")
        if argument in ("forward", "backward"):
            passes = (argument == "backward",)
        elif argument == "quick":
            quick = True
        elif argument.endswith(".json"):
            path = argument
        elif equals and key == "only":
            pattern = value
        elif equals and key == "rounds" and value.isdigit() and int(value) > 0:
            rounds = int(value)
        elif (value if equals else argument).endswith(".so"):
            library = value if equals else argument
            if not os.path.isfile(library):
                sys.exit(f"attention_peers.py: no file {library}")
            if equals and key == "fa3":
                fa3 = library
            else:
                libraries[key if equals else "ours"] = os.path.abspath(library)
        else:
            sys.exit(f"attention_peers.py: no option {argument}\n\n{__doc__}")
    if "ours" not in libraries or fa3 is None:
        sys.exit(f"attention_peers.py needs LIBRARY and fa3=LIBRARY\n\n{__doc__}")
    load_fa3(os.path.abspath(fa3))
    kernels = {name: base.Kernels(library) for name, library in libraries.items()}
    rows = []
    for case in all_cases(quick):
        if not re.search(pattern, case.label):
            continue
        case.allocate()
        for backward in passes:
            rows.append(measure(case, kernels, backward, rounds))
    write(path, rows, jax=jax.__version__, rounds=rounds)


if __name__ == "__main__":
    main()
