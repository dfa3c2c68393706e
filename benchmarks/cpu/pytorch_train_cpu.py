#!/usr/bin/env python3
"""Times whole training steps of GPT-2 124M on a CPU: Burst's and PyTorch's, with equal shapes, in turns.

  benchmarks/cpu/pytorch_train_cpu.py BENCHMARK [--out=FILE] [--threads=1] [--rounds=2] [--dtype=float32]

BENCHMARK is the binary train_step_benchmark. --config=portable builds it for AVX2; ATEN_CPU_CAPABILITY=avx2 and
MKL_ENABLE_INSTRUCTIONS=AVX2 make PyTorch use AVX2, too. PyTorch has SDPA and a fused AdamW, eager and compiled; in
bfloat16 it has autocast. Both sides have the first --threads cores.

A figure is the median of whole steps, by the clock (step_ms) and by the processor's time of all threads (cpu_ms). A
ratio divides the time of the faster of eager and compiled PyTorch by Burst's. With one thread it takes the processor's
time, which other programs change least. With several it takes the clock's, because threads that wait also use a core.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "gpu"))
from cpu_results import write  # noqa: E402
from gpu_train_step import MODELS, Model  # noqa: E402
from harness import turns  # noqa: E402

STEPS = 3  # in a turn
SHAPES = {"4x256": (4, 256), "1x1024": (1, 1024)}  # batch, tokens of a sequence
CASES = {"4x256": "gpt2_124M", "1x1024": "gpt2_124M_1x1024"}  # of the benchmark
SUFFIXES = {"float32": "", "bfloat16": "_bf16"}


class Step:
    """Holds PyTorch's model and optimizer. run() takes one training step."""

    def __init__(self, batch, tokens, dtype, compiled):
        torch.manual_seed(0)
        self.dtype = dtype
        self.model = Model(dict(MODELS["d12"], batch=batch, seqlen=tokens))
        self.loss_of = torch.compile(self.loss, dynamic=False) if compiled else self.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                           fused=True)
        ids = torch.randint(MODELS["d12"]["vocab"], (batch, tokens + 1))
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].flatten()
        self.run()  # compiles, and touches all memory

    def loss(self, ids, targets):
        features, weight = self.model.features(ids, None, None)
        return F.cross_entropy(F.linear(features, weight).float(), targets)

    def run(self):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.dtype == "bfloat16"):
            loss = self.loss_of(self.ids, self.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self):
        """Returns the milliseconds of steps: by the clock, and of the processor."""
        times = []
        for _ in range(STEPS):
            begin, busy = time.perf_counter(), time.process_time()
            self.run()
            times.append((1e3 * (time.perf_counter() - begin), 1e3 * (time.process_time() - busy)))
        return times


def burst(binary, case):
    """Runs train_step_benchmark. Returns the median milliseconds of its steps: by the clock, and of the processor."""
    command = [binary, f"--benchmark_filter=/{case}/", "--benchmark_format=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result, = json.loads(output[output.index("{"):])["benchmarks"]
    if result.get("error_occurred"):
        raise SystemExit(f"{result['name']}: {result['error_message']}")
    return [(result["step_ms"], result["cpu_ms"])]


def measure(options, shape):
    batch, tokens = SHAPES[shape]
    case = CASES[shape] + SUFFIXES[options.dtype]
    eager, compiled = (Step(batch, tokens, options.dtype, compiled) for compiled in (False, True))
    sides = {"burst": lambda: burst(options.benchmark, case), "eager": eager.steps, "compiled": compiled.steps}
    found = turns(sides, options.rounds, lambda side: side(), warm=0, order=list.reverse)
    row = {"shape": shape, "dtype": options.dtype, "threads": options.threads}
    for name, results in found.items():
        wall, busy = zip(*(step for steps in results for step in steps))
        row[name] = {"step_ms": round(statistics.median(wall)), "cpu_ms": round(statistics.median(busy))}
    clock = "cpu_ms" if options.threads == 1 else "step_ms"
    best = min(row["eager"][clock], row["compiled"][clock])
    return {**row, "ratio": round(best / row["burst"][clock], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmark")
    parser.add_argument("--out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--dtype", choices=SUFFIXES, default="float32")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.threads])
    torch.set_num_threads(options.threads)
    rows = []
    for shape in options.shapes.split(","):
        rows.append(measure(options, shape))
        print(json.dumps(rows[-1]), flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
