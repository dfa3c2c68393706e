"""Compares burst.attention with naive attention in double: layouts, masks, heads, strategies, gradients."""

import unittest
import unittest.mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import burst
from harness import main, naive, normal, run_ranks

# The tolerance in double precision. Sums of a few hundred products of numbers below 5 come in another order: a
# thousand roundings of 2^-53, times 5 * 5, times 10 because the softmax's scores magnify errors.
TOLERANCE = 1000 * 2**-53 * 250


class Problem:
    """Holds q, k and v of a whole sequence, and the gradients of a loss of (out, lse)."""

    def __init__(self, batch, seqlen, heads, kv_heads, head_dim, **mask):
        self.mask = mask
        self.inputs = [normal(name, batch, seqlen, h, head_dim)
                       for name, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))]
        self.dout, self.dlse = normal("o", batch, seqlen, heads, head_dim), normal("l", batch, heads, seqlen)

    def expected(self):
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        out, lse = naive(*inputs, **self.mask)
        lse_seen = lse.masked_fill(lse.isinf(), 0)
        loss = (out * self.dout).sum() + (lse_seen * self.dlse).sum()
        return [out.detach(), lse.detach()] + list(torch.autograd.grad(loss, inputs))

    def packed(self, layout, group, arguments):
        """Returns the arguments that tell shard which tokens a rank has in the layout "balanced"."""
        if layout != "balanced":
            return {}
        size = dist.get_world_size(group) if arguments.get("strategy") == "ulysses" else 0
        return dict(documents=self.mask.get("starts"), causal=self.mask.get("causal", True),
                    window=self.mask.get("window", 0),
                    ulysses_size=arguments.get("ulysses_size", size))

    def on_rank(self, group, layout="zigzag", dtype=torch.float64, prepare=lambda x: x, **arguments):
        """Computes attention of this rank's tokens with burst."""
        packed = self.packed(layout, group, arguments)
        local = [prepare(burst.shard(x.to(dtype), 1, group, layout, **packed)).requires_grad_()
                 for x in self.inputs]
        mask = dict(self.mask)
        starts = mask.pop("starts", None)
        out, lse = burst.attention(*local, group=group, layout=layout, documents=starts, return_lse=True,
                                   **mask, **arguments)
        dout = burst.shard(self.dout.to(dtype), 1, group, layout, **packed)
        dlse = burst.shard(self.dlse.to(dtype), 2, group, layout, **packed)
        loss = (out * dout).sum() + (lse * dlse).sum()
        return [out.detach(), lse.detach()] + list(torch.autograd.grad(loss, local))


    def sinks_gradient(self, group, sinks, strategy):
        local = [burst.shard(x, 1, group) for x in self.inputs]
        mask = dict(self.mask)
        out, lse = burst.attention(*local, group=group, documents=mask.pop("starts", None), sinks=sinks,
                                   strategy=strategy, return_lse=True, **mask)
        loss = (out * burst.shard(self.dout, 1, group)).sum()
        return torch.autograd.grad(loss + (lse * burst.shard(self.dlse, 2, group)).sum(), [sinks])


def compare(problem, group, layout="zigzag", tolerance=TOLERANCE, **arguments):
    expected = problem.expected()
    actual = problem.on_rank(group, layout, **arguments)
    for name, want, have in zip(("out", "lse", "dq", "dk", "dv"), expected, actual):
        want = burst.shard(want, 2 if name == "lse" else 1, group, layout,
                           **problem.packed(layout, group, arguments))
        assert have.shape == want.shape, (name, have.shape, want.shape)
        error = (have.double() - want).abs().max().item() if want.numel() else 0.0
        assert error <= tolerance, "%s is off by %g with %s %s %s" % (
            name, error, layout, problem.mask, arguments)


MASKS = [dict(causal=True), dict(causal=False), dict(causal=True, window=5),
         dict(causal=False, window=4), dict(causal=True, starts=[[0, 6, 7, 20]]),
         dict(causal=False, starts=[[3, 17], [0, 11]]), dict(causal=True, softmax_scale=0.7),
         dict(spans=[[(0, 9), (20, 21)], [(4, 28)]]), dict(window=4, spans=[[(3, 17)]]),
         dict(starts=[[0, 6, 20]], spans=[[(6, 15)], []]),
         dict(causal=False, slices=[burst.masks.tree(9, [7, 0, 1, 12])]),
         dict(causal=False, slices=[burst.masks.window_with_global_tokens(29, 4, [0, 1, 13]),
                                    burst.masks.window_with_global_tokens(29, 3, [9], causal=True)]),
         dict(causal=False, slices=[burst.masks.blocks(29, 5, [[0], [0, 4], [1, 2], [3], [4], [0, 5]],
                                                       causal=True)]),
         dict(causal=False, slices=[[(0, 29, 3, 29, "inverse_causal"), (2, 29, 2, 20, "causal"),
                                     (5, 29, 0, 3, "full")],
                                    [(0, 29, -9, 29, "band"), (3, 11, 15, 29, "causal")]])]


def every_layout_and_mask(rank, group):
    for layout in ("zigzag", "contiguous", "striped", "balanced"):
        for mask in MASKS:
            compare(Problem(2, 29, 4, 2, 8, **mask), group, layout)


def queries_in_no_slice(rank, group):
    """Queries in no slice see nothing: out is 0, lse is -inf, and no gradient comes from them."""
    problem = Problem(1, 12, 2, 2, 8, causal=False, slices=[[(0, 8, 0, 12, "full")]])
    out, lse, dq, dk, dv = problem.on_rank(group)
    at = torch.tensor(burst.positions(12, group))
    blind = at >= 8
    assert (out[:, blind] == 0).all() and (lse[:, :, blind] == -float("inf")).all()
    assert (dq[:, blind] == 0).all() and dq.isfinite().all()
    q, k, v = (x.clone().requires_grad_() for x in problem.inputs)
    want, want_lse = naive(q[:, :8], k, v, causal=False)
    loss = (want * problem.dout[:, :8]).sum() + (want_lse * problem.dlse[:, :, :8]).sum()
    for have, want in zip((dk, dv), torch.autograd.grad(loss, (k, v))):
        torch.testing.assert_close(have, burst.shard(want, 1, group), atol=TOLERANCE, rtol=0)


def every_strategy(rank, group):
    for arguments in (dict(strategy="ring"), dict(strategy="ulysses"), dict(backward="burst"),
                      dict(backward="ring"), dict(ulysses_size=2), dict(ranks_per_node=2),
                      dict(ulysses_size=2, ranks_per_node=2)):
        for mask in MASKS[:1] + MASKS[4:5] + MASKS[10:11]:
            compare(Problem(1, 29, 4, 4, 8, **mask), group, **arguments)
            compare(Problem(1, 29, 4, 4, 8, **mask), group, "balanced", **arguments)


def every_strategy_of_one_rank(rank, group):
    """One rank accepts every option of a ring; options without meaning there change nothing."""
    for arguments in (dict(strategy="ring"), dict(strategy="ulysses"), dict(backward="burst"),
                      dict(backward="ring"), dict(ulysses_size=1), dict(ranks_per_node=1)):
        compare(Problem(1, 29, 4, 4, 8), group, **arguments)


def narrower_values(rank, group):
    """v and out have a smaller head_dim than q and k."""
    inputs = [normal(name, 2, 29, heads, dim) for name, heads, dim in (("q", 4, 8), ("k", 2, 8), ("v", 2, 5))]
    dout, dlse = normal("o", 2, 29, 4, 5), normal("l", 2, 4, 29)
    for layout in ("zigzag", "contiguous"):
        local = [burst.shard(x, 1, group, layout).requires_grad_() for x in inputs]
        whole = [x.clone().requires_grad_() for x in inputs]
        out, lse = burst.attention(*local, group=group, layout=layout, return_lse=True)
        want, want_lse = naive(*whole)
        loss = (out * burst.shard(dout, 1, group, layout)).sum() + (
            lse * burst.shard(dlse, 2, group, layout)).sum()
        gradients = torch.autograd.grad((want * dout).sum() + (want_lse * dlse).sum(), whole)
        for dim, have, wanted in ((1, out, want), (2, lse, want_lse),
                                  *((1, *pair) for pair in zip(torch.autograd.grad(loss, local), gradients))):
            torch.testing.assert_close(have, burst.shard(wanted, dim, group, layout), atol=TOLERANCE, rtol=0)


def heads_and_lengths(rank, group):
    for seqlen in (1, 2, 3, 7, 64):  # also fewer tokens than ranks
        for heads, kv_heads in ((1, 1), (6, 1), (6, 3)):
            compare(Problem(1, seqlen, heads, kv_heads, 5), group)


def packed_and_float32(rank, group):
    problem = Problem(1, 41, 4, 2, 16, starts=[[0, 10, 33]])
    layout = "striped"
    q, k, v = (burst.shard(x[0], 0, group, layout) for x in problem.inputs)
    out, lse = burst.attention(q, k, v, cu_seqlens=torch.tensor([0, 10, 10, 33, 41]), group=group,
                               layout=layout, return_lse=True)
    want_out, want_lse = problem.expected()[:2]
    torch.testing.assert_close(out, burst.shard(want_out[0], 0, group, layout), atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(lse, burst.shard(want_lse[0], 1, group, layout), atol=TOLERANCE, rtol=0)
    # float32: the same bound with 2^-24.
    compare(problem, group, layout, dtype=torch.float32, tolerance=TOLERANCE * 2**29)


def of_16_bits(rank, group):
    """Tensors of 16 bits are computed in float32, and each result is rounded once."""
    for dtype, rounding in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        for arguments in (dict(), dict(strategy="ring", layout="striped")):
            for mask in MASKS:
                problem = Problem(2, 29, 4, 2, 8, **mask)
                problem.inputs = [x.to(dtype).double() for x in problem.inputs]
                problem.dout, problem.dlse = problem.dout.to(dtype).double(), problem.dlse.to(dtype).double()
                have = problem.on_rank(group, dtype=dtype, **arguments)
                for x, y in zip(have, problem.on_rank(group, dtype=dtype, **arguments)):
                    assert torch.equal(x, y), "two runs differ"
                # The backward reads the rounded out. Its rounding, times dout, acts like a part of -dlse.
                layout = arguments.get("layout", "zigzag")
                out = burst.unshard(have[0].double(), 1, group, layout)
                problem.dlse -= ((out - problem.expected()[0]) * problem.dout).sum(3).transpose(1, 2)
                for name, x, whole in zip(("out", "lse", "dq", "dk", "dv"), have, problem.expected()):
                    want = burst.shard(whole, 2 if name == "lse" else 1, group, layout)
                    assert x.dtype is (torch.float32 if name == "lse" else dtype)
                    if not want.numel() or name == "lse" and want.isinf().any():
                        continue
                    allowed = (0 if name == "lse" else rounding) * want.abs() + 1e-5 * whole.abs().max()
                    error = (x.double() - want).abs()
                    assert (error <= allowed).all(), (name, dtype, mask, arguments, error.max())


def padding_of_nan(rank, group):
    """NaN in the last document, which is padding, changes no bit of other tokens' results."""
    tensors = [normal(name, 41, heads, 16) for name, heads in (("q", 4), ("k", 2), ("v", 2), ("o", 4))]
    real = burst.positions(41, group) < 33

    def run(tensors):
        q, k, v, dout = (burst.shard(x, 0, group) for x in tensors)
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = burst.attention(*inputs, cu_seqlens=[0, 10, 33, 41], causal=False, group=group)
        return [x[real] for x in (out.detach(), *torch.autograd.grad(out, inputs, dout))]

    want = run(tensors)
    for bad in range(4):
        poisoned = [x.clone() for x in tensors]
        poisoned[bad][33:] = float("nan")
        for got, finite in zip(run(poisoned), want):
            assert torch.equal(got, finite), "NaN in input %d" % bad


SLOPES = (0.5, 0.0, 0.25, 1.0)


def changed_scores(rank, group):
    for change in (dict(softcap=1.5), dict(alibi_slopes=SLOPES), dict(softcap=0.8, alibi_slopes=SLOPES)):
        for layout, arguments in (("zigzag", {}), ("striped", dict(strategy="ring")),
                                  ("contiguous", dict(strategy="ulysses")), ("balanced", {}),
                                  ("zigzag", dict(ulysses_size=2))):
            for mask in (dict(), dict(causal=False), dict(window=5, starts=[[0, 6, 20]]), MASKS[10]):
                compare(Problem(2, 29, 4, 4, 8, **mask, **change), group, layout, **arguments)


def largest_scores(rank, group):
    q, k, v = Problem(2, 29, 4, 4, 8).inputs
    local = [burst.shard(x, 1, group) for x in (q, k, v)]
    distance = torch.arange(29)[:, None] - torch.arange(29)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    capped = torch.tanh(scores) - torch.tensor(SLOPES)[:, None, None] * distance.abs()
    for want, arguments in ((scores, dict()), (capped, dict(softcap=1.0, alibi_slopes=SLOPES)),
                            (scores, dict(strategy="ulysses")), (scores, dict(ulysses_size=2))):
        want = want.masked_fill(distance < 0, -float("inf")).amax((2, 3)).float()
        out, have = burst.attention(*local, group=group, return_max_logit=True, **arguments)
        torch.testing.assert_close(have, want, atol=2**-23, rtol=2**-23)
        assert torch.equal(out, burst.attention(*local, group=group, **arguments))
    _, lse, have = burst.attention(*(x[0].requires_grad_() for x in local), group=group, return_lse=True,
                                   return_max_logit=True)
    assert have.shape == (4,) and lse.requires_grad and not have.requires_grad


def dropped_weights(rank, group):
    """With one-hot values, out is the weights. It shows which weights are dropped, for any values."""
    probability, seqlen = 0.3, 32
    problem = Problem(2, seqlen, 4, 2, seqlen, window=20)
    q, k, _ = problem.inputs
    one_hot = torch.eye(seqlen, dtype=torch.float64)[None, :, None].expand(2, -1, 2, -1)
    weights = burst.attention(q, k, one_hot, window=20, dropout_p=probability, dropout_seed=7)
    whole, _ = naive(q, k, one_hot, window=20)
    seen = whole > 0
    kept = torch.where(seen, weights / whole, torch.zeros(()).double())
    scaled = 1 / (1 - probability)
    assert (((kept - scaled).abs() < TOLERANCE) | (kept == 0))[seen].all()
    # Choices are independent over rows, heads and pairs: within 5 standard deviations of a binomial.
    keeps = kept > 0
    count, expected = seen.sum().item(), 1 - probability
    share = keeps[seen].double().mean().item()
    assert abs(share - expected) < 5 * (probability * expected / count)**0.5, share
    same = [keeps[0] == keeps[1], keeps[:, :, 0] == keeps[:, :, 1]]
    for equal, shown in zip(same, (seen[0], seen[:, :, 0])):
        both = probability**2 + expected**2
        share = equal[shown].double().mean().item()
        assert abs(share - both) < 5 * (both * (1 - both) / shown.sum().item())**0.5, share
    problem.mask["kept"] = (keeps.double() * scaled).transpose(1, 2)  # [batch, heads, q, k]
    want = problem.expected()
    problem.expected = lambda: want
    del problem.mask["kept"]
    for layout in ("zigzag", "contiguous", "striped"):
        for arguments in (dict(), dict(backward="ring"), dict(backward="burst"), dict(ulysses_size=2),
                          dict(strategy="ring")):
            if arguments and dist.get_world_size(group) == 1:
                continue
            compare(problem, group, layout, dropout_p=probability, dropout_seed=7, **arguments)


def seeds(rank, group):
    q, k, v = (burst.shard(x, 1, group) for x in Problem(1, 24, 4, 2, 8).inputs)

    def drop(**arguments):
        return burst.attention(q, k, v, group=group, dropout_p=0.5, **arguments)

    first, second = drop(dropout_seed=1), drop(dropout_seed=2)
    assert torch.equal(first, drop(dropout_seed=1)) and not torch.equal(first, second)
    assert not torch.equal(drop(), drop()), "every call draws"
    torch.manual_seed(5)
    drawn = drop()
    torch.manual_seed(5)
    assert torch.equal(drawn, drop())
    q.requires_grad_()
    gradients = []
    for wrapped in (False, True):  # a recomputation drops the same weights
        torch.manual_seed(9)
        out = checkpoint(drop, use_reentrant=False) if wrapped else drop()
        burst.attention(q, k, v, group=group, dropout_p=0.5)  # other calls come between
        gradients.append(torch.autograd.grad(out.square().sum(), q)[0])
    assert torch.equal(*gradients)


def with_sinks(rank, group):
    for heads, kv_heads, mask in ((4, 2, dict()), (3, 3, dict(causal=False, window=4)),
                                  (2, 1, dict(starts=[[0, 6, 20]]))):
        problem = Problem(2, 27, heads, kv_heads, 8, **mask)
        whole = [x.clone().requires_grad_() for x in problem.inputs + [normal("s", heads)]]
        out, lse = naive(*whole[:3], sinks=whole[3], **mask)
        loss = (out * problem.dout).sum() + (lse * problem.dlse).sum()
        *gradients, dsinks = torch.autograd.grad(loss, whole)
        problem.expected = lambda: [out.detach(), lse.detach()] + gradients
        sinks = normal("s", heads).requires_grad_()
        for strategy in ("burst", "ulysses"):
            if strategy == "ulysses" and heads % dist.get_world_size(group):
                continue
            compare(problem, group, sinks=sinks, strategy=strategy)
            own, = problem.sinks_gradient(group, sinks, strategy)  # this rank's part
            dist.all_reduce(own, group=group)
            assert (own - dsinks).abs().max() <= TOLERANCE


def across_sequences(rank, group):
    for tokens, keys, heads, kv_heads in ((29, 12, 4, 2), (3, 40, 2, 2), (24, 24, 6, 2), (5, 1, 1, 1)):
        for arguments in (dict(), dict(layout="striped", key_layout="contiguous"), dict(backward="ring"),
                          dict(backward="burst", key_layout="striped"), dict(ranks_per_node=2),
                          dict(strategy="ring", layout="contiguous"), dict(strategy="ulysses"),
                          dict(ulysses_size=2, key_layout="striped"), dict(seqlen=tokens)):
            size = dist.get_world_size(group)
            if size == 1 and set(arguments) - {"layout", "key_layout", "seqlen"}:
                continue
            groups = arguments.get("ulysses_size", size if "strategy" in arguments else 1)
            if arguments.get("strategy") != "ring" and (heads % groups or (
                    kv_heads % groups and groups % kv_heads)):
                continue
            layout = arguments.get("layout", "zigzag")
            key_layout = arguments.get("key_layout") or layout
            whole = [normal(name, 2, n, h, 8).requires_grad_() for name, n, h in (
                ("q", tokens, heads), ("k", keys, kv_heads), ("v", keys, kv_heads))]
            dout, dlse = normal("o", 2, tokens, heads, 8), normal("l", 2, heads, tokens)
            out, lse = naive(*whole, causal=False)
            want = [out, lse] + list(torch.autograd.grad([out, lse], whole, [dout, dlse]))
            layouts = (layout, key_layout, key_layout)
            local = [burst.shard(x.detach(), 1, group, of).requires_grad_()
                     for x, of in zip(whole, layouts)]
            out, lse = burst.cross_attention(*local, group=group, return_lse=True, **arguments)
            have = [out, lse] + list(torch.autograd.grad([out, lse], local, [
                burst.shard(dout, 1, group, layout), burst.shard(dlse, 2, group, layout)]))
            for name, a, b, of in zip(("out", "lse", "dq", "dk", "dv"), want, have,
                                      (layout, layout, *layouts)):
                a = burst.shard(a.detach(), 2 if name == "lse" else 1, group, of)
                assert a.shape == b.shape, (name, a.shape, b.shape)
                assert a.numel() == 0 or (a - b.detach()).abs().max() <= TOLERANCE, (name, arguments)


def strided_operands(rank, group):
    # Slices of a packed projection, and a last stride that is not 1.
    problem = Problem(2, 24, 4, 4, 8)
    qkv = torch.stack([burst.shard(x, 1, group) for x in problem.inputs], 2).requires_grad_()
    out = burst.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], group=group)
    out.backward(burst.shard(problem.dout, 1, group).expand_as(out))
    want = Problem(2, 24, 4, 4, 8)
    want.dlse = torch.zeros_like(want.dlse)
    for i, gradient in enumerate(want.expected()[2:]):
        torch.testing.assert_close(qkv.grad[:, :, i], burst.shard(gradient, 1, group),
                                   atol=TOLERANCE, rtol=0)
    compare(problem, group, prepare=lambda x: x.transpose(1, 3).contiguous().transpose(1, 3))
    local = [burst.shard(x, 1, group).requires_grad_() for x in problem.inputs]
    want = None
    for _ in range(5):  # gradients whose strides are all 0, and contiguous gradients
        results = burst.attention(*local, group=group, return_lse=True)
        if want is None:
            want = torch.autograd.grad(results, local, [torch.ones_like(x) for x in results])
        else:
            have = torch.autograd.grad(sum(x.sum() for x in results), local)
            for a, b in zip(have, want):
                torch.testing.assert_close(a, b, atol=0, rtol=0)


class AttentionTest(unittest.TestCase):
    def test_every_layout_and_mask(self):
        for size in (1, 2, 3, 4):
            with self.subTest(size=size):
                run_ranks(size, every_layout_and_mask)

    def test_every_strategy(self):
        run_ranks(4, every_strategy)
        run_ranks(1, every_strategy_of_one_rank)

    def test_heads_and_lengths(self):
        run_ranks(3, heads_and_lengths)

    def test_narrower_values(self):
        for size in (1, 3):
            with self.subTest(size=size):
                run_ranks(size, narrower_values)

    def test_packed_and_float32(self):
        run_ranks(2, packed_and_float32)

    def test_16_bits(self):
        for size in (1, 2, 4):
            with self.subTest(size=size):
                run_ranks(size, of_16_bits)

    def test_padding_of_nan(self):
        for size in (1, 2):
            run_ranks(size, padding_of_nan)

    def test_changed_scores(self):
        run_ranks(4, changed_scores)

    def test_largest_scores(self):
        run_ranks(4, largest_scores)

    def test_dropped_weights(self):
        for size in (1, 4):
            with self.subTest(ranks=size):
                run_ranks(size, dropped_weights)

    def test_seeds(self):
        run_ranks(2, seeds)

    def test_sinks(self):
        for size in (1, 3):
            with self.subTest(size=size):
                run_ranks(size, with_sinks)

    def test_queries_in_no_slice(self):
        for size in (1, 3):
            with self.subTest(size=size):
                run_ranks(size, queries_in_no_slice)

    def test_across_sequences(self):
        for size in (1, 2, 4):
            with self.subTest(size=size):
                run_ranks(size, across_sequences)

    def test_strided_operands(self):
        run_ranks(2, strided_operands)

    def test_gradcheck(self):
        def body(rank, group):
            inputs = [normal(name, 1, 5, h, 3).requires_grad_() for name, h in (("q", 2), ("k", 1), ("v", 1))]
            for arguments in (dict(), dict(causal=False), dict(window=2), dict(documents=[0, 3]),
                              dict(spans=[(1, 4)]),
                              dict(causal=False, slices=burst.masks.tree(2, [2, 1])),
                              dict(causal=False,
                                   slices=burst.masks.Frozen(burst.masks.tree(2, [2, 1])))):
                assert torch.autograd.gradcheck(
                    lambda *x: burst.attention(*x, return_lse=True, **arguments), inputs)
        run_ranks(1, body)

    def test_large_masks_in_turns_are_read_once(self):
        def body(rank, group):
            q, k, v = (normal(name, 1, 1024, 1, 2) for name in "qkv")
            everything = [list(range(128))] * 128  # 16,384 slices, more than a cache of bytes keeps
            masks = [burst.masks.Frozen(burst.masks.blocks(1024, 8, everything, causal)) for causal in (False, True)]
            with unittest.mock.patch("burst._arguments._slices", wraps=burst._arguments._slices) as read:
                for mask in masks * 3:
                    burst.attention(q, k, v, causal=False, slices=mask)
            assert read.call_count == len(masks), read.call_count
        run_ranks(1, body)

    def test_without_a_group_it_is_flash_attention(self):
        def body(rank, group):
            q, k, v = (normal(name, 2, 33, 4, 8) for name in "qkv")
            want = torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2) if hasattr(
                    torch.nn.functional, "scaled_dot_product_attention") else naive(q, k, v)[0]
            torch.testing.assert_close(burst.attention(q, k, v), want, atol=TOLERANCE, rtol=0)
        run_ranks(1, body)

    def test_shard_and_unshard(self):
        def body(rank, group):
            for layout, packed in (("zigzag", {}), ("contiguous", {}), ("striped", {}),
                                   ("balanced", {}), ("balanced", dict(documents=[0, 1])),
                                   ("balanced", dict(documents=[[0], [1]], window=2))):
                for n in (2, 9, 24):
                    x = normal("x", 2, n, 3).requires_grad_()
                    own = burst.shard(x, 1, group, layout, **packed)
                    where = burst.positions(n, group, layout, **packed)
                    assert torch.equal(own, x[:, where]) and torch.equal(where, where.sort()[0])
                    whole = burst.unshard(own, 1, group, layout, **packed)
                    assert torch.equal(whole, x)
                    # Every rank's loss has every rank's part: three times the gradient.
                    whole.backward(normal("g", 2, n, 3))
                    want = torch.zeros_like(x)
                    want[:, where] = 3 * normal("g", 2, n, 3)[:, where]
                    torch.testing.assert_close(x.grad, want)
        run_ranks(3, body)


if __name__ == "__main__":
    main()
