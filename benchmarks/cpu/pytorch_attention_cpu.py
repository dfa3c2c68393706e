#!/usr/bin/env python3
"""Times burst.attention on a CPU next to PyTorch's scaled_dot_product_attention, in turns in one process:

  benchmarks/cpu/pytorch_attention_cpu.py [--out=FILE] [--threads=1] [--rounds=7] [--seqlens=1024,8192]

It needs the wheel of //python:wheel, or PYTHONPATH=python and $BURST_LIBRARY. --config=portable makes a library for
AVX2; ATEN_CPU_CAPABILITY=avx2 and MKL_ENABLE_INSTRUCTIONS=AVX2 make PyTorch use AVX2, too. Figures are medians of
GFLOP/s. One thread is timed by the processor's time, which other programs change least, several by the clock.
"""

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

import burst

from cpu_results import write

TOKENS_OF_HEADS = 16384  # heads * tokens of a problem, at least two heads
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def sides(shape, dtype, causal):
    """Returns by name a function that computes attention, its inputs and the gradient of out."""
    def inputs(heads_first):
        batch, tokens, heads, head_dim = shape
        size = (batch, heads, tokens, head_dim) if heads_first else shape
        return [torch.randn(size, dtype=dtype).requires_grad_() for _ in range(3)], torch.randn(size, dtype=dtype)

    return {"burst": (lambda q, k, v: burst.attention(q, k, v, causal=causal), *inputs(False)),
            "pytorch": (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal), *inputs(True))}


def measure(shape, dtype, causal, rounds, clock):
    """Returns GFLOP/s by pass and side."""
    found = {}
    for number in range(1 + rounds):
        for name, (attend, tensors, gradient) in sides(shape, dtype, causal).items():
            begin = clock()
            out = attend(*tensors)
            middle = clock()
            torch.autograd.grad(out, tensors, gradient)
            end = clock()
            if number > 0:  # the first round warms up
                found.setdefault(("forward", name), []).append(middle - begin)
                found.setdefault(("backward", name), []).append(end - middle)
    batch, tokens, heads, head_dim = shape
    pairs = tokens * (tokens + 1) / 2 if causal else tokens * tokens
    flops = 4 * batch * heads * head_dim * pairs
    rates = {"forward": {}, "backward": {}}
    for (part, name), seconds in found.items():
        work = flops * (1 if part == "forward" else 2.5)
        rates[part][name] = round(work / statistics.median(seconds) / 1e9, 1)
    for rate in rates.values():
        rate["ratio"] = round(rate["burst"] / rate["pytorch"], 2)
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seqlens", default="1024,2048,4096,8192")
    parser.add_argument("--head_dims", default="64,128")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    rows = []
    for dtype in options.dtypes.split(","):
        for head_dim in map(int, options.head_dims.split(",")):
            for tokens in map(int, options.seqlens.split(",")):
                for causal in (False, True):
                    heads = max(2, TOKENS_OF_HEADS // tokens * 64 // head_dim)
                    rates = measure((1, tokens, heads, head_dim), DTYPES[dtype], causal, options.rounds, clock)
                    rows.append({"dtype": dtype, "head_dim": head_dim, "tokens": tokens, "heads": heads,
                                 "causal": causal, **rates})
                    print(json.dumps(rows[-1]), flush=True)
    write(options.out, rows, threads=options.threads, clock=clock.__name__)


if __name__ == "__main__":
    main()
