"""Tests what ranks agree on: when they exchange messages, what they compare and keep, and whose errors all get."""

import gc
import os
import random
import signal
import unittest

import torch
import torch.distributed as dist

import burst
from burst import ring_flash_attn
from harness import main, naive, normal, run_ranks

try:
    import numpy
except ImportError:
    numpy = None


def inputs(group, seqlen=24, heads=4):
    return [burst.shard(normal(name, 1, seqlen, h, 8), 1, group) for name, h in (("q", heads), ("k", 2), ("v", 2))]


def message_of(errors, function):
    try:
        function()
    except errors as raised:
        return str(raised)
    raise AssertionError("no error")


def counting_exchanges():
    """Returns a list that grows by one in every round of messages."""
    rounds, exchange = [], burst._ranks.Ranks.exchange

    def count(ranks, mine):
        rounds.append(len(mine))
        return exchange(ranks, mine)

    burst._ranks.Ranks.exchange = count
    return rounds


def calls_of_one_rank(rank, group):
    """A rank's calls outside of a group change nothing in the group."""
    q, k, v = inputs(group)
    want = burst.attention(q, k, v, group=group, seqlen=24)
    rounds = counting_exchanges()
    if rank == 0:
        x = normal("x", 1, 4, 1, 2)
        for i in range(1, 20000):  # more calls than any cache keeps
            burst.attention(x, x, x, softmax_scale=i / 5000)
        for i in range(300):
            burst.attention(x, x, x, cu_seqlens=[0, *sorted(random.sample(range(1, 4), 2)), 4])
    dist.barrier()
    torch.testing.assert_close(burst.attention(q, k, v, group=group, seqlen=24), want, atol=0, rtol=0)
    assert not rounds, rounds


def options_of_the_group(rank, group):
    """With more options than ranks keep, they still agree, and backward passes keep what they need."""
    q, k, v = inputs(group)
    q.requires_grad_()
    outs = [burst.attention(q, k, v, group=group, seqlen=24, softmax_scale=0.1 + i / 1000) for i in range(200)]
    ranks, = (ranks for ranks in burst._ranks._ranks.values() if ranks.size > 1)
    assert len(ranks.attentions) <= 64 < 200, len(ranks.attentions)
    for i in (0, 150, 199):
        have, = torch.autograd.grad(outs[i].square().sum(), q)
        again = burst.attention(q, k, v, group=group, softmax_scale=0.1 + i / 1000)
        torch.testing.assert_close(torch.autograd.grad(again.square().sum(), q)[0], have, atol=0, rtol=0)


def handles():
    """Returns the numbers of the library's attention objects and schedules."""
    found = [thing._destroy.__name__ for thing in gc.get_objects() if type(thing) is burst._library.Handle]
    return found.count("burst_attention_destroy"), found.count("burst_schedule_destroy")


def scales_that_change(rank, group):
    """A new scale in every step does not pile up attention objects or schedules."""
    q, k, v = inputs(group)
    for step in range(300):
        burst.attention(q.requires_grad_(), k, v, group=group, documents=[0, 7],
                        softmax_scale=0.1 + step / 1000).sum().backward()
    gc.collect()
    attentions, schedules = handles()
    assert attentions <= 65 and schedules == 1, (attentions, schedules)


def many_heads(rank, group):
    """Ranks compare long arguments as a whole: the slopes of 112 heads, and thousands of documents."""
    heads = 112
    slopes = burst.alibi_slopes(heads)
    whole = [normal(name, 1, 16, heads, 4) for name in "qkv"]
    local = [burst.shard(x, 1, group) for x in whole]
    want = naive(*whole, alibi_slopes=slopes.tolist())[0]
    torch.testing.assert_close(burst.attention(*local, group=group, alibi_slopes=slopes),
                               burst.shard(want, 1, group), atol=1e-11, rtol=0)
    slopes[heads - 1] += rank
    message = message_of(ValueError, lambda: burst.attention(*local, group=group, alibi_slopes=slopes))
    assert message.startswith("alibi_slopes: the ranks differ at 111: "), message
    q = burst.shard(normal("q", 1, 9000, 1, 1), 1, group)
    starts = list(range(9000))
    burst.attention(q, q, q, group=group, documents=starts)
    if rank == 1:
        starts[8999] = 8998
        starts[8998] = 8997
        starts[8997] = 8996
        del starts[8996]
    message = message_of(ValueError, lambda: burst.attention(q, q, q, group=group, documents=starts))
    assert message.startswith("documents: the ranks differ at 0 in length: "), message


def unreadable_options(rank, group):
    """An option that cannot be read on one rank is an error on all of them, which names it."""
    q, k, v = inputs(group)
    want = burst.attention(q, k, v, group=group)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    wrong = [("softmax_scale", "auto"), ("softmax_scale", object()), ("softmax_scale", scale),
             ("causal", "yes"), ("causal", None), ("causal", torch.tensor(True)), ("window", "3"),
             ("window", torch.tensor(3)), ("window", None), ("cu_seqlens", [0, None, 24]), ("cu_seqlens", 5),
             ("cu_seqlens", [0.0, 24.0]), ("documents", [0.0, 3.9]), ("documents", torch.tensor([0.0, 3.9])),
             ("documents", [[0, "3"]]), ("documents", 5), ("spans", [(0, "3")]), ("spans", 5),
             ("alibi_slopes", ["a"]), ("alibi_slopes", 3.0), ("alibi_slopes", torch.nn.Parameter(torch.ones(4))),
             ("alibi_slopes", [scale] * 4), ("softcap", "5"), ("softcap", scale), ("dropout_p", "0.1"),
             ("dropout_p", torch.tensor(0.1)), ("layout", 5), ("layout", ["zigzag"]), ("strategy", None),
             ("backward", 1), ("ring_grad_dtype", torch.int8), ("ring_grad_dtype", []), ("deterministic", "no"),
             ("ulysses_size", 1.5), ("ranks_per_node", "2"), ("fp8", 2), ("return_max_logit", "x"),
             ("seqlen", "24"), ("seqlen", torch.tensor(24))]
    for name, value in wrong:
        for everywhere in (False, True):
            given = {name: value} if everywhere or rank == 1 else {}
            message = message_of((TypeError, ValueError),
                                 lambda: burst.attention(q, k, v, group=group, **given))
            own = "" if everywhere or rank == 1 else "rank 1: "
            assert message.startswith(own + name), (name, message)
    for name, call in (("window_size", lambda wrong: ring_flash_attn.ring_flash_attn_func(
            q, k, v, group=group, window_size=(3, 1) if wrong else (-1, -1))),
                       ("cu_seqlens", lambda wrong: ring_flash_attn.zigzag_ring_flash_attn_varlen_func(
                           q[0], k[0], v[0], [0, 5 if wrong else 6, 12], 8, group=group))):
        message = message_of(ValueError, lambda: call(rank == 1))
        assert name in message, message
    message = message_of(TypeError, lambda: burst.attention(q, k, v, group=group, softmax_scale=scale))
    assert "multiply q by it" in message, message
    with torch.no_grad():
        burst.attention(q, k, v, group=group, softmax_scale=scale)
    torch.testing.assert_close(burst.attention(q, k, v, group=group), want, atol=0, rtol=0)


def unreadable_after_a_promise(rank, group):
    """After a promise the other ranks do not ask, so the rank with the error ends the group at once."""
    q, k, v = inputs(group)
    burst.attention(q, k, v, group=group, seqlen=24)
    torch.distributed.barrier(group)  # all ranks have left that call
    if rank == 1:
        message = message_of(ValueError, lambda: burst.attention(q, k, v, group=group, seqlen=24,
                                                                 softmax_scale="auto"))
        assert message.startswith("softmax_scale: "), message
    else:
        message = message_of(burst.RankLostError, lambda: burst.attention(q, k, v, group=group, seqlen=24))
        assert "gave up: softmax_scale: " in message, message


def seeds_under_a_promise(rank, group):
    """With seqlen, too, all ranks drop by one seed: rank 0's, or the seed that all give."""
    torch.manual_seed(3)
    whole = [normal(name, 1, 24, 2, 8) for name in "qkvw"]
    q, k, v, w = (burst.shard(x, 1, group) for x in whole)

    def drop(**arguments):
        return burst.attention(q, k, v, group=group, dropout_p=0.5, **arguments)

    for promise in (dict(), dict(seqlen=24)):
        drop(**promise)
        torch.rand(rank)  # the ranks' generators now differ
        state = torch.get_rng_state()
        have = drop(**promise)
        torch.set_rng_state(state)
        seed = [burst.scores.draw_seed().item()]
        dist.broadcast_object_list(seed, src=0)
        torch.testing.assert_close(have, drop(dropout_seed=seed[0], **promise), atol=0, rtol=0)
        message = message_of(ValueError, lambda: drop(dropout_seed=rank, **promise))
        assert message.startswith("dropout_seed: the ranks differ"), message
        given = dict(dropout_seed=1) if rank else {}
        message = message_of(ValueError, lambda: drop(**given, **promise))
        assert message.startswith("dropout_seed: the ranks differ"), message
    # The gradient belongs to the weights that were dropped: out is linear in v.
    v.requires_grad_()
    torch.rand(rank)
    for _ in range(2):
        out = drop(seqlen=24)
        sides = torch.stack([(torch.autograd.grad(out, v, w)[0] * v).sum(), (out * w).sum()]).detach()
        dist.all_reduce(sides)
        torch.testing.assert_close(sides[0], sides[1], atol=1e-11, rtol=0)


def no_tensors(rank, group):
    """Arguments that are not tensors, and other kinds of tensors, are errors by name on all ranks."""
    q, k, v = inputs(group)
    kinds = [("NoneType", lambda x: None), ("list", lambda x: x.tolist()),
             ("one of torch.sparse_coo", lambda x: x.to_sparse())]
    if numpy is not None:
        kinds.append(("ndarray", lambda x: x.numpy()))
    if hasattr(torch, "nested") and hasattr(torch, "jagged"):
        kinds.append(("nested tensor", lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged)))
        kinds.append(("nested tensor", lambda x: torch.nested.nested_tensor([x[0, :, 0], x[0, :, 0]],
                                                                            layout=torch.jagged)))
        kinds.append(("nested tensor", lambda x: torch.nested.nested_tensor([x[0], x[0]])))
    for text, change in kinds:
        for names in ("q", "k", "v", "qkv"):
            given = [change(x) if name in names and rank == 1 else x for name, x in zip("qkv", (q, k, v))]
            message = message_of(TypeError, lambda: burst.attention(*given, group=group))
            own = "" if rank == 1 else "rank 1: "
            assert message.startswith("%s%s: must " % (own, names[0])) and text in message, message
    burst.attention(q, k, v, group=group)


def no_tensor_at_first(rank, group):
    q, k, v = inputs(group)
    for wrong, text in ((None, "none of q, k and v is a torch.Tensor"), (q.to("meta"), "q is on meta")):
        given = (wrong, wrong, wrong) if rank == 1 else (q, k, v)
        message = message_of((TypeError, ValueError), lambda: burst.attention(*given, group=group))
        assert message == ("" if rank == 1 else "rank 1: ") + text + (
            "; Burst knows cpu and cuda" if wrong is not None else ""), message
    burst.attention(q, k, v, group=group)


def numbers_of_numpy(rank, group):
    q, k, v = inputs(group)
    for mine, theirs in ((dict(window=numpy.int64(3)), dict(window=3)),
                         (dict(seqlen=numpy.int32(24)), dict(seqlen=24)),
                         (dict(causal=numpy.bool_(False)), dict(causal=False)),
                         (dict(softmax_scale=numpy.float32(0.5)), dict(softmax_scale=0.5)),
                         (dict(documents=numpy.array([0, 3])), dict(documents=[0, 3])),
                         (dict(documents=numpy.array([[0, 3]])), dict(documents=[[0, 3]])),
                         (dict(cu_seqlens=numpy.array([0, 3, 24])), dict(cu_seqlens=[0, 3, 24])),
                         (dict(spans=numpy.array([[0, 3]])), dict(spans=[(0, 3)])),
                         (dict(alibi_slopes=numpy.ones(4)), dict(alibi_slopes=[1.0] * 4)),
                         (dict(dropout_p=0.5, dropout_seed=numpy.int64(4)), dict(dropout_p=0.5, dropout_seed=4))):
        torch.testing.assert_close(burst.attention(q, k, v, group=group, **mine),
                                   burst.attention(q, k, v, group=group, **theirs), atol=0, rtol=0)
    torch.testing.assert_close(burst.positions(numpy.int64(24), group), burst.positions(24, group))


def negated(rank, group):
    """Torch negates and conjugates lazily: the numbers count, not the bytes in memory."""
    for dim in (1, 8):
        whole = [normal(name, 1, 12, 2, dim) for name in "qkv"]
        leaves = [x.clone().requires_grad_() for x in whole]
        lazy = [torch.complex(x, -x).conj().imag for x in leaves] if dim == 1 else [
            torch._neg_view(-x) for x in leaves]
        assert all(x.is_neg() for x in lazy)
        out, lse = burst.attention(*lazy, return_lse=True)
        want, want_lse = naive(*whole)
        torch.testing.assert_close(out, want, atol=1e-11, rtol=0)
        torch.testing.assert_close(lse, want_lse, atol=1e-11, rtol=0)
        dout, dlse = (torch._neg_view(normal(name, *x.shape)) for name, x in (("o", out), ("l", lse)))
        have = torch.autograd.grad([out, lse], leaves, [dout, dlse])
        plain = [x.clone().requires_grad_() for x in whole]
        want = torch.autograd.grad(naive(*plain), plain, [dout.resolve_neg(), dlse.resolve_neg()])
        for a, b in zip(have, want):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def memory_of_steps(rank, group):
    """With new documents and a new scale in every step, memory does not grow."""
    n, numbers = 131072, random.Random(0)
    q = torch.zeros(n, 1, 2)
    sizes = []
    for step in range(150):
        bounds = [0] + sorted(numbers.sample(range(1, n), 15)) + [n]
        ring_flash_attn.ring_flash_attn_varlen_func(q, q, q, bounds, n, causal=True, window_size=(0, 0))
        burst.attention(q[:8], q[:8], q[:8], softmax_scale=1 + step / 1000)
        sizes.append(resident())
    # Ranks keep 8 schedules of 4 MB each. 75 steps of positions as Python's numbers would be 400 MB.
    assert sizes[-1] - sizes[74] < 20e6, (sizes[74], sizes[-1])


def forked(rank, group):
    """A fork's child works alone. In the group it gets an error: its parent is the rank."""
    q, k, v = (x.requires_grad_() for x in inputs(group))
    torch.set_num_threads(2)
    alone = burst.attention(q, k, v)
    out = burst.attention(q, k, v, group=group)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            message = message_of(burst.BurstError, lambda: burst.attention(q, k, v, group=group))
            assert "was forked" in message, message
            message = message_of(burst.BurstError, lambda: out.sum().backward())
            assert "was forked" in message, message
            torch.testing.assert_close(burst.attention(q, k, v), alone, atol=0, rtol=0)
            burst.disconnect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    out.sum().backward()
    burst.attention(q, k, v, group=group)


class AgreementTest(unittest.TestCase):
    def test_calls_of_one_rank(self):
        run_ranks(2, calls_of_one_rank)

    def test_options_of_the_group(self):
        run_ranks(2, options_of_the_group)
        for size in (1, 2):
            run_ranks(size, scales_that_change)

    def test_many_heads(self):
        run_ranks(2, many_heads)

    def test_unreadable_options(self):
        run_ranks(2, unreadable_options)
        run_ranks(2, unreadable_after_a_promise)

    def test_seeds_under_a_promise(self):
        run_ranks(3, seeds_under_a_promise)

    def test_no_tensors(self):
        run_ranks(2, no_tensors)
        run_ranks(2, no_tensor_at_first)

    @unittest.skipIf(numpy is None, "there is no numpy")
    def test_numbers_of_numpy(self):
        run_ranks(2, numbers_of_numpy)

    def test_negated(self):
        run_ranks(1, negated)

    def test_memory_of_steps(self):
        run_ranks(1, memory_of_steps)

    def test_forked(self):
        run_ranks(2, forked)


if __name__ == "__main__":
    main()
