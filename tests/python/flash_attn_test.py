"""Tests burst.flash_attn and what it rests on against attention by the definition, in double.

More or fewer keys than queries, documents of two sequences, padded head_dims, v with another, FLOP formulas.
torch.func is refused."""

import functools
import inspect
import itertools
import math
import subprocess
import sys
import unittest
from contextlib import nullcontext

import torch
from torch.autograd import forward_ad

import burst
from burst import flash_attn
from harness import main, naive, normal, run_ranks

TOLERANCE = 1e-11  # for sums of a few hundred products in double precision
WINDOWS = ((-1, -1), (3, 0), (2, 2), (0, 0), (50, 50))
LENGTHS = ((5, 12), (12, 5), (7, 7), (1, 9), (4, 1))
BOUNDS = (([0, 5, 5, 12, 13], [0, 9, 12, 12, 20]), ([0, 4, 9], [0, 1, 3]), ([0, 0, 3], [0, 2, 2]))


def shown(queries, keys, causal, window_size):
    """Returns flash-attn's mask, bool [queries, keys]: query i is at the place of key i + keys - queries."""
    ahead = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    left, right = window_size
    right = 0 if causal else right
    return ((ahead <= right) | (right < 0)) & ((ahead >= -left) | (left < 0))


def of_documents(bounds, key_bounds, causal, window_size):
    blocks = [shown(b - a, d - c, causal, window_size) for a, b, c, d in zip(bounds, bounds[1:], key_bounds,
                                                                             key_bounds[1:])]
    return torch.block_diag(*(block.double() for block in blocks)).bool()


def by_definition(q, k, v, mask, scale=None, softcap=0.0):
    """Returns (out, lse) of [batch, tokens, heads, head_dim], of a query without keys 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[3]**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    blind = ~mask.any(1)
    weights = scores.masked_fill(~mask, -math.inf).masked_fill(blind[:, None], 0).softmax(-1)
    weights = weights.masked_fill(blind[:, None], 0)
    lse = scores.masked_fill(~mask, -math.inf).masked_fill(blind[:, None], 0).logsumexp(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse.masked_fill(blind, -math.inf)


def compare(have, want, inputs, wanted_inputs, cut=lambda x: x, cut_keys=lambda x: x):
    """Compares (out, lse) and the gradients of a loss of both."""
    gradients = []
    for (out, lse), of in ((have, inputs), (want, wanted_inputs)):
        loss = out.sin().sum() + lse.masked_fill(lse.isinf(), 0).sin().sum()
        gradients.append(torch.autograd.grad(loss, of))
    pairs = [(have[0], cut(want[0])), (have[1], cut(want[1].transpose(1, 2)).transpose(1, 2))]
    pairs += [(a, c(b)) for a, b, c in zip(*gradients, (cut, cut_keys, cut_keys))]
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def tensors(queries, keys, batch=2, heads=(4, 2), head_dim=8):
    return [normal(name, batch, n, h, head_dim).requires_grad_() for name, n, h in (
        ("q", queries, heads[0]), ("k", keys, heads[1]), ("v", keys, heads[1]))]


def batches(rank, group):
    for (queries, keys), window, causal in itertools.product(LENGTHS, WINDOWS, (False, True)):
        inputs = tensors(queries, keys)
        for softcap, scale in ((0.0, None), (0.7, 0.4)):
            *have, nothing = flash_attn.flash_attn_func(*inputs, 0.0, scale, causal, window, softcap,
                                                        return_attn_probs=True)
            assert nothing is None
            compare(have, by_definition(*inputs, shown(queries, keys, causal, window), scale, softcap), inputs, inputs)


def documents(rank, group):
    for (bounds, keys), window, causal in itertools.product(BOUNDS, WINDOWS, (False, True)):
        inputs = tensors(bounds[-1], keys[-1], 1)
        mask = of_documents(bounds, keys, causal, window)
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            *(x[0] for x in inputs), torch.tensor(bounds, dtype=torch.int32), torch.tensor(keys, dtype=torch.int32),
            9, 9, causal=causal, window_size=window, return_attn_probs=True)
        compare((out[None], lse[None]), by_definition(*inputs, mask), inputs, inputs)


def across_ranks(rank, group):
    """cross_attention has the same masks, with both sequences over ranks."""
    for (queries, keys), window, causal in itertools.product(LENGTHS[:3], (0, 3), (False, True)):
        for layout in ("zigzag", "contiguous"):
            whole = tensors(queries, keys)
            cut = functools.partial(burst.shard, dim=1, group=group, layout=layout)
            local = [cut(x.detach()).requires_grad_() for x in whole]
            have = burst.cross_attention(*local, group=group, layout=layout, causal=causal, window=window,
                                         return_lse=True)
            size = (window - 1, window - 1) if window else (-1, -1)
            compare(have, by_definition(*whole, shown(queries, keys, causal, size)), local, whole, cut, cut)
    bounds, keys = BOUNDS[0]
    whole = tensors(bounds[-1], keys[-1])
    cut = functools.partial(burst.shard, dim=1, group=group)
    local = [cut(x.detach()).requires_grad_() for x in whole]
    for strategy in ("burst", "ulysses"):
        have = burst.cross_attention(*local, group=group, causal=True, cu_seqlens=bounds, return_lse=True,
                                     key_cu_seqlens=torch.tensor(keys), strategy=strategy)
        compare(have, by_definition(*whole, of_documents(bounds, keys, True, (-1, -1))), local, whole, cut, cut)
    slices = [(0, 13, 2, 9, "full")]
    have = burst.cross_attention(*local, group=group, slices=slices, return_lse=True)
    mask = torch.zeros(13, 20, dtype=torch.bool)
    mask[:, 2:9] = True
    compare(have, by_definition(*whole, mask), local, whole, cut, cut)


def packed_names(rank, group):
    q, k, v = (normal(name, 2, 9, 4, 8) for name in "qkv")
    want = flash_attn.flash_attn_func(q, k, v, causal=True)
    same = functools.partial(torch.testing.assert_close, atol=0, rtol=0)
    same(flash_attn.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True), want)
    same(flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), causal=True), want)
    bounds = torch.tensor([0, 4, 9])
    want = naive(q[:1], k[:1], v[:1], starts=[[0, 4]])[0][0]
    for have in (flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack([q[0], k[0], v[0]], 1), bounds, 5, causal=True),
                 flash_attn.flash_attn_varlen_kvpacked_func(q[0], torch.stack([k[0], v[0]], 1), bounds, bounds, 5, 5,
                                                            causal=True),
                 flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds.tolist(), 5, 5, causal=True)):
        torch.testing.assert_close(have, want, atol=TOLERANCE, rtol=0)


def compiled(rank, group):
    """A graph reads the bounds of both sequences when it runs."""
    inputs = tensors(9, 14, 1)
    graph = torch.compile(lambda q, k, v, *bounds: flash_attn.flash_attn_varlen_func(
        q[0], k[0], v[0], *bounds, 9, 14, causal=True, return_attn_probs=True)[:2], fullgraph=True, backend="aot_eager")
    for bounds, keys in (([0, 4, 9], [0, 5, 14]), ([0, 8, 9], [0, 13, 14])):
        out, lse = graph(*inputs, torch.tensor(bounds), torch.tensor(keys))
        compare((out[None], lse[None]), by_definition(*inputs, of_documents(bounds, keys, True, (-1, -1))), inputs, inputs)


def wrong(rank, group):
    q, k = normal("q", 1, 4, 2, 8), normal("k", 1, 6, 2, 8)
    varlen = functools.partial(flash_attn.flash_attn_varlen_func, q[0], k[0], k[0])
    for call, words in (
            (lambda: flash_attn.flash_attn_func(q, k, k, alibi_slopes=[1.0, 0.5]), "alibi_slopes: "),
            (lambda: flash_attn.flash_attn_func(q, k, k, causal=False, window_size=(1, 2)), "window_size: "),
            (lambda: varlen([0, 4], [0, 2, 6], 4, 6), "key_cu_seqlens: must have the length of cu_seqlens"),
            (lambda: varlen([0, 4], [0, 5], 4, 6), "key_cu_seqlens ends with 5, the ranks have 6 keys"),
            (lambda: varlen([0, 3], [0, 6], 4, 6), "cu_seqlens ends with 3"),
            (lambda: varlen([0, 4], [1, 6], 4, 6), "key_cu_seqlens: must begin with 0"),
            (lambda: varlen([0, 4], [0, 6], 4, 6, block_table=q), "block_table: must be None"),
            (lambda: burst.cross_attention(q, k, k, cu_seqlens=[0, 4]), "cu_seqlens: must be given with key_cu"),
            (lambda: burst.cross_attention(q, k, k, causal=True, slices=[(0, 4, 0, 6, "full")]), "slices: must be")):
        try:
            call()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


def padded_head_dims(rank, group):
    """Where kernels take multiples of 8, other head_dims are padded. Here double precision takes the role of 16 bits."""
    burst._attention._MULTIPLES = {torch.float64: 8}
    seen = []
    forward = burst._call.forward
    burst._attention.forward = lambda q, k, v, *more: seen.append((q.shape[3], v.shape[3])) or forward(q, k, v, *more)
    for head_dim, value_dim, scale in ((33, 33, None), (5, 3, None), (8, 8, None), (20, 20, 0.4), (16, 9, None),
                                       (9, 24, None)):
        whole = [normal(name, 2, 13, heads, dim).requires_grad_() for name, heads, dim in (
            ("q", 4, head_dim), ("k", 2, head_dim), ("v", 2, value_dim))]
        cut = functools.partial(burst.shard, dim=1, group=group)
        local = [cut(x.detach()).requires_grad_() for x in whole]
        have = burst.attention(*local, group=group, softmax_scale=scale, return_lse=True)
        compare(have, naive(*whole, softmax_scale=scale), local, whole, cut, cut)
        assert seen[-1] == (-(-head_dim // 8) * 8, -(-value_dim // 8) * 8), (seen, head_dim, value_dim)
    q = normal("q", 1, 4, 2, 5)
    try:
        burst.attention(q, q[..., :4], q[..., :4])
    except ValueError as error:
        assert "got the shape [1, 4, 2, 4]" in str(error), error
    else:
        raise AssertionError("head_dims differed")


def two_head_dims(rank, group):
    """v has another head_dim, which the kernels take, or which they refuse, so that v is padded in the call."""
    taken = []
    value_dim = burst._call.State.value_dim
    served = lambda state, q, *more: taken.append(value_dim(state, q, *more)) or taken[-1]
    padded = lambda state, q, *more: q.shape[3]
    cut = functools.partial(burst.shard, dim=1, group=group)
    for of_v, way in ((16, served), (5, served), (40, served), (16, padded), (5, padded)):
        burst._call.State.value_dim = way
        whole = [normal(name, 2, 13, heads, dim).requires_grad_() for name, heads, dim in (
            ("q", 4, 24), ("k", 2, 24), ("v", 2, of_v))]
        for options in ({}, dict(window=4), dict(softcap=2.0), dict(backward="burst"), dict(seqlen=13)):
            local = [cut(x.detach()).requires_grad_() for x in whole]
            have = burst.attention(*local, group=group, return_lse=True, **options)
            assert have[0].shape[3] == of_v and have[0].is_contiguous(), have[0].shape
            wanted = {key: options[key] for key in options if key in ("window", "softcap")}
            compare(have, naive(*whole, **wanted), local, whole, cut, cut)
    assert set(taken) == {16, 5, 40}, taken
    burst._call.State.value_dim = value_dim
    if rank == 0 and torch.distributed.get_world_size(group) == 1:
        assert not hasattr(torch.library, "custom_op") or compiled_two_head_dims()
    try:  # ranks whose v differ
        k = cut(normal("k", 2, 13, 2, 24))
        burst.attention(cut(normal("q", 2, 13, 4, 24)), k, k[..., :8 + rank], group=group)
    except ValueError as error:
        assert "head_dim of v: the ranks differ" in str(error), error
    else:
        assert torch.distributed.get_world_size(group) == 1


def compiled_two_head_dims():
    whole = [normal(name, 2, 13, heads, dim).requires_grad_() for name, heads, dim in (
        ("q", 4, 24), ("k", 2, 24), ("v", 2, 16))]
    call = torch.compile(lambda q, k, v: burst.attention(q, k, v, return_lse=True), fullgraph=True, backend="aot_eager")
    compare(call(*whole), naive(*whole), whole, whole)
    return True


def counted(call, inputs):
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        call(*inputs).sum().backward()
    return counter.get_total_flops()


def flops(rank, group):
    """They are torch's for scaled_dot_product_attention, and shares of them over ranks and under masks."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count
    size, shape = torch.distributed.get_world_size(group), (2, 4, 16, 8)
    local = [burst.shard(x.detach(), 1, group).requires_grad_() for x in tensors(16, 16, heads=(4, 4))]
    want = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    have = lambda **mask: counted(lambda q, k, v: burst.attention(q, k, v, group=group, **mask), local) * size
    assert have() == want == have(causal=False), (have(), want)
    assert have(documents=[0, 4]) == want * (4 * 4 + 12 * 12) // 256
    assert have(cu_seqlens=torch.tensor([0, 4, 16])) == want * (4 * 4 + 12 * 12) // 256
    assert have(window=4) == want // 4 and have(window=4, causal=False) == want * 7 // 16
    assert have(causal=False, slices=[(0, 8, 0, 16, "full"), (8, 16, 8, 16, "full")]) == want * 3 // 4
    q, k, v = tensors(16, 16, heads=(4, 4))
    of_v = (2, 4, 16, 6)
    want = sdpa_flop_count(shape, shape, of_v) + sdpa_backward_flop_count(of_v, shape, shape, of_v)
    assert counted(burst.attention, (q, k, v[..., :6])) == want
    more, (few, many) = tensors(4, 12, heads=(4, 4)), ((2, 4, 4, 8), (2, 4, 12, 8))
    assert counted(burst.cross_attention, more) == (sdpa_flop_count(few, many, many) +
                                                    sdpa_backward_flop_count(few, few, many, many))


def transforms(rank, group):
    q = normal("q", 1, 6, 2, 8)
    loss = lambda q: burst.attention(q, q, q).sum()

    def forward_mode(function, context):
        with forward_ad.dual_level(), context:
            function(forward_ad.make_dual(q, q))

    def batched(context):
        given = q.clone().requires_grad_()
        with context:
            out = burst.attention(given, given, given)
        torch.autograd.grad(out, given, torch.ones(3, *out.shape, dtype=out.dtype), is_grads_batched=True)

    calls = [lambda: torch.func.grad(loss)(q), lambda: torch.func.vjp(loss, q), lambda: torch.func.jvp(loss, (q,), (q,)),
             lambda: torch.func.vmap(loss)(q[None]), lambda: torch.func.jacrev(loss)(q),
             lambda: forward_mode(loss, nullcontext())]
    if hasattr(torch.library, "custom_op"):
        from torch.utils.flop_counter import FlopCounterMode
        mode = functools.partial(FlopCounterMode, display=False)  # attention is an operator in it
        compiled = torch.compile(loss, backend="eager")
        compiled(q)
        calls += [lambda: batched(nullcontext()), lambda: torch.autograd.functional.jacobian(loss, q, vectorize=True),
                  lambda: torch.func.linearize(loss, q), lambda: forward_mode(loss, mode()), lambda: batched(mode()),
                  lambda: forward_mode(compiled, nullcontext()),
                  lambda: torch.compile(lambda q: torch.func.jvp(loss, (q,), (q,)), backend="eager")(q)]
    for call in calls:
        try:
            call()
        except TypeError as error:
            assert str(error).startswith("attention: must not be in torch.func's transforms"), error
        else:
            raise AssertionError("a transform was not refused")
    torch.testing.assert_close(burst.attention(q, q, q), naive(q, q, q)[0], atol=TOLERANCE, rtol=0)


class FlashAttnTest(unittest.TestCase):
    def test_batches(self):
        run_ranks(1, batches)

    def test_documents(self):
        run_ranks(1, documents)

    def test_across_ranks(self):
        for size in (1, 2):
            with self.subTest(size=size):
                run_ranks(size, across_ranks)

    def test_packed_names(self):
        run_ranks(1, packed_names)

    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "operators need torch 2.4")
    def test_compiled(self):
        run_ranks(1, compiled)

    def test_wrong_arguments(self):
        run_ranks(1, wrong)

    def test_arguments(self):
        """The arguments are the published ones, in order."""
        tail = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
                "return_attn_probs"]
        bounds = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
        for name, head, end in (("", ["q", "k", "v"], []), ("_kvpacked", ["q", "kv"], []), ("_qkvpacked", ["qkv"], []),
                                ("_varlen", ["q", "k", "v", *bounds], ["block_table"]),
                                ("_varlen_kvpacked", ["q", "kv", *bounds], []),
                                ("_varlen_qkvpacked", ["qkv", "cu_seqlens", "max_seqlen"], [])):
            function = getattr(flash_attn, "flash_attn%s_func" % name)
            self.assertEqual(list(inspect.signature(function).parameters), head + tail + end)


class HeadDimsTest(unittest.TestCase):
    def test_padded(self):
        for size in (1, 2):
            with self.subTest(size=size):
                run_ranks(size, padded_head_dims)


    def test_two(self):
        for size in (1, 2, 3):
            with self.subTest(size=size):
                run_ranks(size, two_head_dims)


class TorchTest(unittest.TestCase):
    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "operators need torch 2.4")
    def test_flops(self):
        for size in (1, 2):
            with self.subTest(size=size):
                run_ranks(size, flops)

    @unittest.skipUnless(hasattr(torch, "func"), "torch.func needs torch 2")
    def test_transforms(self):
        run_ranks(1, transforms)

    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "operators need torch 2.4")
    def test_import(self):
        """The package loads neither dynamo nor transformers, which take seconds."""
        program = ("import sys, torch; before = set(sys.modules); import burst; "
                   "print([name for name in set(sys.modules) - before "
                   "if name.split('.')[0] not in ('burst', 'torch') or 'dynamo' in name or 'inductor' in name])")
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for module in ("_dynamo", "_inductor", "transformers"):
            self.assertNotIn(module, done.stdout)


if __name__ == "__main__":
    main()
