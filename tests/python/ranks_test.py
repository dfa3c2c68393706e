"""Tests errors, lost ranks, several groups, and unusual uses of autograd."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import burst
from harness import main, naive, normal, run_ranks


def inputs(group, seqlen=24, heads=4, kv_heads=2, head_dim=8, layout="zigzag"):
    return [burst.shard(normal(name, 1, seqlen, h, head_dim), 1, group, layout)
            for name, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))]


def message_of(error, function):
    try:
        function()
    except error as raised:
        return str(raised)
    raise AssertionError("no %s" % error.__name__)


def wrong_arguments(rank, group):
    """Each wrong argument is an error that names it, on every rank, and the next call works."""
    q, k, v = inputs(group)

    def says(text, error=ValueError, q=q, k=k, v=v, **arguments):
        message = message_of(error, lambda: burst.attention(q, k, v, group=group, **arguments))
        assert text in message, (text, message)

    says("k: must have the batch, tokens and head_dim of q", k=k[:, :-1])
    says("v: must have the batch and tokens of q", v=v[:, :-1])
    says("k: must have the batch, tokens", k=k[..., :4])
    says("v: must have the 2 heads of k; got 1", v=v[:, :, :1])
    says("k: must have a number of heads that divides q's 3; got 2", q=q[:, :, :3])
    says("q: must be float32, float64, bfloat16 or float16; got torch.int32", q=q.int())
    says("k: must have q's dtype, torch.float64; got torch.float32", k=k.float())
    says("q: must be [batch, tokens, heads, head_dim] or", q=q[..., 0, 0])
    says("k: must have as many dimensions as q; got the shape", k=k[0])
    says("k: must be a torch.Tensor; got a list", error=TypeError, k=[1])
    says("layout: must be one of zigzag, contiguous, striped, balanced; got 'diagonal'", layout="diagonal")
    says("strategy: must be one of burst, ring, ulysses, burst+ulysses; got 'tp'", strategy="tp")
    says("window: must be an integer of at least 0; got -1", window=-1)
    says("window: must be an integer of at least 0; got 2.5", window=2.5)
    says("softmax_scale: must be positive and finite; got nan", softmax_scale=float("nan"))
    says("ring_grad_dtype: must be one of torch.float32, torch.bfloat16; got 'fp8'", ring_grad_dtype="fp8")
    says("ring_grad_dtype: must be fp32 for tensors of float64; got bf16", ring_grad_dtype=torch.bfloat16)
    says("backward: must be one of auto, burst, ring; got", backward="forward")
    says("seqlen is 25, the ranks have 24", seqlen=25)
    says("cu_seqlens: must begin with 0", cu_seqlens=[1, 24])
    says("documents: must not be given with cu_seqlens", cu_seqlens=[0, 24], documents=[0, 3])
    says("documents: starts must increase within [0, 24); got 24", documents=[0, 24])
    says("the 2 batch rows of documents, spans or slices", documents=[[0, 4], [0, 5]])
    says("the 2 batch rows of documents, spans or slices", spans=[[(0, 4)], [(0, 5)]])
    says("spans: must be pairs", spans=[1, 2, 3])
    says("must increase within [0, 24); got [3, 9) of row 0", spans=[(0, 4), (3, 9)])
    says("got [2, 6) of row 0, whose document ends at 4", documents=[0, 4], spans=[(2, 6)])
    for name, others in (("causal", {}), ("window", dict(causal=False, window=3)),
                         ("spans", dict(causal=False, spans=[(0, 4)])),
                         ("documents", dict(causal=False, documents=[0]))):
        says(name + ": must be off with slices, which are the whole mask", slices=[(0, 4, 0, 4, "full")],
             **others)
    says("a list of such tuples for each row; got [(0, 4, 0, 4)]", causal=False, slices=[(0, 4, 0, 4)])
    says("with a kind of full, causal, inverse_causal, band", causal=False,
         slices=[(0, 4, 0, 4, "half")])
    says("slices: must be tuples (q_begin", causal=False, slices=[(0, 4, 0, 2**31, "full")])
    says("slices: must not be empty, with queries in [0, 24); got queries [0, 25) and keys", causal=False,
         slices=[(0, 25, 0, 4, "full")])
    says("slices: must have at least one row", causal=False, slices=[])
    says("the 2 batch rows of documents, spans or slices", causal=False, slices=[[], [(0, 4, 0, 4, "full")]])
    says("softcap: must be 0, or from 1e-30 to 1e30; got -1", softcap=-1)
    says("softcap: must be 0, or from 1e-30 to 1e30; got nan", softcap=float("nan"))
    says("alibi_slopes: must be numbers, one for each head; got 3.0", alibi_slopes=3.0)
    says("alibi_slopes: must be finite; got inf", alibi_slopes=[0.5, 1.0, float("inf"), 2.0])
    says("alibi_slopes", alibi_slopes=torch.ones(3))
    says("dropout_p: must be in [0, 1); got 1", dropout_p=1)
    says("dropout_seed: must be an integer in [0, 2^63); got -3", dropout_p=0.5, dropout_seed=-3)
    says("dropout_seed: must be an integer in [0, 2^63); got 'x'", dropout_p=0.5, dropout_seed="x")
    says("sinks: must be a torch.Tensor; got a list", error=TypeError, sinks=[1.0, 2.0])

    def crossed(text, k=k, v=v, **arguments):
        message = message_of(ValueError, lambda: burst.cross_attention(q, k, v, group=group, **arguments))
        assert text in message, (text, message)

    crossed("v: must have", v=torch.cat([v, v], 1))
    crossed("k: must have the batch and head_dim of q", k=k[..., :4], v=v[..., :4])
    crossed("key_layout: must be one of None, zigzag, contiguous, striped, balanced; got 'zagzig'",
            key_layout="zagzig")
    says("got the shape [3]", sinks=torch.zeros(3))
    says("sinks: must be floating-point numbers on q's device, cpu; got torch.int64",
         sinks=torch.zeros(q.shape[2], dtype=torch.int64))
    if dist.get_world_size(group) > 1:
        says("the layout contiguous gives it", layout="contiguous", q=q[:, :-2 * rank or None],
             k=k[:, :-2 * rank or None], v=v[:, :-2 * rank or None])
        burst.attention(q, k, v, group=group)
        own = [x[:, :(9, 7, 8)[rank]] for x in inputs(group, seqlen=27)]  # together as many tokens as before
        says("the layout zigzag gives it 8 of 24", q=own[0], k=own[1], v=own[2])
        says("groups must divide the 3 ranks; got groups of 5", ulysses_size=5)
        says("(2 KV heads); got 3", strategy="ulysses")
        says("ranks_per_node: must divide the 3 ranks", ranks_per_node=2)
    gradient = torch.ones(1, 5, 4, 8, dtype=torch.float64)
    out = burst.attention(q.requires_grad_(), k, v, group=group)
    message_of(RuntimeError, lambda: out.backward(gradient))
    burst.attention(q, k, v, group=group)


def ranks_that_differ(rank, group):
    q, k, v = inputs(group)
    for name, arguments in (("causal", dict(causal=rank == 1)), ("window", dict(window=rank)),
                            ("layout", dict(layout=("zigzag", "striped", "zigzag")[rank])),
                            ("documents", dict(documents=[0, 3 + rank])),
                            ("spans", dict(spans=[(0, 3 + rank)])),
                            ("slices", dict(causal=False, slices=[(0, 4, 0, 3 + rank, "full")])),
                            ("softcap", dict(softcap=rank)),
                            ("alibi_slopes", dict(alibi_slopes=[1, 2, 3, rank])),
                            ("dropout_p", dict(dropout_p=0.1 + 0.1 * rank, dropout_seed=3)),
                            ("dropout_seed", dict(dropout_p=0.1, dropout_seed=rank)),
                            ("sinks", dict(sinks=torch.zeros(4) if rank == 1 else None)),
                            ("deterministic", dict(deterministic=rank != 2))):
        message = message_of(ValueError, lambda: burst.attention(q, k, v, group=group, **arguments))
        assert message.startswith(name + ": the ranks differ"), message
    head_dim = 8 - 4 * (rank == 2)
    message = message_of(ValueError, lambda: burst.attention(
        q[..., :head_dim], k[..., :head_dim], v[..., :head_dim], group=group))
    assert message.startswith("head_dim: the ranks differ"), message
    message = message_of(ValueError, lambda: burst.attention(q, k, v[..., :head_dim], group=group))
    assert message.startswith("head_dim of v: the ranks differ"), message
    # One rank's error is an error on all ranks, with the rank's number.
    message = message_of(ValueError, lambda: burst.attention(
        q, k if rank != 1 else k.float(), v, group=group))
    assert "k: must have q's dtype" in message and (rank == 1 or message.startswith("rank 1: ")), message
    message = message_of(ValueError, lambda: burst.attention(
        q.detach().requires_grad_(rank == 0), k, v, group=group))
    assert message.startswith("requires_grad"), message
    burst.attention(q, k, v, group=group)


def promised(rank, group):
    """With seqlen, ranks compare their arguments once. A later wrong argument still ends all ranks."""
    q, k, v = inputs(group)
    compared, exchange = [], burst._ranks.Ranks.exchange
    burst._ranks.Ranks.exchange = lambda ranks, text: compared.append(0) or exchange(ranks, text)
    want = burst.attention(q, k, v, group=group)
    for _ in range(3):
        torch.testing.assert_close(burst.attention(q, k, v, group=group, seqlen=24), want, atol=0, rtol=0)
    assert len(compared) == 2, compared
    q.requires_grad_()
    for _ in range(2):
        burst.attention(q, k, v, group=group, seqlen=24).sum().backward()
    assert len(compared) == 3, compared
    dist.barrier()  # all ranks are between calls
    if rank == 1:
        message_of(ValueError, lambda: burst.attention(q, k.float(), v, group=group, seqlen=24))
    else:
        message = message_of(burst.RankLostError,
                             lambda: burst.attention(q, k, v, group=group, seqlen=24))
        assert "rank 1 of 3 gave up: k: must have q's dtype, torch.float64; got torch.float32" in message, message


def lost(rank, group, how):
    q, k, v = inputs(group, seqlen=600)
    if rank == 1:
        burst.attention(q, k, v, group=group)  # other ranks may still be in the call when this rank ends
        if how == "exits":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    message = ""
    try:
        for _ in range(1000):
            burst.attention(q, k, v, group=group)
    except burst.RankLostError as raised:
        message = str(raised)
    assert "rank 1 of 3 was lost" in message, message
    assert time.monotonic() - begin < 60
    # Every later call on the group is an error that says so. A call without the group works.
    message_of(burst.RankLostError, lambda: burst.attention(q, k, v, group=group))
    burst.attention(q, k, v)


def finished(rank, group):
    """A rank that disconnects is not a lost rank, even while a graph of an earlier call exists."""
    q, k, v = inputs(group)
    out = burst.attention(q.requires_grad_(), k, v, group=group)
    if rank == 0:
        burst.disconnect(group)
        message = message_of(ValueError, out.sum().backward)
        assert "comm: it has finished" in message, message
        return
    message = message_of(burst.RankLostError, lambda: burst.attention(q, k, v, group=group))
    assert "waits for rank 0, which has finished" in message, message


def late(rank, group):
    burst.connect(group, "cpu", timeout=2)
    q, k, v = inputs(group)
    burst.attention(q, k, v, group=group)
    if rank == 1:
        time.sleep(5)
    message = message_of(burst.RankLostError, lambda: burst.attention(q, k, v, group=group))
    assert "waited 2 s for rank 1" in message, message


def several_groups(rank, group):
    """Two pairs and all four ranks work at once in one process, and each group has its own results."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    for _ in range(2):
        for ranks in (pair, group):
            q, k, v = (normal(name, 1, 24, 2, 8) for name in "qkv")
            out = burst.attention(*(burst.shard(x, 1, ranks) for x in (q, k, v)), group=ranks)
            torch.testing.assert_close(burst.unshard(out, 1, ranks), naive(q, k, v)[0])
    # Two threads have a group each. The ranks come to the groups in different orders.
    more = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]
    results = [None, None]

    def work(index):
        time.sleep(0.2 * ((rank + index) % 2))
        own = [burst.shard(x, 1, more[index]) for x in (q, k, v)]
        for _ in range(5):
            results[index] = burst.attention(*own, group=more[index])

    # The gloo groups connect first, because torch needs one order.
    for index in range(2):
        burst.connect(more[index], "cpu")
    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        torch.testing.assert_close(result, burst.shard(naive(q, k, v)[0], 1, group))
    message = message_of(ValueError, lambda: burst.attention(q, k, v, group=pairs[1 - rank // 2]))
    assert "this process is not in it" in message, message
    burst.disconnect(pair)
    burst.attention(*(burst.shard(x, 1, pair) for x in (q, k, v)), group=pair)


def autograds_ways(rank, group):
    q, k, v = (x.requires_grad_() for x in inputs(group))
    run = lambda *x: burst.attention(*x, group=group)  # noqa: E731
    want = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    for reentrant in (False, True):
        out = checkpoint(run, q, k, v, use_reentrant=reentrant)
        gradients = torch.autograd.grad if not reentrant else None
        if gradients:
            have = gradients(out.square().sum(), (q, k, v))
        else:
            out.square().sum().backward()
            have = [x.grad for x in (q, k, v)]
        for a, b in zip(want, have):
            torch.testing.assert_close(a, b, atol=0, rtol=0)
    with torch.inference_mode():
        out = run(*(x.detach().clone() for x in (q, k, v)))
        assert out.is_inference()
    with torch.no_grad():
        assert not run(q, k, v).requires_grad
    # Take gradients of some inputs, of lse alone, and twice through one graph.
    out, lse = burst.attention(q, k.detach(), v.detach(), group=group, return_lse=True)
    torch.autograd.grad(lse.sum(), q, retain_graph=True)
    torch.autograd.grad(out.sum(), q)
    # Second derivatives are refused, also where the gradient of the result needs none.
    for energy in (lambda out: out.square().sum(), lambda out: out.sum()):
        first, = torch.autograd.grad(energy(run(q, k, v)), q, create_graph=True)
        message_of(RuntimeError, lambda: torch.autograd.grad(first.square().sum(), k))
    # Call from another thread, like autograd's threads.
    results = []
    thread = threading.Thread(target=lambda: results.append(run(q, k, v).detach()))
    thread.start()
    thread.join()
    torch.testing.assert_close(results[0], run(q, k, v).detach(), atol=0, rtol=0)
    # Several threads compute the same bits.
    torch.set_num_threads(3)
    torch.testing.assert_close(results[0], run(q, k, v).detach(), atol=0, rtol=0)


class RanksTest(unittest.TestCase):
    def test_wrong_arguments(self):
        run_ranks(3, wrong_arguments)
        run_ranks(1, lambda rank, group: wrong_arguments(rank, None))

    def test_ranks_that_differ(self):
        run_ranks(3, ranks_that_differ)

    def test_promised(self):
        run_ranks(3, promised)

    def test_a_rank_that_is_killed(self):
        run_ranks(3, lambda rank, group: lost(rank, group, "killed"), expect={1: -signal.SIGKILL})

    def test_a_rank_that_exits(self):
        run_ranks(3, lambda rank, group: lost(rank, group, "exits"), expect={1: 7})

    def test_a_rank_that_has_finished(self):
        run_ranks(2, finished)

    def test_a_rank_that_is_late(self):
        run_ranks(2, late)

    def test_several_groups(self):
        run_ranks(4, several_groups)

    def test_autograds_ways(self):
        run_ranks(2, autograds_ways)
        run_ranks(1, autograds_ways)

    def test_a_forked_process(self):
        """A data loader's worker does not destroy inherited objects when it ends."""
        def body(rank, group):
            q, k, v = inputs(group)
            burst.attention(q, k, v, group=group)
            child = os.fork()
            if child == 0:
                burst.disconnect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            burst.attention(q, k, v, group=group)
        run_ranks(2, body)

    def test_the_end_of_a_program(self):
        """A program that ends without disconnect prints nothing."""
        program = ("import torch, torch.distributed as dist, burst, sys, os\n"
                   "rank = int(sys.argv[1])\n"
                   "dist.init_process_group('gloo', init_method='file://' + sys.argv[2], rank=rank,"
                   " world_size=2)\n"
                   "x = torch.ones(1, 4, 1, 8)\n"
                   "burst.attention(x, x, x, group=dist.group.WORLD)\n"
                   "print('done')\n")
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank), store],
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                     for rank in range(2)]
            for rank in ranks:
                out, err = rank.communicate(timeout=60)
                self.assertEqual((rank.returncode, out, err), (0, "done\n", ""))


if __name__ == "__main__":
    main()
