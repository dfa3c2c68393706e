#!/usr/bin/env python3
"""Compares attention on Hopper with cuDNN (through PyTorch's SDPA, up to a head_dim of 128): errors and TFLOP/s.

    sm90_attention.py LIBRARY check|bench|decode [OPTION...]

- check: errors against float64, ratio to cuDNN's error
- bench: TFLOP/s, ratio to cuDNN's, same inputs, same run
- decode: few queries, many keys: bytes/s, ratio to a copy's and to PyTorch's kernels (cuDNN, FlashAttention-2)

Options: float16 (else bfloat16), forward (no backward), quick (up to 16K tokens), only=REGEX, FILE.json
(where to write).

FLOP: forward 4 * batch * heads * head_dim * (visible query-key pairs), backward 2.5 times that.
Times: CUDA events, median. Ours and cuDNN's runs alternate. The backward includes everything from
(out, dout) to gradients of 16 bits: delta, clearing dQ, the main kernel, converting dQ: the calls that training makes.
"""

import ctypes
import math
import sys

import torch
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right

from harness import Words, document_lengths, queued_ms, sdpa, write

WORDS = Words(sys.argv[3:])
DTYPE = torch.bfloat16


class Operand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64),
                ("seq_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Shape(ctypes.Structure):  # FlashAttentionShape
    _fields_ = [(name, ctypes.c_int64) for name in
                ("batch", "q_len", "k_len", "num_heads", "num_kv_heads", "head_dim")] + [
        ("softmax_scale", ctypes.c_double), ("dtype", ctypes.c_int), ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p), ("ranges_batch_stride", ctypes.c_int64),
        ("most_queries", ctypes.c_int64), ("key_begin", ctypes.c_void_p),
        ("key_list", ctypes.c_void_p), ("query_begin", ctypes.c_void_p),
        ("query_list", ctypes.c_void_p), ("place_list", ctypes.c_void_p),
        ("key_stride", ctypes.c_int64), ("query_stride", ctypes.c_int64),
        ("softcap", ctypes.c_double), ("alibi_slopes", ctypes.c_void_p),
        ("dropout", ctypes.c_double), ("seed", ctypes.c_uint64), ("first_head", ctypes.c_int64), ("first_row", ctypes.c_int64),
        ("q_positions", ctypes.c_void_p), ("k_positions", ctypes.c_void_p)]


class ForwardParams(ctypes.Structure):  # FlashForwardParams
    _fields_ = [("shape", Shape), ("q", Operand), ("k", Operand), ("v", Operand), ("out", Operand),
                ("lse", ctypes.c_void_p), ("merge", ctypes.c_bool), ("out_dtype", ctypes.c_int),
                ("sum", Operand), ("non_persistent", ctypes.c_bool), ("fp8", ctypes.c_bool),
                ("max_logits", ctypes.c_void_p), ("sinks", ctypes.c_void_p)]


class DeltaParams(ctypes.Structure):  # FlashDeltaParams
    _fields_ = [("shape", Shape), ("out", Operand), ("dout", Operand), ("dlse", ctypes.c_void_p),
                ("delta", ctypes.c_void_p)]


class HeadRange(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_int64), ("end", ctypes.c_int64)]


class BackwardParams(ctypes.Structure):  # FlashBackwardParams
    _fields_ = [("shape", Shape), ("q", Operand), ("k", Operand), ("v", Operand),
                ("dout", Operand), ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
                ("dq", Operand), ("dk", Operand), ("dv", Operand), ("assign", ctypes.c_bool),
                ("deterministic", ctypes.c_bool), ("first_dq", HeadRange),
                ("first_dkv", HeadRange), ("last_dkv", HeadRange), ("dk_out", Operand),
                ("dv_out", Operand)]


DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 3, torch.float16: 4}


def operand(tensor):  # [batch, seqlen, heads, head_dim]
    assert tensor.stride(3) == 1
    return Operand(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def most_queries(begin, end):
    """KeyRanges::most_queries, as training's masks have it; found once."""
    if begin is None or begin.dim() != 1:
        return 0  # not known
    if not hasattr(begin, "most_queries"):
        first = torch.searchsorted(end, begin, right=True)  # query that sees the key `begin`
        rows = torch.arange(len(begin), device=begin.device)
        begin.most_queries = torch.where(begin < end, rows - first + 1, 0).max().item()
    return begin.most_queries


class Kernels:
    """The calls that training makes. What they refuse ends the process with a sentence."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)

    def _call(self, name, params):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        getattr(self.lib, "burst_attention_" + name)(ctypes.byref(params), stream)

    def shape(self, q, k, scale, ranges):
        begin, end = ranges if ranges else (None, None)
        stride = begin.stride(0) if begin is not None and begin.dim() == 2 else 0
        return Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], scale,
                     DTYPES[q.dtype], pointer(begin), pointer(end), stride, most_queries(begin, end))


    def forward(self, q, k, v, scale, ranges, out, lse, fp8=False, sinks=None):
        self._call("forward", ForwardParams(
            self.shape(q, k, scale, ranges), operand(q), operand(k), operand(v), operand(out),
            pointer(lse), False, DTYPES[out.dtype], Operand(), False, fp8, None, pointer(sinks)))

    def backward(self, q, k, v, scale, ranges, out, lse, dout, dq, dk, dv, delta, dq_sum=None,
                 deterministic=False, dlse=None):
        """dq_sum is not used: the library accumulates dQ in memory of its own."""
        shape = self.shape(q, k, scale, ranges)
        self._call("delta", DeltaParams(shape, operand(out), operand(dout), pointer(dlse),
                                        pointer(delta)))
        self._call("backward", BackwardParams(
            shape, operand(q), operand(k), operand(v), operand(dout), pointer(lse), pointer(delta),
            operand(dq), operand(dk), operand(dv), True, deterministic))


# ---- Masks as visible ranges [begin, end) of each query row.

def causal(q_len, k_len):
    rows = torch.arange(q_len, dtype=torch.int32, device="cuda")
    return torch.zeros_like(rows), torch.clamp(rows + 1 + k_len - q_len, min=0)


def window(q_len, k_len, size):
    begin, end = causal(q_len, k_len)
    return torch.clamp(end - size, min=0), end


def documents(lengths):
    starts, end = [], []
    start = 0
    for length in lengths:
        starts += [start] * length
        end += range(start + 1, start + length + 1)
        start += length
    return (torch.tensor(starts, dtype=torch.int32, device="cuda"),
            torch.tensor(end, dtype=torch.int32, device="cuda"))


def visible_pairs(q, k, ranges):
    if not ranges:
        return q.shape[0] * q.shape[1] * k.shape[1]
    begin, end = (x.long() for x in ranges)
    pairs = (end.clamp(max=k.shape[1]) - begin).clamp(min=0).sum().item()
    return pairs * (q.shape[0] if begin.dim() == 1 else 1)


# ---- Reference in float64, one head at a time, and what rounding may do to each element.
#
# Operands of matmuls have 16 bits, so P and dS are rounded before their second matmul, and out, dQ, dK
# and dV at the end. Each is off by a factor within 1 +- U, and in float16, whose smallest numbers are
# few, by another SMALL. Matmuls accumulate in fp32. An element of S, of dP or of the gradients is off by
# at most FP32 times the sum of its terms' absolute values (up to 256, truncated to 24 bits). P is off,
# through S, by a factor within 1 +- EXPONENT (|S| stays under 2^8). Delta is taken from the rounded out.
# Hence
#
#     |d out| <= (U + 2 EXPONENT) P |V| + U |out|
#     |d dS|  <= U |dS| + P (EXPONENT |dP - delta| + FP32 |dO| |V|^T + |dO| . |d out|)
#     |d dQ|  <= scale |d dS| |K| + U |dQ|, and dK alike; |d dV| <= (U + EXPONENT) P^T |dO| + U |dV|
#
# up to products of two of these, for which the whole is taken 2 % larger.
ROUNDING = {torch.bfloat16: (2.0 ** -8, 0.0), torch.float16: (2.0 ** -11, 2.0 ** -25)}  # U, SMALL
FP32, EXPONENT = 2.0 ** -16, 2.0 ** -10


def reference(q, k, v, scale, ranges, dout=None, dlse=None):
    """The truth, and "bound_" + name: the most that the roundings may put an element off."""
    U, SMALL = ROUNDING[q.dtype]
    batch, q_len, heads, _ = q.shape
    k_len, group = k.shape[1], q.shape[2] // k.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64, device="cuda")
    lse = torch.zeros((batch, heads, q_len), dtype=torch.float64, device="cuda")
    dq = torch.zeros_like(out)
    dk = torch.zeros(k.shape, dtype=torch.float64, device="cuda")
    dv = torch.zeros_like(dk)
    bound = {"out": torch.zeros_like(out), "dq": torch.zeros_like(dq), "dk": torch.zeros_like(dk),
             "dv": torch.zeros_like(dv)}
    columns = torch.arange(k_len, device="cuda")
    for b in range(batch):
        masked = None
        if ranges:
            begin, end = (x if x.dim() == 1 else x[b] for x in ranges)
            masked = (columns[None] < begin[:, None]) | (columns[None] >= end[:, None])
        for h in range(heads):
            qd, kd, vd = q[b, :, h].double(), k[b, :, h // group].double(), v[b, :, h // group].double()
            s = scale * (qd @ kd.T)
            if masked is not None:
                s.masked_fill_(masked, -math.inf)
            lse[b, h] = torch.logsumexp(s, 1)
            p = torch.exp(s - lse[b, h][:, None]).nan_to_num_(0.0)
            out[b, :, h] = p @ vd
            bound["out"][b, :, h] = ((U + 2 * EXPONENT) * (p @ vd.abs()) + U * out[b, :, h].abs() +
                                     SMALL * vd.abs().sum(0) + SMALL)
            if dout is not None:
                do = dout[b, :, h].double()
                dp = do @ vd.T
                delta = (do * out[b, :, h]).sum(1)
                if dlse is not None:
                    delta = delta - dlse[b, h].double()
                ds = scale * p * (dp - delta[:, None])
                dq[b, :, h] = ds @ kd
                dk[b, :, h // group] += ds.T @ qd
                dv[b, :, h // group] += p.T @ do
                off = p * (EXPONENT * (dp - delta[:, None]).abs() + FP32 * (do.abs() @ vd.T.abs()) +
                           (do.abs() * bound["out"][b, :, h]).sum(1)[:, None])
                off = U * ds.abs() + scale * (off + SMALL)
                bound["dq"][b, :, h] = off @ kd.abs() + U * dq[b, :, h].abs() + SMALL
                bound["dk"][b, :, h // group] += off.T @ qd.abs()
                bound["dv"][b, :, h // group] += ((U + EXPONENT) * (p.T @ do.abs()) +
                                                      SMALL * do.abs().sum(0))
    bound["dk"] += U * dk.abs() + SMALL
    bound["dv"] += U * dv.abs() + SMALL
    result = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return {**result, **{"bound_" + name: 1.02 * x for name, x in bound.items()}}


def cudnn_forward(q, k, v, scale, is_causal):
    return sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, is_causal=is_causal, scale=scale)


def cudnn_backward(q, k, v, dout, scale, is_causal):
    """A function that computes the gradients of cudnn_forward."""
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    out, grad = cudnn_forward(*leaves, scale, is_causal), dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def max_error(value, expected):
    """Largest error; infinite where one is finite (or a number) and the other is not."""
    value = value.double()
    difference = (value - expected).abs()
    difference[value == expected] = 0  # both -inf
    return difference.nan_to_num_(nan=math.inf).max().item() if difference.numel() else 0.0


def make(batch, q_len, k_len, heads, kv_heads, dim, magnitude, seed=0, padding=0):
    """padding: extra columns, so that the strides are not those of a packed tensor."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    def tensor(length, count):
        x = magnitude * torch.randn((batch, length, count, dim + padding), device="cuda", generator=g)
        return x.to(DTYPE)[..., :dim]
    return tensor(q_len, heads), tensor(k_len, kv_heads), tensor(k_len, kv_heads), tensor(q_len, heads)


def run_ours(kernels, q, k, v, scale, ranges, dout=None, deterministic=False, dlse=None):
    poison = math.nan
    out = torch.full(q.shape, poison, dtype=DTYPE, device="cuda")
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), poison, device="cuda")
    kernels.forward(q, k, v, scale, ranges, out, lse)
    result = {"out": out, "lse": lse}
    if dout is not None:
        dq = torch.full(q.shape, poison, dtype=DTYPE, device="cuda")
        dk = torch.full(k.shape, poison, dtype=DTYPE, device="cuda")
        dv = torch.full(k.shape, poison, dtype=DTYPE, device="cuda")
        delta = torch.full_like(lse, poison)
        kernels.backward(q, k, v, scale, ranges, out, lse, dout, dq, dk, dv, delta,
                         deterministic=deterministic, dlse=dlse)
        result.update(dq=dq, dk=dk, dv=dv)
    torch.cuda.synchronize()
    return result


def run_cudnn(q, k, v, scale, is_causal, dout=None):
    q, k, v = (x.detach().clone().requires_grad_(True) for x in (q, k, v))
    out = cudnn_forward(q, k, v, scale, is_causal)
    result = {"out": out.detach().transpose(1, 2)}
    if dout is not None:
        out.backward(dout.transpose(1, 2))
        result.update(dq=q.grad, dk=k.grad, dv=v.grad)
    torch.cuda.synchronize()
    return result


SEEDS = 4


def rms(value, expected):
    return (value.double() - expected).square().mean().sqrt().item()


def check(kernels, backward=True):
    """Every element within what the roundings allow; up to a head_dim of 128 each case's
    root-mean-square error, and each head_dim's largest error, at most 1.2 times cuDNN's.

    The largest error of a single case is one rounding of one large value. It is printed with
    cuDNN's, not judged.
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
        errors = {}  # (whose, name) -> [largest, root mean square], of every seed
        for seed in range(SEEDS):
            q, k, v, dout = make(2, q_len, k_len, heads, kv_heads, dim, 3.0, seed)
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
    q, k, v, dout = make(batch, length, length, heads, kv_heads, dim, 1.0)
    scale = dim ** -0.5
    flop = 4 * visible_pairs(q, k, ranges) * heads * dim
    out = torch.empty_like(q)
    lse = torch.empty((batch, heads, length), device="cuda")
    compare = mask in ("full", "causal") and dim <= 128
    # Cold clocks and throttling meet both alike.
    repeats = max(5, min(30, int(0.15 / (flop / 5e14))))
    sides = {"ours": lambda: kernels.forward(q, k, v, scale, ranges, out, lse)}
    if compare:
        sides["peer"] = lambda: cudnn_forward(q, k, v, scale, mask == "causal")
        if dim == 128 and name == "long":  # the limit, under the same power and heat
            sides["matmul"] = matmul()
    else:  # our own causal kernel; its time per attended pair is the yardstick of the other masks
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
    """Bytes/s: those of K and V, read once; of a copy of as many bytes, those read and those written."""
    label = f"b{batch} {q_len}x{k_len} {heads}/{kv_heads} D{dim}"
    if not WORDS.wants(label):
        return {}
    q, k, v, _ = make(batch, q_len, k_len, heads, kv_heads, dim, 1.0)
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
        except (RuntimeError, ValueError):  # it does not serve such a call
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
        row[name + "_gb_per_s"] = kv_bytes / ms / 1e6  # a copy reads half of these, and writes them
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
    global DTYPE
    if "float16" in WORDS:
        DTYPE = torch.float16
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
