#!/usr/bin/env python3
"""Times burst.attention with masks of several intervals on one GPU. Compares with its own causal mask, and
with FlexAttention (compiled) on the same mask and inputs, in the same run, in turns:

  benchmarks/gpu/pytorch_masks.py [--out=FILE] [--seqlen=32768,16384] [--head_dim=128,64]

The calls have 32 heads in bf16, forward and backward, deterministic (the default) and free. TFLOP/s count the
visible pairs. All masks run with the first length and head_dim, masks of sparse blocks also with the others. The
error of ours against float64 is from the same mask on 2,048 tokens, as is the difference of the two sides. Figures
are medians of GPU times, without the time to make masks.
"""

import argparse
import json
import random

import torch
import torch._functorch.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import burst
from harness import call_ms, medians, turns, write

HEADS = 32
torch._functorch.config.donated_buffer = False  # the timed backward is called again and again


def visible(slices, n, device):
    """Returns the mask as a tensor [n, n]."""
    at, to = torch.arange(n, device=device)[:, None], torch.arange(n, device=device)[None, :]
    shown = torch.zeros(n, n, dtype=torch.bool, device=device)
    for q_begin, q_end, k_begin, k_end, kind in slices:
        rows = slice(q_begin, q_end)
        part = ((k_begin <= to) & (to < k_end)).expand(q_end - q_begin, n)
        if kind in ("causal", "band"):
            part = part & (to - k_end <= at[rows] - q_end)
        if kind in ("inverse_causal", "band"):
            part = part & (to - k_begin >= at[rows] - q_begin)
        shown[rows] |= part
    return shown


def masks(n, sparse_only=False):
    """Returns by name slices, and the same mask as FlexAttention's function of query and key."""
    prompt, answer, window = n // 4, n // 8, n // 8

    def tree(b, h, q, k):
        return (q >= k) & ((k < prompt) | ((q - prompt) // answer == (k - prompt) // answer))

    def with_globals(b, h, q, k):
        return (q >= k) & ((q - k < window) | (k < 64))

    def both_ways(b, h, q, k):
        return ((q - k).abs() < window) | (k < 64) | (q < 64)

    made = {} if sparse_only else {
        "tree: a prompt of n / 4, six answers": (burst.masks.tree(prompt, [answer] * 6), tree),
        "window of n / 8, 64 global tokens": (
            burst.masks.window_with_global_tokens(n, window, range(64), causal=True), with_globals),
        "the same, both ways": (burst.masks.window_with_global_tokens(n, window, range(64)), both_ways),
    }
    numbers = random.Random(1)
    for size in (1024, 128):
        count = n // size
        if count < 10:
            continue
        chosen = [sorted({i, *numbers.sample(range(count), count // 10)}) for i in range(count)]
        table = torch.zeros(count, count, dtype=torch.bool, device="cuda")
        for i, keys in enumerate(chosen):
            table[i, keys] = True
        made["a tenth of blocks of %d" % size] = (
            burst.masks.blocks(n, size, chosen),
            lambda b, h, q, k, table=table, size=size: table[q // size, k // size])
    return made


def milliseconds(sides, repeats):
    return medians(turns(sides, repeats, lambda side: call_ms(side, calls=4)))


def inputs(n, head_dim):
    generator = torch.Generator("cuda").manual_seed(1)
    made = [torch.randn(1, n, HEADS, head_dim, device="cuda", dtype=torch.bfloat16, generator=generator)
            for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def backward(function, tensors, dout):
    out = function(*tensors)

    def call():
        torch.autograd.grad(out, tensors, dout, retain_graph=True)
    return call


compiled = torch.compile(flex_attention, dynamic=False)


def flex(mask_mod, n):
    torch._dynamo.reset()  # after too many masks it would not compile the last ones
    block_mask = create_block_mask(mask_mod, None, None, n, n, "cuda")

    def call(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask).transpose(1, 2)
    return call


def difference(have, want):
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(have, want))


def results(function, tensors, dout):
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]


def error(slices, n, head_dim):
    """Returns the largest relative error in the norm of out, dq, dk and dv against float64."""
    tensors, dout = inputs(n, head_dim)
    shown = visible(slices, n, "cuda")

    def naive(q, k, v):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * head_dim**-0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~shown, float("-inf")).softmax(-1), v)

    want = results(naive, [x.detach().double().requires_grad_() for x in tensors], dout)
    return difference(results(lambda *x: burst.attention(*x, causal=False, slices=slices), tensors, dout),
                      want)


def measure(name, slices, mask_mod, n, head_dim, repeats):
    tensors, dout = inputs(n, head_dim)
    pairs = visible(slices, n, "cuda").sum().item()
    frozen = burst.masks.Frozen(slices)

    def ours(deterministic):
        return lambda *x: burst.attention(*x, causal=False, slices=frozen, deterministic=deterministic)

    def causal(deterministic):
        return lambda *x: burst.attention(*x, deterministic=deterministic)

    flex_side = flex(mask_mod, n)
    row = {"mask": name, "tokens": n, "head_dim": head_dim, "density": pairs / n**2,
           "apart": difference(results(ours(True), tensors, dout), results(flex_side, tensors, dout))}
    forward = {"burst": ours(True), "causal": causal(True), "FlexAttention": flex_side}
    found = milliseconds({side: (lambda function=function: function(*tensors))
                          for side, function in forward.items()}, repeats)
    backwards = {**forward, "burst, free": ours(False), "causal, free": causal(False)}
    back = milliseconds({side: backward(function, tensors, dout) for side, function in backwards.items()},
                        repeats)
    for which, times, products in (("forward", found, 4), ("backward", back, 10)):
        for side, time in times.items():
            counted = n * (n + 1) / 2 if side.startswith("causal") else pairs
            row["%s, %s" % (which, side)] = {
                "ms": time, "TFLOP/s": products * HEADS * head_dim * counted / time * 1e-9}
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--seqlen", default="32768,16384")
    parser.add_argument("--head_dim", default="128,64")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    rows = []
    for head_dim in map(int, options.head_dim.split(",")):
        for n in map(int, options.seqlen.split(",")):
            small = masks(2048)
            for name, (slices, mask_mod) in masks(n, sparse_only=len(rows) > 0).items():
                row = measure(name, slices, mask_mod, n, head_dim, options.repeats)
                if name in small:
                    row["error"] = error(small[name][0], 2048, head_dim)
                rows.append(row)
                print(json.dumps(row), flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
