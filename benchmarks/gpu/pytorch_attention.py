#!/usr/bin/env python3
"""Compares burst.attention from PyTorch on GPUs with peers, on the same inputs in the same run, in turns:

  torchrun --nproc_per_node=2 benchmarks/gpu/pytorch_attention.py [--out=FILE] [--seqlens=32768,...]

Over the ranks it times the ring with 32 heads of 128, bf16, forward and backward, and torch's
context_parallel with cuDNN (causal only). On one GPU (rank 0; the other ranks wait) it times 16 x 2,048 and
64 x 1,024 tokens, and scaled_dot_product_attention with cuDNN. It also measures the host's time of a call
while the GPU is busy: after a barrier, and for calls in a row. If PEERS names a folder with ring_flash_attn
and burst_attn, they run, too. A figure is the median of the slowest rank's GPU times.
"""

import contextlib
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

import burst
from harness import AHEAD, medians, normals, slowest_rank_ms, turns, write

HEADS, HEAD_DIM = 32, 128


def milliseconds(sides, repeats, calls=1):
    return medians(turns(sides, repeats, lambda side: slowest_rank_ms(side, calls)))


def peers():
    """Returns by name a function(q, k, v, causal) for each package in PEERS."""
    found = {}
    if not os.environ.get("PEERS"):
        return found
    sys.path.insert(0, os.environ["PEERS"])
    try:
        import ring_flash_attn as rfa
        found["ring-flash-attention"] = lambda q, k, v, causal: (
            rfa.zigzag_ring_flash_attn_func if causal else rfa.ring_flash_attn_func)(q, k, v, causal=causal)
    except Exception as error:
        print("no ring_flash_attn:", repr(error)[:200], flush=True)
    try:
        from burst_attn import burst_attn_func
        found["published"] = lambda q, k, v, causal: burst_attn_func(
            q, k, v, None, "cuda", causal, False, False, None)
    except Exception as error:
        print("no burst_attn:", repr(error)[:200], flush=True)
    return found


def cudnn(q, k, v, causal):
    """Computes cuDNN's attention of [batch, heads, tokens, head_dim]."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def context_parallel():
    """A context in which cudnn() is over all ranks, for tensors that are cut as burst's zigzag layout cuts them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    ranks = dist.get_world_size()
    return parallel(init_device_mesh("cuda", (ranks,)),  # it must be given a tensor to cut
                    buffers=[torch.zeros(2 * ranks, device="cuda")], buffer_seq_dims=[0])


def ring(group, seqlen, causal, repeats):
    with contextlib.ExitStack() as stack:
        torchs = {}
        if causal:
            try:
                stack.enter_context(context_parallel())
                torchs["torch context_parallel"] = cudnn
            except Exception as error:
                print("no context_parallel:", repr(error)[:200], flush=True)
        return ring_beside(torchs, group, seqlen, causal, repeats)


def ring_beside(torchs, group, seqlen, causal, repeats):
    """Times the ring and its peers. torchs: functions like cudnn(), by name."""
    ranks = dist.get_world_size()
    shape = (1, seqlen // ranks, HEADS, HEAD_DIM)
    tensors = normals(*[shape] * 4)
    heads_first = [x.transpose(1, 2).contiguous() for x in tensors] if torchs else []
    for x in (*tensors[:3], *heads_first[:3]):
        x.requires_grad_()
    layout = "zigzag" if causal else "contiguous"

    def ours(deterministic):
        return lambda q, k, v, causal: burst.attention(
            q, k, v, causal=causal, group=group, layout=layout, deterministic=deterministic, seqlen=seqlen)

    functions = {"burst": ours(True), "burst, deterministic=False": ours(False), **peers(), **torchs}
    out, difference, sides = None, {}, {}
    for name, function in functions.items():
        given = heads_first if name in torchs else tensors
        try:
            with torch.no_grad():
                result = function(*given[:3], causal)
        except Exception as error:  # out of memory; another version of torch
            print("not %s: %s" % (name, repr(error)[:200]), flush=True)
            continue
        result = result.transpose(1, 2) if name in torchs else result
        out = result if out is None else out
        difference[name] = (result - out).abs().max().item()
        sides[name] = (function, given)
    del out, result

    def both(function, given):
        def run():
            torch.autograd.grad(function(*given[:3], causal), given[:3], given[3])
        return run

    def forward(function, given):
        def run():
            with torch.no_grad():
                function(*given[:3], causal)
        return run

    flops = 4 * seqlen * seqlen * HEADS * HEAD_DIM / (2 if causal else 1) / ranks
    times = milliseconds({name: both(*side) for name, side in sides.items()}, repeats)
    forwards = milliseconds({name: forward(*side) for name, side in sides.items()}, repeats)
    return {"case": "ring", "tokens": seqlen, "ranks": ranks, "causal": causal,
            "largest_difference_of_out": difference, "both_ms": times, "forward_ms": forwards,
            "both_tflops_per_gpu": {name: 3.5 * flops / ms / 1e9 for name, ms in times.items()}}


def one_gpu(batch, seqlen, heads, head_dim, causal, repeats):
    shape = (batch, seqlen, heads, head_dim)
    q, k, v, dout = normals(*[shape] * 4)
    for x in (q, k, v):
        x.requires_grad_()

    def ours(deterministic):
        return lambda: burst.attention(q, k, v, causal=causal, deterministic=deterministic)

    def theirs():
        return cudnn(*(x.transpose(1, 2) for x in (q, k, v)), causal).transpose(1, 2)

    sides = {"burst": ours(True), "burst, deterministic=False": ours(False), "cudnn": theirs}

    def forward(side):
        def run():
            with torch.no_grad():
                side()
        return run

    def both(side):
        return lambda: torch.autograd.grad(side(), (q, k, v), dout)

    flops = 4 * batch * seqlen * seqlen * heads * head_dim / (2 if causal else 1)
    result = {"case": "one GPU", "shape": shape, "causal": causal}
    for what, wrap, factor in (("forward", forward, 1), ("both", both, 3.5)):
        times = milliseconds({name: wrap(side) for name, side in sides.items()}, repeats, calls=10)
        result[what + "_ms"] = times
        result[what + "_tflops"] = {name: factor * flops / ms / 1e9 for name, ms in times.items()}
    return result


def host(group, ranks):
    """Returns the host's microseconds for a call while the GPU is busy with other work."""
    shape = (1, 2048, 8, 128)
    q, k, v, dout = normals(*[shape] * 4)
    for x in (q, k, v):
        x.requires_grad_()
    result = {"case": "host time of a call, microseconds", "ranks": ranks}
    arguments = dict(group=group, seqlen=2048 * ranks)

    def measure(function, calls):
        times = []
        for _ in range(20):
            dist.barrier()
            torch.cuda.synchronize()
            torch.cuda._sleep(AHEAD)
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times.append(1e6 * (time.perf_counter() - begin) / calls)
        return statistics.median(times)

    def forward():
        with torch.no_grad():
            burst.attention(q, k, v, **arguments)

    for what, calls in (("after a barrier", 1), ("in a row", 16)):
        outs = [burst.attention(q, k, v, **arguments) for _ in range(20 * calls)]
        result[what] = {
            "forward": measure(forward, calls),
            "backward": measure(lambda: torch.autograd.grad(outs.pop(), (q, k, v), dout), calls)}
    return result


def main():
    options = dict(argument[2:].split("=") for argument in sys.argv[1:])
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    ranks = dist.get_world_size()
    rows = []

    def add(row):
        rows.append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)

    add(host(None, 1))
    add(host(group, ranks))
    for batch, seqlen, heads, head_dim in ((16, 2048, 16, 128), (64, 1024, 12, 64)):
        add(one_gpu(batch, seqlen, heads, head_dim, True, 5))
    for seqlen in [int(n) for n in options.get("seqlens", "4096,32768").split(",")]:
        for causal in (False, True):
            add(ring(group, seqlen, causal, int(options.get("repeats", 5))))
    write(options.get("out") if rank == 0 else None, rows)
    burst.disconnect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
