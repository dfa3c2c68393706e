#!/usr/bin/env python3
"""Compares attention on a GPU behind burst's interface with PyTorch's, in one run. Prints TFLOP/s.

    attention_gpu.py BENCHMARK [quick] [only=REGEX] [FILE.json]

BENCHMARK is the binary attention_gpu_benchmark. The columns are the kernels that the device chooses, the
kernels for any tensor cores (sm80), and FlashAttention-2 and cuDNN through PyTorch's SDPA. The sides
alternate, and a figure is the median of three rounds. A forward has 2 * batch * heads * (head_dim + value_dim) *
(visible pairs) FLOPs. A backward has 2 * batch * heads * (3 * head_dim + 2 * value_dim) * (visible pairs), and goes
from (out, dout) to bf16 gradients. value_dim is the head_dim of v. The inputs are standard normals in bf16.
"""

import math
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend

from harness import Words, call_ms, medians, normals, sdpa, turns, write

MILLISECONDS = 15  # the length of a measurement
ROUNDS = 3


class Ours:
    def __init__(self, benchmark, kernels):
        self.benchmark, self.kernels = benchmark, kernels

    def ms(self, name, batch, seqlen, heads, kv_heads, head_dim, value_dim, causal):
        if self.kernels == "sm80" and head_dim != value_dim:
            raise RuntimeError("sm80: must be called with one head_dim")
        print(name, self.kernels, batch, seqlen, heads, kv_heads, head_dim, value_dim, int(causal),
              MILLISECONDS, file=self.benchmark.stdin, flush=True)
        return float(self.benchmark.stdout.readline())


class Theirs:
    def __init__(self, backend):
        self.backend = backend

    def ms(self, name, batch, seqlen, heads, kv_heads, head_dim, value_dim, causal):
        q, k, v, dout = normals(*((batch, seqlen, n, dim) for n, dim in (
            (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        forward = lambda: sdpa(self.backend, *leaves, is_causal=causal)
        out, grad = forward(), dout.transpose(1, 2)
        backward = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
        run = forward if name == "forward" else backward
        call_ms(run)
        return call_ms(run, max(1, int(MILLISECONDS / call_ms(run, 2))))


def main():
    benchmark = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 text=True)
    words = Words(sys.argv[2:])
    columns = {"chosen": Ours(benchmark, "chosen"), "sm80": Ours(benchmark, "sm80"),
               "flash2": Theirs(SDPBackend.FLASH_ATTENTION),
               "cudnn": Theirs(SDPBackend.CUDNN_ATTENTION)}
    sizes = [(16, 1024, 16, 16), (2, 8192, 16, 16)]
    if "quick" not in words:
        sizes += [(1, 16384, 32, 32), (1, 16384, 32, 8)]
    rows = []
    for head_dim, value_dim in ((64, 64), (128, 128), (256, 256), (192, 128)):
        columns_of = {"forward": head_dim + value_dim, "backward": 3 * head_dim + 2 * value_dim}
        for causal in (False, True):
            for batch, seqlen, heads, kv_heads in sizes:
                pairs = seqlen * (seqlen + 1) // 2 if causal else seqlen * seqlen
                for name, columns_of_pass in columns_of.items():
                    flop = 2 * batch * heads * columns_of_pass * pairs
                    of_v = "" if value_dim == head_dim else f" V={value_dim}"
                    label = (f"D={head_dim}{of_v} {'causal' if causal else 'full'} {batch} x {seqlen}, "
                             f"{heads}/{kv_heads} heads, {name}")
                    if not words.wants(label):
                        continue

                    def timed(kernels):
                        try:
                            return kernels.ms(name, batch, seqlen, heads, kv_heads, head_dim, value_dim, causal)
                        except RuntimeError:  # the backend does not serve this shape
                            return math.nan
                    times = medians(turns(columns, ROUNDS, timed, warm=0))
                    rate = {column: round(flop / (ms * 1e9), 1)
                            for column, ms in times.items() if not math.isnan(ms)}
                    rows.append({"case": label, "tflops": rate})
                    print(f"{label:48}" + "".join(f"{column} {x:6.1f}  "
                                                  for column, x in rate.items()), flush=True)
    write(words.path, rows)


main()
