#!/usr/bin/env python3
"""Compares what carries a ring's messages between processes, CUDA IPC or NCCL, over several GPUs of one host:

  torchrun --nproc_per_node=2 benchmarks/gpu/ring_messages.py [--out=FILE] [--program=FILE]

Two groups of the same ranks call burst.attention in turns: 32 heads of 128, bf16, causal and full. One of them is
made with BURST_IPC=1. --tokens counts a rank's tokens. A figure in milliseconds is the median of the slowest rank.
"gpu" is the GPUs' time while the host is ahead, "wall" the time of calls in a row by the clock. The side "compared"
leaves seqlen= out, so its ranks compare their arguments in every call. --program is the built //benchmarks:scaling,
whose ranks are threads. It runs before and after, on the same GPUs.

A profile of one call of each side counts the kernels of NCCL and the copies. With IPC it must show no kernel of NCCL.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist

import burst
from harness import medians, normals, slowest_rank_ms, turns, write

HEADS, HEAD_DIM, CALLS = 32, 128, 8


def connected(variable):
    """Returns a group of all ranks that was connected with BURST_IPC as given."""
    os.environ["BURST_IPC"] = variable
    group = dist.new_group()
    burst.connect(group, "cuda")
    return group


def wall_ms(function):
    """Returns the slowest rank's milliseconds by the clock for one of several calls in a row."""
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        function()
    torch.cuda.synchronize()
    slowest = torch.tensor([1e3 * (time.perf_counter() - begin) / CALLS], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def profiled(function):
    """Returns by kind the count and the microseconds of one call's kernels of NCCL and its copies."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    found = {}
    for event in profile.events():
        kind = "NCCL" if "nccl" in event.name else event.name if "Memcpy" in event.name else None
        if kind:
            count, microseconds = found.get(kind, (0, 0))
            found[kind] = count + 1, round(microseconds + event.time_range.elapsed_us(), 1)
    return found


def sides_of(groups, tokens, causal):
    """Returns two dicts of functions by the side's name: forwards and backwards."""
    q, k, v, dout = normals(*[(1, tokens, HEADS, HEAD_DIM)] * 4)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    forwards, backwards = {}, {}
    for name, group, promised in (("IPC", groups[1], True), ("NCCL", groups[0], True),
                                  ("IPC, compared", groups[1], False)):
        arguments = dict(group=group, causal=causal, layout="zigzag" if causal else "contiguous")
        if promised:
            arguments["seqlen"] = tokens * dist.get_world_size()
        out = burst.attention(*inputs, **arguments)

        def forward(arguments=arguments):
            with torch.no_grad():
                burst.attention(*inputs, **arguments)

        def backward(out=out):
            torch.autograd.grad(out, inputs, dout, retain_graph=True)
        forwards[name] = forward
        if promised:  # a backward compares nothing
            backwards[name] = backward
    return forwards, backwards


def measure(groups, tokens, causal, repeats):
    row = {"tokens a GPU": tokens, "ranks": dist.get_world_size(), "causal": causal}
    longest = tokens * HEADS * HEAD_DIM * 2
    for what, sides in zip(("forward", "backward"), sides_of(groups, tokens, causal)):
        row[what] = {
            "gpu ms": medians(turns(sides, repeats, lambda side: slowest_rank_ms(side, calls=CALLS))),
            "wall ms": medians(turns(sides, repeats, wall_ms)),
            "profile": {name: profiled(side) for name, side in sides.items()}}
        carried = {name: "NCCL" in found for name, found in row[what]["profile"].items()}
        if not carried["NCCL"] or (what == "forward" and longest <= 16 << 20 and carried["IPC"]):
            raise RuntimeError("profile: must show kernels of NCCL with NCCL only; got %s; see whether the GPUs "
                               "reach each other's memory" % carried)
    return row


def run_program(program, lengths, causal):
    """Returns the C++ program's milliseconds by a rank's tokens."""
    ranks = dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("MASTER_", "TORCHELASTIC_")) and
                       name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        subprocess.run([program, "--heads=%d" % HEADS, "--head_dim=%d" % HEAD_DIM, "--strategies=burst", "--nocompare",
                        "--mask=" + ("causal" if causal else "full"), "--ranks=%d" % ranks, "--repeats=9",
                        "--seqlens=" + ",".join(str(n * ranks) for n in lengths), "--out=" + folder],
                       check=True, env=environment)
        with open(os.path.join(folder, "attention.json")) as file:
            rows = json.load(file)["rows"]
    return {row["seqlen"] // ranks: {"forward": row["forward_ms"],
                                     "backward": row["forward_backward_ms"] - row["forward_ms"]} for row in rows}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--program")
    parser.add_argument("--tokens", default="1024,2048,4096,8192")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    on_hosts = dist.new_group(backend="gloo")
    groups = {variable: connected(str(variable)) for variable in (0, 1)}
    lengths, rows = [int(n) for n in options.tokens.split(",")], []

    def add_program(when):
        torch.cuda.synchronize()
        if options.program and dist.get_rank() == 0:
            for causal in (True, False):
                row = {"program": when, "causal": causal, "ms": run_program(options.program, lengths, causal)}
                rows.append(row)
                print(json.dumps(row), flush=True)
        dist.barrier(on_hosts)

    add_program("before")
    for causal in (True, False):
        for tokens in lengths:
            rows.append(measure(groups, tokens, causal, options.repeats))
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
    add_program("after")
    write(options.out if dist.get_rank() == 0 else None, rows)
    burst.disconnect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
