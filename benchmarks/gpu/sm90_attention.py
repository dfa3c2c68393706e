#!/usr/bin/env python3
"""Compares attention on Hopper with cuDNN (through PyTorch's SDPA, up to a head_dim of 128).

    sm90_attention.py LIBRARY check|bench|decode [OPTION...]

- check prints errors against float64, and their ratio to cuDNN's errors
- bench prints TFLOP/s, and the ratio to cuDNN's on the same inputs in the same run
- decode prints bytes/s for few queries and many keys, compared with a copy and with PyTorch's kernels (cuDNN,
  FlashAttention-2)

Options: float16 (else bfloat16), forward (no backward), quick (up to 16K tokens), only=REGEX, FILE.json
(where to write).

A forward has 4 * batch * heads * head_dim * (visible query-key pairs) FLOPs, a backward 2.5 times as many.
Times are medians by CUDA events. Ours and cuDNN's runs alternate. The backward goes from (out, dout) to
gradients of 16 bits by the calls that training makes: delta, clearing dQ, the main kernel, converting dQ.
"""

import math
import sys

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from harness import Words, document_lengths, queued_ms, sdpa, write
from sm90_kernels import (Kernels, causal, cudnn_backward, cudnn_forward, documents, make, max_error, reference, rms,
                          run_cudnn, run_ours, visible_pairs, window)

WORDS = Words(sys.argv[3:])
DTYPE = torch.float16 if "float16" in WORDS else torch.bfloat16

SEEDS = 4


def check(kernels, backward=True):
    """Checks errors. Every element must be within the bound of its roundings. Up to a head_dim of 128, each case's
    root-mean-square error and each head_dim's largest error must be at most 1.2 times cuDNN's.

    A single case's largest error is one rounding of one large value, so it is only printed next to cuDNN's.
    """
    rows, failed, largest = [], 0, {}
    cases = []
    for dim in (64, 96, 128, 192, 256):
        for q_len, k_len, heads, kv_heads in ((1024, 1024, 4, 4), (2048, 2048, 4, 4),
                                              (1000, 1000, 4, 2), (333, 777, 6, 1)):
            cases.append((dim, q_len, k_len, heads, kv_heads, "full"))
        for length in (2048, 1023):
            cases.append((dim, length, length, 4, 4, "causal"))
    print("largest error (ratio to cuDNN's, ratio of the root mean squares, largest share of the bound: "
          "ours, cuDNN's)")
    for dim, q_len, k_len, heads, kv_heads, mask in cases:
        row = {"dim": dim, "q_len": q_len, "k_len": k_len, "heads": heads, "kv_heads": kv_heads,
               "mask": mask}
        scale = dim ** -0.5
        ranges = causal(q_len, k_len) if mask == "causal" else None
        errors = {}  # by (side, name): [largest, root mean square] of every seed
        for seed in range(SEEDS):
            q, k, v, dout = make(2, q_len, k_len, heads, kv_heads, dim, 3.0, seed, DTYPE)
            grad = dout if backward else None
            expected = reference(q, k, v, scale, ranges, grad)
            ours = run_ours(kernels, q, k, v, scale, ranges, grad)
            theirs = run_cudnn(q, k, v, scale, mask == "causal", grad) if dim <= 128 else {}
            for whose, results in (("ours", ours), ("cudnn", theirs)):
                for name, value in results.items():
                    share = (((value.double() - expected[name]).abs() /
                              (expected["bound_" + name] + 1e-30)).max().item()
                             if name != "lse" else 0.0)
                    errors.setdefault((whose, name), []).append(
                        (max_error(value, expected[name]), rms(value, expected[name]), share))
        text = ""
        for name in ours:
            row[name] = max(e for e, _, _ in errors["ours", name])
            text += f" {name} {row[name]:.2e}"
            if name == "lse":  # fp32 statistics of exact products, a few ulps of its size
                failed += not row[name] <= 1e-4
                continue
            share = row["bound_share_" + name] = max(b for _, _, b in errors["ours", name])
            failed += not share <= 1
            largest[dim, name, ""] = max(largest.get((dim, name, ""), 0.0), row[name])
            if name not in theirs:
                text += f" ({share:.2f})"
                continue
            row["cudnn_" + name] = max(e for e, _, _ in errors["cudnn", name])
            row["rms_ratio_" + name] = math.sqrt(sum(r * r for _, r, _ in errors["ours", name]) /
                                                 sum(r * r for _, r, _ in errors["cudnn", name]))
            failed += not row["rms_ratio_" + name] <= 1.2
            cudnn_share = max(b for _, _, b in errors["cudnn", name])
            text += (f" ({row[name] / row['cudnn_' + name]:.2f}, {row['rms_ratio_' + name]:.3f}, "
                     f"{share:.2f}, {cudnn_share:.2f})")
            key = (dim, name, "cudnn_")
            largest[key] = max(largest.get(key, 0.0), row["cudnn_" + name])
        rows.append(row)
        print(f"{dim:4} {q_len:5}x{k_len:<5} {heads}/{kv_heads} {mask:7}{text}", flush=True)
    for (dim, name, whose), error in largest.items():
        if not whose and (dim, name, "cudnn_") in largest:
            ratio = error / largest[dim, name, "cudnn_"]
            failed += not ratio <= 1.2
            print(f"D{dim} {name}: largest error {error:.3e}, {ratio:.3f} of cuDNN's")
            rows.append({"dim": dim, "name": name, "largest": error, "ratio": ratio})
    print("failed comparisons:", failed, flush=True)
    return rows, failed


def bench_case(kernels, name, batch, length, heads, kv_heads, dim, mask, ranges, backward,
               deterministic=False):
    label = f"{name} {length} {heads}/{kv_heads} D{dim} {mask}"
    if not WORDS.wants(label):
        return {}
    q, k, v, dout = make(batch, length, length, heads, kv_heads, dim, 1.0, dtype=DTYPE)
    scale = dim ** -0.5
    flop = 4 * visible_pairs(q, k, ranges) * heads * dim
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, length), device="cuda")
    compare = mask in ("full", "causal") and dim <= 128
    # Cold clocks and throttling slow both sides.
    repeats = max(5, min(30, int(0.15 / (flop / 5e14))))
    sides = {"ours": lambda: kernels.forward(q, k, v, scale, ranges, out, lse)}
    if compare:
        sides["peer"] = lambda: cudnn_forward(q, k, v, scale, mask == "causal")
        if dim == 128 and name == "long":  # measures the limit under equal power and heat
            sides["matmul"] = matmul()
    else:  # times our causal kernel, with which other masks are compared by pair
        other = causal(length, length)
        other_flop = 4 * visible_pairs(q, k, other) * heads * dim
        other_out, other_lse = torch.empty_like(out), torch.empty_like(lse)
        sides["peer"] = lambda: kernels.forward(q, k, v, scale, other, other_out, other_lse)
    times = queued_ms(sides, repeats)
    row = {"case": name, "batch": batch, "length": length, "heads": heads, "kv_heads": kv_heads,
           "dim": dim, "mask": mask, "fwd_ms": times["ours"], "fwd_tflops": flop / times["ours"] / 1e9}
    if compare:
        row["cudnn_fwd_tflops"] = flop / times["peer"] / 1e9
        row["fwd_ratio"] = times["peer"] / times["ours"]
        if "matmul" in times:
            row["cublas_tflops"] = MATMUL_FLOP / times["matmul"] / 1e9
            row["fwd_of_cublas"] = row["fwd_tflops"] / row["cublas_tflops"]
    else:
        row["fwd_time_per_pair"] = (times["ours"] / flop) / (times["peer"] / other_flop)
    if backward:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = torch.empty_like(lse)

        def ours(deterministic):
            return lambda: kernels.backward(q, k, v, scale, ranges, out, lse, dout, dq, dk, dv, delta,
                                            deterministic=deterministic)

        sides = {"ours": ours(False)}
        if compare:
            sides["peer"] = cudnn_backward(q, k, v, dout, scale, mask == "causal")
        else:
            sides["peer"] = lambda: kernels.backward(q, k, v, scale, other, other_out, other_lse, dout, dq,
                                                     dk, dv, delta)
        if deterministic:
            sides["deterministic"] = ours(True)
        times = queued_ms(sides, max(4, repeats // 2))
        row["bwd_ms"], row["bwd_tflops"] = times["ours"], 2.5 * flop / times["ours"] / 1e9
        if compare:
            row["cudnn_bwd_tflops"] = 2.5 * flop / times["peer"] / 1e9
            row["bwd_ratio"] = times["peer"] / times["ours"]
        else:
            row["bwd_time_per_pair"] = (times["ours"] / flop) / (times["peer"] / other_flop)
        if deterministic:
            row["deterministic_cost"] = times["deterministic"] / times["ours"] - 1
    def column(key, form):
        return form.format(row[key]) if key in row else "      -"
    print(f"{name:10} b{batch:<3}{length:6} {heads}/{kv_heads:<2} D{dim:<4}{mask:10} "
          f"fwd {column('fwd_tflops', '{:6.1f}')} {column('cudnn_fwd_tflops', '{:6.1f}')} "
          f"{column('fwd_ratio', '{:6.3f}')}   bwd {column('bwd_tflops', '{:6.1f}')} "
          f"{column('cudnn_bwd_tflops', '{:6.1f}')} {column('bwd_ratio', '{:6.3f}')}   "
          f"det {column('deterministic_cost', '{:6.3f}')}   of cuBLAS "
          f"{column('fwd_of_cublas', '{:.3f}')}   time per pair / causal: "
          f"{column('fwd_time_per_pair', '{:.3f}')} {column('bwd_time_per_pair', '{:.3f}')}", flush=True)
    return row


MATMUL_FLOP = 2 * 8192 ** 3


def matmul():
    a, b = (torch.randn((8192, 8192), device="cuda").to(DTYPE) for _ in range(2))
    return lambda: a @ b


def bench(kernels, backward=True, quick=False):
    rows = [{"case": "cublas 8192",
             "tflops": MATMUL_FLOP / queued_ms({"matmul": matmul()}, 20)["matmul"] / 1e9}]
    print(f"cuBLAS 8192^3: {rows[0]['tflops']:.1f} TFLOP/s")
    print("                                            ours  cuDNN  ratio        ours  cuDNN  ratio")
    cases = [("long", 1, length, 32, 32, dim, mask, length == 16384) for dim in (128, 64)
             for mask in ("full", "causal")
             for length in ((8192, 16384) if quick else (8192, 16384, 32768, 65536))]
    cases += [("wide", 1, 16384, 16, 16, dim, mask, True) for dim in (96, 192, 256)
              for mask in ("full", "causal")]
    cases += [("gqa", 1, 16384, 64, 8, 128, mask, False) for mask in ("full", "causal")]
    cases += [("short", 16, length, 32, 32, 128, mask, False) for length in (512, 2048)
              for mask in ("full", "causal")]
    if not quick:
        cases += [("window", 1, 65536, 32, 32, 128, "window", False),
                  ("packed", 1, 65536, 32, 32, 128, "documents", False)]
    for name, batch, length, heads, kv_heads, dim, mask, deterministic in cases:
        ranges = {"full": lambda: None, "causal": lambda: causal(length, length),
                  "window": lambda: window(length, length, 4096),
                  "documents": lambda: documents(document_lengths(length))}[mask]()
        rows.append(bench_case(kernels, name, batch, length, heads, kv_heads, dim, mask, ranges, backward,
                               backward and deterministic))
    return rows


# ---- Few queries against a cache of keys.

def decode_case(kernels, batch, q_len, k_len, heads, kv_heads, dim):
    """Measures bytes/s: K and V read once, compared with the reads and writes of a copy of as many bytes."""
    label = f"b{batch} {q_len}x{k_len} {heads}/{kv_heads} D{dim}"
    if not WORDS.wants(label):
        return {}
    q, k, v, _ = make(batch, q_len, k_len, heads, kv_heads, dim, 1.0, dtype=DTYPE)
    ranges = causal(q_len, k_len) if q_len > 1 else None
    scale = dim ** -0.5
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, q_len), device="cuda")
    target = torch.empty_like(k)
    kv_bytes = 4 * k.numel()
    functions = {"ours": lambda: kernels.forward(q, k, v, scale, ranges, out, lse),
                 "copy": lambda: target.copy_(k)}
    masks = {SDPBackend.CUDNN_ATTENTION: None, SDPBackend.FLASH_ATTENTION: None}
    if ranges:  # the last query sees the last key: FlashAttention's own mask; for cuDNN element by element
        masks = {SDPBackend.CUDNN_ATTENTION: torch.arange(k_len, device="cuda")[None] < ranges[1][:, None],
                 SDPBackend.FLASH_ATTENTION: causal_lower_right(q_len, k_len)}
    def peer(backend):
        with torch.no_grad():
            return sdpa(backend, q, k, v, attn_mask=masks[backend], scale=scale)
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash2", SDPBackend.FLASH_ATTENTION)):
        try:
            expected = peer(backend).transpose(1, 2)
        except (RuntimeError, ValueError):  # the backend does not serve the call
            continue
        functions[name] = lambda backend=backend: peer(backend)
        kernels.forward(q, k, v, scale, ranges, out, lse)
        error = (out.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.01, f"{label}: {name} computes something else: {error}"
    times = queued_ms(functions, 15)
    row = {"case": "decode", "batch": batch, "q_len": q_len, "k_len": k_len, "heads": heads,
           "kv_heads": kv_heads, "dim": dim}
    for name, ms in times.items():
        row[name + "_ms"] = ms
        row[name + "_gb_per_s"] = kv_bytes / ms / 1e6  # a copy reads half of these bytes, and writes the other half
    row["of_copy"] = row["ours_gb_per_s"] / row["copy_gb_per_s"]
    print(f"{label:28} {times['ours'] * 1e3:9.1f} us {row['ours_gb_per_s']:7.0f} GB/s, copy "
          f"{row['copy_gb_per_s']:6.0f}, of it {row['of_copy']:.3f};" +
          "".join(f" {name} {times[name] / times['ours']:.2f} times as long"
                  for name in ("cudnn", "flash2") if name in times), flush=True)
    return row


def decode(kernels):
    rows = []
    for batch, q_len, k_len, heads, kv_heads, dim in (
            (8, 1, 131072, 64, 8, 128), (8, 4, 131072, 64, 8, 128), (8, 8, 131072, 64, 8, 128),
            (1, 1, 131072, 64, 8, 128), (8, 1, 32768, 64, 8, 128), (8, 1, 8192, 64, 8, 128),
            (64, 1, 8192, 64, 8, 128), (8, 1, 1024, 64, 8, 128), (1, 1, 1024, 32, 32, 128),
            (8, 1, 65536, 16, 16, 128), (8, 16, 65536, 16, 16, 128), (8, 1, 131072, 64, 8, 64),
            (8, 1, 65536, 64, 8, 256)):
        rows.append(decode_case(kernels, batch, q_len, k_len, heads, kv_heads, dim))
    return rows


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    kernels = Kernels(sys.argv[1])
    mode = sys.argv[2]
    backward = "forward" not in WORDS
    failed = 0
    if mode == "check":
        rows, failed = check(kernels, backward)
    elif mode == "decode":
        rows = decode(kernels)
    else:
        rows = bench(kernels, backward, "quick" in WORDS)
    write(WORDS.path, [row for row in rows if row], dtype=str(DTYPE), cudnn=torch.backends.cudnn.version())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
