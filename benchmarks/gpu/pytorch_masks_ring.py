#!/usr/bin/env python3
"""Times burst.attention over several GPUs with masks that are hard to balance:

  torchrun --nproc_per_node=2 benchmarks/gpu/pytorch_masks_ring.py [--out=FILE] [--tokens=8192,32768]

Packed documents have 64 heads on 8 of 128 in bf16. Their lengths are log-normal (median 512, deviation 1.5), first
at most a quarter of the sequence, then without a limit. The layout "balanced" is compared with the other layouts,
with Ulysses, with one GPU that has the whole sequence, and with causal attention without documents. A tenth of the
blocks of 128 and 1,024 (32 heads) is compared with causal attention over the same ranks. --tokens counts a rank's
tokens. A figure is a GPU's TFLOP/s by the visible pairs, forward and backward, from the median of the slowest rank's
GPU times. The sides run in turns, and schedules are made before.
"""

import argparse
import json
import os
import random

import torch
import torch.distributed as dist

import burst
from harness import medians, normals, slowest_rank_ms, turns, write

HEAD_DIM = 128


def milliseconds(sides, repeats):
    return medians(turns(sides, repeats, lambda side: slowest_rank_ms(side, calls=4)))


def long_tailed(seqlen, longest):
    """Returns the starts of documents."""
    numbers, starts, at = random.Random(1), [], 0
    while at < seqlen:
        starts.append(at)
        at += min(max(1, int(512 * 2.718281828 ** (1.5 * numbers.gauss(0, 1)))), longest)
    return starts


def tensors_of(tokens, heads, kv_heads):
    q, k, v, dout = normals(*((1, tokens, h, HEAD_DIM) for h in (heads, kv_heads, kv_heads, heads)))
    return [x.requires_grad_() for x in (q, k, v)], dout


def measure(sides, pairs_of, heads, ranks, repeats):
    """Times the sides, by name (tokens, kv_heads, arguments of burst.attention). pairs_of: visible pairs by name."""
    rows = {}
    forwards, backwards, kept = {}, {}, {}
    for name, (tokens, kv_heads, arguments) in sides.items():
        key = tokens, kv_heads
        if key not in kept:
            kept[key] = tensors_of(tokens, heads, kv_heads)
        inputs, dout = kept[key]
        out = burst.attention(*inputs, **arguments)

        def forward(inputs=inputs, arguments=arguments):
            with torch.no_grad():
                burst.attention(*inputs, **arguments)

        def backward(inputs=inputs, dout=dout, out=out):
            torch.autograd.grad(out, inputs, dout, retain_graph=True)
        forwards[name], backwards[name] = forward, backward
    for what, functions, products in (("forward", forwards, 4), ("backward", backwards, 10)):
        for name, ms in milliseconds(functions, repeats).items():
            gpus = 1 if sides[name][2].get("group") is None else ranks
            rows["%s, %s" % (what, name)] = {
                "ms": ms, "TFLOP/s a GPU": products * heads * HEAD_DIM * pairs_of[name] / gpus / ms * 1e-9}
    return rows


def documents_row(group, tokens, share, repeats):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    seqlen, heads, kv_heads = tokens * ranks, 64, 8
    starts = long_tailed(seqlen, seqlen // share)
    lengths = [end - begin for begin, end in zip(starts, starts[1:] + [seqlen])]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    sides, pairs_of = {}, {}
    for layout in ("balanced", "zigzag", "striped", "contiguous"):
        packed = dict(documents=starts) if layout == "balanced" else {}
        own = len(burst.positions(seqlen, group, layout, rank=rank, **packed))
        sides[layout] = own, kv_heads, dict(documents=starts, group=group, layout=layout, seqlen=seqlen)
    sides["balanced, deterministic=False"] = (*sides["balanced"][:2],
                                              dict(sides["balanced"][2], deterministic=False))
    sides["Ulysses"] = (tokens, kv_heads, dict(documents=starts, group=group, layout="contiguous",
                                               seqlen=seqlen, strategy="ulysses"))
    sides["one GPU, whole sequence"] = seqlen, kv_heads, dict(documents=starts)
    pairs_of = {name: pairs for name in sides}
    sides["causal, no documents"] = tokens, kv_heads, dict(group=group, seqlen=seqlen)
    pairs_of["causal, no documents"] = seqlen * (seqlen + 1) // 2
    return {"case": "documents", "tokens a GPU": tokens, "ranks": ranks, "documents": len(starts),
            "longest": max(lengths), "density of causal": pairs / pairs_of["causal, no documents"],
            **measure(sides, pairs_of, heads, ranks, repeats)}


def blocks_row(group, tokens, size, repeats):
    ranks = dist.get_world_size()
    seqlen, heads = tokens * ranks, 32
    count = seqlen // size
    numbers = random.Random(1)
    chosen = [sorted({i, *numbers.sample(range(count), count // 10)}) for i in range(count)]
    frozen = burst.masks.Frozen(burst.masks.blocks(seqlen, size, chosen))
    over = dict(group=group, seqlen=seqlen)
    sides = {"blocks": (tokens, heads, dict(over, causal=False, slices=frozen)),
             "causal": (tokens, heads, over)}
    for name in list(sides):
        sides[name + ", deterministic=False"] = (*sides[name][:2],
                                                 dict(sides[name][2], deterministic=False))
    pairs = sum(map(len, chosen)) * size * size
    pairs_of = {name: pairs if name.startswith("blocks") else seqlen * (seqlen + 1) // 2 for name in sides}
    return {"case": "a tenth of blocks of %d" % size, "tokens a GPU": tokens, "ranks": ranks,
            "density": pairs / seqlen**2, **measure(sides, pairs_of, heads, ranks, repeats)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    rows = []
    for tokens in map(int, options.tokens.split(",")):
        for share in (4, 1):
            rows.append(documents_row(group, tokens, share, options.repeats))
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
        for size in (1024, 128):
            rows.append(blocks_row(group, tokens, size, options.repeats))
            if rank == 0:
                print(json.dumps(rows[-1]), flush=True)
    write(options.out if rank == 0 else None, rows)
    burst.disconnect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
