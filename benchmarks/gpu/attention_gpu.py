#!/usr/bin/env python3
"""Compares attention on a GPU behind burst's interface with PyTorch's: TFLOP/s, in one run.

    attention_gpu.py BENCHMARK [quick] [only=REGEX] [FILE.json]

BENCHMARK: the binary attention_gpu_benchmark. Columns: the kernels that the device chooses, those
for any tensor cores (sm80), FlashAttention-2 and cuDNN through PyTorch's SDPA; median of three
rounds, in which they alternate. FLOP: forward 4 * batch * heads * head_dim * (visible pairs),
backward 2.5 times that, from (out, dout) to bf16 gradients. Inputs: standard normals, bf16.
"""

import datetime
import json
import re
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

MILLISECONDS = 15  # of a measurement
ROUNDS = 3


class Ours:
    def __init__(self, benchmark, kernels):
        self.benchmark, self.kernels = benchmark, kernels

    def ms(self, name, batch, seqlen, heads, kv_heads, head_dim, causal):
        print(name, self.kernels, batch, seqlen, heads, kv_heads, head_dim, int(causal),
              MILLISECONDS, file=self.benchmark.stdin, flush=True)
        return float(self.benchmark.stdout.readline())


class Theirs:
    def __init__(self, backend):
        self.backend = backend

    def ms(self, name, batch, seqlen, heads, kv_heads, head_dim, causal):
        like = lambda n: torch.randn((batch, seqlen, n, head_dim), dtype=torch.bfloat16,
                                     device="cuda").transpose(1, 2)
        leaves = [like(n).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        dout = like(heads)

        def forward():
            with sdpa_kernel(self.backend):
                return torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=causal, enable_gqa=heads != kv_heads)
        out = forward()
        backward = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
        run = forward if name == "forward" else backward

        def time(runs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(runs):
                run()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / runs
        time(1)
        return time(max(1, int(MILLISECONDS / time(2))))


def main():
    benchmark = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 text=True)
    options = sys.argv[2:]
    only = next((x[5:] for x in options if x.startswith("only=")), "")
    columns = {"chosen": Ours(benchmark, "chosen"), "sm80": Ours(benchmark, "sm80"),
               "flash2": Theirs(SDPBackend.FLASH_ATTENTION),
               "cudnn": Theirs(SDPBackend.CUDNN_ATTENTION)}
    sizes = [(16, 1024, 16, 16), (2, 8192, 16, 16)]
    if "quick" not in options:
        sizes += [(1, 16384, 32, 32), (1, 16384, 32, 8)]
    rows = []
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for batch, seqlen, heads, kv_heads in sizes:
                pairs = seqlen * (seqlen + 1) // 2 if causal else seqlen * seqlen
                flop = 4 * batch * heads * head_dim * pairs
                for name, factor in (("forward", 1), ("backward", 2.5)):
                    label = (f"D={head_dim} {'causal' if causal else 'full'} {batch} x {seqlen}, "
                             f"{heads}/{kv_heads} heads, {name}")
                    if not re.search(only, label):
                        continue
                    times = {column: [] for column in columns}
                    for _ in range(ROUNDS):
                        for column, kernels in columns.items():
                            try:
                                times[column].append(kernels.ms(name, batch, seqlen, heads,
                                                                kv_heads, head_dim, causal))
                            except RuntimeError as error:  # a backend that does not serve it
                                times[column] = []
                    rate = {column: round(factor * flop / (statistics.median(t) * 1e9), 1)
                            for column, t in times.items() if t}
                    rows.append({"case": label, "tflops": rate})
                    print(f"{label:48}" + "".join(f"{column} {x:6.1f}  "
                                                  for column, x in rate.items()), flush=True)
    for path in (x for x in options if x.endswith(".json")):
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True).stdout.splitlines()[0]
        with open(path, "w") as file:
            json.dump({"date": datetime.date.today().isoformat(), "driver": driver,
                       "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                       "rows": rows}, file, indent=1)


main()
