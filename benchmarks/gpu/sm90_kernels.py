"""The calls of libburst_sm90.so, masks, and attention in float64, for the benchmarks of Hopper's kernels."""

import ctypes
import math

import torch
from torch.nn.attention import SDPBackend

from harness import sdpa


class Operand(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("batch_stride", ctypes.c_int64),
                ("seq_stride", ctypes.c_int64), ("head_stride", ctypes.c_int64)]


class Shape(ctypes.Structure):  # FlashAttentionShape
    _fields_ = [(name, ctypes.c_int64) for name in
                ("batch", "q_len", "k_len", "num_heads", "num_kv_heads", "head_dim", "value_dim")] + [
        ("softmax_scale", ctypes.c_double), ("dtype", ctypes.c_int), ("begin", ctypes.c_void_p),
        ("end", ctypes.c_void_p), ("ranges_batch_stride", ctypes.c_int64),
        ("most_queries", ctypes.c_int64), ("documents", ctypes.c_bool), ("key_begin", ctypes.c_void_p),
        ("key_list", ctypes.c_void_p), ("query_begin", ctypes.c_void_p),
        ("query_list", ctypes.c_void_p), ("place_list", ctypes.c_void_p),
        ("key_stride", ctypes.c_int64), ("query_stride", ctypes.c_int64),
        ("softcap", ctypes.c_double), ("alibi_slopes", ctypes.c_void_p),
        ("dropout", ctypes.c_double), ("seed", ctypes.c_uint64), ("first_head", ctypes.c_int64), ("first_row", ctypes.c_int64),
        ("q_positions", ctypes.c_void_p), ("k_positions", ctypes.c_void_p)]


class ForwardParams(ctypes.Structure):  # FlashForwardParams
    _fields_ = [("shape", Shape), ("q", Operand), ("k", Operand), ("v", Operand), ("out", Operand),
                ("lse", ctypes.c_void_p), ("merge", ctypes.c_bool), ("out_dtype", ctypes.c_int),
                ("sum", Operand), ("rows", ctypes.c_int64 * 5), ("non_persistent", ctypes.c_bool), ("fp8", ctypes.c_bool),
                ("max_logits", ctypes.c_void_p), ("sinks", ctypes.c_void_p)]


class DeltaParams(ctypes.Structure):  # FlashDeltaParams
    _fields_ = [("shape", Shape), ("out", Operand), ("dout", Operand), ("dlse", ctypes.c_void_p),
                ("delta", ctypes.c_void_p)]


class HeadRange(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_int64), ("end", ctypes.c_int64)]


class GradientTarget(ctypes.Structure):
    _fields_ = [("sum", Operand), ("result", Operand), ("first", HeadRange), ("last", HeadRange)]


class BackwardParams(ctypes.Structure):  # FlashBackwardParams
    _fields_ = [("shape", Shape), ("q", Operand), ("k", Operand), ("v", Operand),
                ("dout", Operand), ("lse", ctypes.c_void_p), ("delta", ctypes.c_void_p),
                ("dq", GradientTarget), ("dk", GradientTarget), ("dv", GradientTarget),
                ("deterministic", ctypes.c_bool)]


DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 3, torch.float16: 4}


def operand(tensor):  # [batch, seqlen, heads, head_dim]
    assert tensor.stride(3) == 1
    return Operand(tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2))


def pointer(tensor):
    return None if tensor is None else tensor.data_ptr()


def most_queries(begin, end):
    """Returns KeyRanges::most_queries, as training's masks have it. It is found once."""
    if begin is None or begin.dim() != 1:
        return 0  # unknown
    if not hasattr(begin, "most_queries"):
        first = torch.searchsorted(end, begin, right=True)  # the query that sees the key `begin`
        rows = torch.arange(len(begin), device=begin.device)
        begin.most_queries = torch.where(begin < end, rows - first + 1, 0).max().item()
    return begin.most_queries


class Kernels:
    """Makes the calls that training makes. A refused call ends the process with a sentence."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)

    def _call(self, name, params):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        getattr(self.lib, "burst_attention_" + name)(ctypes.byref(params), stream)

    def shape(self, q, k, v, scale, ranges):
        begin, end = ranges if ranges else (None, None)
        stride = begin.stride(0) if begin is not None and begin.dim() == 2 else 0
        return Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3], scale,
                     DTYPES[q.dtype], pointer(begin), pointer(end), stride, most_queries(begin, end),
                     getattr(begin, "documents", False))

    def forward(self, q, k, v, scale, ranges, out, lse, fp8=False, sinks=None):
        self._call("forward", ForwardParams(
            self.shape(q, k, v, scale, ranges), operand(q), operand(k), operand(v), operand(out),
            pointer(lse), False, DTYPES[out.dtype], Operand(), (0,) * 5, False, fp8, None, pointer(sinks)))

    def backward(self, q, k, v, scale, ranges, out, lse, dout, dq, dk, dv, delta, dq_sum=None,
                 deterministic=False, dlse=None):
        """Does not use dq_sum: the library accumulates dQ in memory of its own."""
        shape = self.shape(q, k, v, scale, ranges)
        self._call("delta", DeltaParams(shape, operand(out), operand(dout), pointer(dlse),
                                        pointer(delta)))
        self._call("backward", BackwardParams(
            shape, operand(q), operand(k), operand(v), operand(dout), pointer(lse), pointer(delta),
            *(GradientTarget(result=operand(gradient)) for gradient in (dq, dk, dv)), deterministic))


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
    begin = torch.tensor(starts, dtype=torch.int32, device="cuda")
    begin.documents = True
    return begin, torch.tensor(end, dtype=torch.int32, device="cuda")


def visible_pairs(q, k, ranges):
    if not ranges:
        return q.shape[0] * q.shape[1] * k.shape[1]
    begin, end = (x.long() for x in ranges)
    pairs = (end.clamp(max=k.shape[1]) - begin).clamp(min=0).sum().item()
    return pairs * (q.shape[0] if begin.dim() == 1 else 1)


# ---- The reference in float64, one head at a time, and the bound of each element's roundings.
#
# Operands of matmuls have 16 bits. P and dS are rounded before their second matmul, and out, dQ, dK and dV
# at the end. Each rounding is a factor within 1 +- U. In float16, whose smallest numbers are few, it also
# adds up to SMALL. Matmuls accumulate in fp32. An element of S, dP or the gradients sums at most 256 terms,
# truncated to 24 bits. Its error is at most FP32 times the sum of their magnitudes. The error of S
# makes P off by a factor within 1 +- EXPONENT (|S| stays under 2^8). Delta is taken from the rounded out.
# Hence
#
#     |d out| <= (U + 2 EXPONENT) P |V| + U |out|
#     |d dS|  <= U |dS| + P (EXPONENT |dP - delta| + FP32 |dO| |V|^T + |dO| . |d out|)
#     |d dQ|  <= scale |d dS| |K| + U |dQ|, and dK alike; |d dV| <= (U + EXPONENT) P^T |dO| + U |dV|
#
# up to products of two of these errors, for which the bound is taken 2 % larger.
ROUNDING = {torch.bfloat16: (2.0 ** -8, 0.0), torch.float16: (2.0 ** -11, 2.0 ** -25)}  # U, SMALL
FP32, EXPONENT = 2.0 ** -16, 2.0 ** -10


def reference(q, k, v, scale, ranges, dout=None, dlse=None):
    """Returns the truth by name, and by "bound_" + name the largest error that the roundings allow."""
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
    """Returns a function that computes the gradients of cudnn_forward."""
    leaves = [x.detach().requires_grad_(True) for x in (q, k, v)]
    out, grad = cudnn_forward(*leaves, scale, is_causal), dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def max_error(value, expected):
    """Returns the largest error. It is infinite where only one of the two is finite (or a number)."""
    value = value.double()
    difference = (value - expected).abs()
    difference[value == expected] = 0  # both -inf
    return difference.nan_to_num_(nan=math.inf).max().item() if difference.numel() else 0.0


def make(batch, q_len, k_len, heads, kv_heads, dim, magnitude, seed=0, dtype=torch.bfloat16, value_dim=None):
    """Returns q, k, v and dout of normal numbers. value_dim: v's and dout's head_dim; default: q's."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    def tensor(length, count, columns):
        return (magnitude * torch.randn((batch, length, count, columns), device="cuda", generator=g)).to(dtype)
    of_v = value_dim or dim
    return tensor(q_len, heads, dim), tensor(k_len, kv_heads, dim), tensor(k_len, kv_heads, of_v), tensor(q_len, heads, of_v)


def run_ours(kernels, q, k, v, scale, ranges, dout=None, deterministic=False, dlse=None):
    poison = math.nan
    out = q.new_full((*q.shape[:3], v.shape[3]), poison)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), poison, device="cuda")
    kernels.forward(q, k, v, scale, ranges, out, lse)
    result = {"out": out, "lse": lse}
    if dout is not None:
        dq, dk, dv = (torch.full_like(x, poison) for x in (q, k, k))
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


def rms(value, expected):
    return (value.double() - expected).square().mean().sqrt().item()
