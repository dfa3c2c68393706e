#!/usr/bin/env python3
"""Compares the forward in fp8 (e4m3) on Hopper with the forward in bfloat16.

    fp8_attention.py LIBRARY errors [FILE.json]   errors of out, and of its gradients
    fp8_attention.py LIBRARY bench [FILE.json]    TFLOP/s to bfloat16's, ours and cuDNN's, same run

Errors are root mean squares of the difference from float64, relative to the truth's root mean square. Ours are
compared with two ways to round to fp8 in a float64 computation: one scale for a whole tensor, and one for every 128
tokens of a head. Our kernel has the second one, and first spreads every channel of Q and K over all channels by an
orthogonal matrix.
"""

import math
import sys

import torch

import sm90_kernels as base
from harness import queued_ms, write

E4M3_MAX = 448.0
HEAD_DIM = 128


def rounded(x, per_block):
    """Returns x [batch, tokens, heads, head_dim] in float64, rounded to e4m3."""
    if per_block:
        pad = -x.shape[1] % 128
        blocks = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, pad)).unflatten(1, (-1, 128))
        scale = blocks.abs().amax((2, 4), keepdim=True).clamp(min=1e-30) / E4M3_MAX
        return ((blocks / scale).to(torch.float8_e4m3fn).double() * scale).flatten(1, 2)[:, :x.shape[1]]
    scale = x.abs().max() / E4M3_MAX
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def attention64(q, k, v, scale, is_causal, round_p):
    """Computes attention in float64, a head at a time. P is rounded to e4m3 if asked."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            s = scale * (q[b, :, h] @ k[b, :, h].T)
            if is_causal:
                s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
            p = torch.exp(s - s.amax(1, keepdim=True))
            total = p.sum(1, keepdim=True)
            if round_p:
                p = (p * E4M3_MAX).to(torch.float8_e4m3fn).double() / E4M3_MAX
            out[b, :, h] = p @ v[b, :, h] / total
    return out


def inputs(kind, length, heads, seed):
    g = torch.Generator(device="cuda").manual_seed(seed)
    shape = (1, length, heads, HEAD_DIM)
    tensors = [torch.randn(shape, device="cuda", generator=g) for _ in range(4)]
    if kind == "outliers":  # as in FlashAttention-3's study: one element in a thousand has a deviation of 10
        for x in tensors[:3]:
            chosen = torch.rand(shape, device="cuda", generator=g) < 0.001
            x += chosen * 10 * torch.randn(shape, device="cuda", generator=g)
    if kind == "channels":  # as in language models: some channels of Q and K are large in every token
        factor = torch.ones(HEAD_DIM, device="cuda")
        factor[::32] = 8
        tensors[0] *= factor
        tensors[1] *= factor
    if kind == "peaked":  # the logits have a deviation of 9
        tensors[0] *= 3
        tensors[1] *= 3
    return [x.bfloat16() for x in tensors]


def errors(kernels):
    rows = []
    print("relative root mean square errors: fp8 ours; one scale a block; one a tensor; bfloat16 | "
          "gradients after the forward in fp8 (in bfloat16)")
    for kind in ("normal", "peaked", "outliers", "channels"):
        for length, mask in ((1024, "full"), (4096, "full"), (4096, "causal"), (16384, "causal")):
            heads = 2 if length > 4096 else 8
            q, k, v, dout = inputs(kind, length, heads, seed=length)
            scale = HEAD_DIM ** -0.5
            ranges = base.causal(length, length) if mask == "causal" else None
            truth = base.reference(q, k, v, scale, ranges, dout)
            size = {name: truth[name].square().mean().sqrt().item() for name in ("out", "dq", "dk", "dv")}

            def run(fp8):
                out, lse = torch.empty_like(q), torch.empty((1, heads, length), device="cuda")
                kernels.forward(q, k, v, scale, ranges, out, lse, fp8)
                grads = [torch.empty_like(x) for x in (q, k, v)]
                kernels.backward(q, k, v, scale, ranges, out, lse, dout, *grads, torch.empty_like(lse),
                                 deterministic=True)
                found = dict(zip(("out", "dq", "dk", "dv"), [out] + grads))
                result = {name: base.rms(x, truth[name]) / size[name] for name, x in found.items()}
                result["lse"] = base.max_error(lse, truth["lse"])
                return result

            row = {"inputs": kind, "length": length, "mask": mask, "heads": heads,
                   "fp8": run(True), "bfloat16": run(False)}
            for name, per_block in (("block", True), ("tensor", False)):
                operands = [rounded(x.double(), per_block) for x in (q, k, v)]
                out = attention64(*operands, scale, mask == "causal", round_p=True)
                row["simulated_" + name] = base.rms(out, truth["out"]) / size["out"]
            rows.append(row)
            gradients = " ".join(f"{name} {row['fp8'][name]:.4f} ({row['bfloat16'][name]:.4f})"
                                 for name in ("dq", "dk", "dv"))
            print(f"{kind:9}{length:6} {mask:7} out {row['fp8']['out']:.4f}; {row['simulated_block']:.4f}; "
                  f"{row['simulated_tensor']:.4f}; {row['bfloat16']['out']:.4f} | {gradients} | lse "
                  f"{row['fp8']['lse']:.1e}", flush=True)
            del truth
    return rows


def bench(kernels):
    rows = []
    print("TFLOP/s of the forward: fp8, rounding included | bfloat16, ours; cuDNN")
    for batch, length, heads, kv_heads, mask in (
            (1, 8192, 32, 32, "full"), (1, 16384, 32, 32, "full"), (1, 32768, 32, 32, "full"),
            (1, 65536, 16, 16, "full"), (1, 8192, 32, 32, "causal"), (1, 16384, 32, 32, "causal"),
            (1, 32768, 32, 32, "causal"), (1, 65536, 16, 16, "causal"), (1, 16384, 64, 8, "causal"),
            (16, 2048, 32, 32, "causal")):
        q, k, v, _ = base.make(batch, length, length, heads, kv_heads, HEAD_DIM, 1.0)
        scale = HEAD_DIM ** -0.5
        ranges = base.causal(length, length) if mask == "causal" else None
        flop = 4 * base.visible_pairs(q, k, ranges) * heads * HEAD_DIM
        outs = [torch.empty_like(q) for _ in range(2)]
        lse = torch.empty((batch, heads, length), device="cuda")
        times = queued_ms(
            {"fp8": lambda: kernels.forward(q, k, v, scale, ranges, outs[0], lse, True),
             "bf16": lambda: kernels.forward(q, k, v, scale, ranges, outs[1], lse),
             "cudnn": lambda: base.cudnn_forward(q, k, v, scale, mask == "causal")},
            max(5, min(30, int(0.15 / (flop / 8e14)))))
        fp8, bf16, cudnn = (flop / ms / 1e9 for ms in times.values())
        rows.append({"batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads, "mask": mask,
                     "fp8_tflops": fp8, "bfloat16_tflops": bf16, "cudnn_tflops": cudnn})
        print(f"{batch:2} x {length:5} {heads}/{kv_heads} {mask:7} {fp8:6.0f} | {bf16:6.0f} ({fp8 / bf16:.2f}) "
              f"{cudnn:6.0f} ({fp8 / cudnn:.2f})", flush=True)
    return rows


def main():
    if len(sys.argv) < 3 or sys.argv[2] not in ("errors", "bench"):
        sys.exit(__doc__)
    kernels = base.Kernels(sys.argv[1])
    rows = errors(kernels) if sys.argv[2] == "errors" else bench(kernels)
    write(sys.argv[3] if len(sys.argv) > 3 else None, rows, what=sys.argv[2])


if __name__ == "__main__":
    main()
