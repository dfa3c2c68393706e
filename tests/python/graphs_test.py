"""Tests compiled and exported programs: which arguments a graph keeps as constants. They need torch 2.4."""

import os
import subprocess
import sys
import tempfile
import textwrap
import unittest

import torch

import burst
from burst import flash_attn, ring_flash_attn
from harness import main, naive, normal, run_ranks

TOLERANCE = 1e-11  # for sums of a few hundred products in double precision
# Two values, of one shape, of each argument that may be a tensor: as a caller and as naive() take them.
STARTS = [[0, 5, 9], [0, 7, 8]]
PAIRS = {
    "cu_seqlens": [(torch.tensor(starts + [24]), dict(starts=[starts])) for starts in STARTS],
    "documents": [(torch.tensor(starts), dict(starts=[starts])) for starts in STARTS],
    "rows of documents": [([torch.tensor(starts), torch.tensor([0])], dict(starts=[starts, [0]]))
                          for starts in STARTS],
    "documents of numbers": [([0, torch.tensor(start)], dict(starts=[[0, start]])) for start in (5, 9)],
    "spans": [(torch.tensor([pair]), dict(spans=[[pair]])) for pair in ((2, 9), (4, 20))],
    "slices": [([(0, torch.tensor(end), 0, 24, "full"), (torch.tensor(end), 24, 0, 3, "full")],
                dict(causal=False, slices=[[(0, end, 0, 24, "full"), (end, 24, 0, 3, "full")]]))
               for end in (6, 11)],
    "softmax_scale": [(torch.tensor(scale, dtype=torch.float64), dict(softmax_scale=scale))
                      for scale in (0.3, 0.7)],
    "alibi_slopes": [(torch.tensor(slopes, dtype=torch.float64), dict(alibi_slopes=slopes))
                     for slopes in ([0.5, 0.25, 0.125, 1.0], [0.0, 1.0, 2.0, 0.5])],
}


def argument_of(name):
    return {"rows of documents": "documents", "documents of numbers": "documents"}.get(name, name)


def with_gradients(function, inputs):
    results = function(*inputs)
    loss = results[0].sin().sum() + results[1].sin().sum()
    return [x.detach() for x in (*results, *torch.autograd.grad(loss, inputs))]


def tensors_that_change(rank, group, backend="aot_eager"):
    """A graph reads tensors when it runs: tensor A, then tensor B, in one graph."""
    whole = [normal(name, 2, 24, 4, 8).requires_grad_() for name in "qkv"]
    for name, pairs in PAIRS.items():
        torch.compiler.reset()
        causal = name != "slices"

        def call(q, k, v, value):
            return burst.attention(q, k, v, causal=causal, group=group, return_lse=True,
                                   **{argument_of(name): value})

        graphs, first = [], None

        def count(graph, examples):
            graphs.append(graph)
            return torch._dynamo.lookup_backend(backend)(graph, examples)

        compiled = torch.compile(call, fullgraph=True, backend=count)
        for value, mask in pairs + pairs[:1]:
            local = [burst.shard(x.detach(), 1, group).requires_grad_() for x in whole]
            have = with_gradients(lambda *x: compiled(*x, value), local)
            first = first or len(graphs)
            want = with_gradients(lambda *x: naive(*x, **mask), whole)
            for i, (a, b) in enumerate(zip(have, want)):
                torch.testing.assert_close(a, burst.shard(b, 2 if i == 1 else 1, group), atol=TOLERANCE, rtol=0,
                                           msg=lambda text: "%s: %s" % (name, text))
        assert len(graphs) == first, (name, len(graphs))


def seeds_that_change(rank, group):
    q, k, v = (burst.shard(normal(name, 2, 24, 4, 8), 1, group) for name in "qkv")

    def call(q, seed):
        return burst.attention(q, k, v, group=group, dropout_p=0.5, dropout_seed=seed)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for seed in (3, 5, 2**62 + 1):
        for given in (torch.tensor(seed), torch.tensor([seed])):
            torch.testing.assert_close(compiled(q, given), call(q, seed), atol=0, rtol=0)
    torch.manual_seed(rank)  # all ranks take rank 0's seed
    drawn = torch.compile(lambda q: burst.attention(q, k, v, group=group, dropout_p=0.5), fullgraph=True,
                          backend="aot_eager")
    have = drawn(q)
    torch.manual_seed(0)
    torch.testing.assert_close(have, call(q, burst.scores.draw_seed().item()), atol=0, rtol=0)


def sinks_in_a_graph(rank, group):
    inputs = [normal("q", 1, 24, 2, 8).requires_grad_(), normal("s", 2).requires_grad_()]
    compiled = torch.compile(lambda q, s: burst.attention(q, q, q, sinks=s, return_lse=True), fullgraph=True,
                             backend="aot_eager")
    for have, want in zip(with_gradients(compiled, inputs),
                          with_gradients(lambda q, s: naive(q, q, q, sinks=s), inputs)):
        torch.testing.assert_close(have, want, atol=TOLERANCE, rtol=0)


def errors_of_one_rank(rank, group):
    """An argument that is wrong on rank 1 is an error of both ranks, also of an operator. The next call works."""
    from torch.utils.flop_counter import FlopCounterMode
    q, wrong = normal("q", 1, 12, 2, 8), rank == 1
    attend = lambda q, **given: burst.attention(q, q, q, group=group, **given)
    compiled = torch.compile(lambda q, sinks: attend(q, sinks=sinks), backend="eager")
    zeros = torch.zeros(2)

    def counted(*given, **more):
        with FlopCounterMode(display=False):
            return attend(*given, **more)

    cases = [
        ("sinks: must be [heads]", lambda: compiled(q, torch.zeros(3) if wrong else zeros)),
        ("sinks: must be [heads]", lambda: counted(q, sinks=torch.zeros(3) if wrong else zeros)),
        ("sinks: must be a torch.Tensor", lambda: counted(q, sinks=[0, 0] if wrong else zeros)),
        ("q: must be a torch.Tensor", lambda: counted(None if wrong else q)),
        ("softmax_scale: requires a gradient",
         lambda: counted(q, softmax_scale=torch.tensor(0.5, requires_grad=True) if wrong else 0.5)),
        ("dropout_seed: must be", lambda: counted(q, dropout_p=0.1, dropout_seed="x" if wrong else 1)),
        ("dropout_seed: must be", lambda: counted(q, dropout_p=0.1, dropout_seed=torch.ones(2) if wrong else 1)),
        ("attention: must not be in torch.func", lambda: torch.func.vmap(attend)(q[None]) if wrong else attend(q))]
    want = attend(q)
    for words, call in cases:
        try:
            call()
        except (TypeError, ValueError) as error:
            assert str(error).startswith(words if wrong else "rank 1: " + words), error
        else:
            raise AssertionError("not refused: " + words)
        assert torch.equal(attend(q), want) and torch.equal(counted(q), want)


def varlen_that_changes(rank, group):
    size = torch.distributed.get_world_size(group)
    q = normal("q", 12, 2, 8)

    def call(q, bounds):
        return ring_flash_attn.ring_flash_attn_varlen_func(q, q, q, bounds, 12, causal=True, group=group)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for bounds in ([0, 4, 12], [0, 7, 12]):
        have = compiled(q, torch.tensor(bounds))
        whole = torch.cat([q[a:b] for a, b in zip(bounds, bounds[1:]) for _ in range(size)])
        want = naive(*[whole[None]] * 3, starts=[[bound * size for bound in bounds[:-1]]])[0][0]
        own, at = [], 0
        for a, b in zip(bounds, bounds[1:]):
            own.append(want[at + rank * (b - a):at + (rank + 1) * (b - a)])
            at += size * (b - a)
        torch.testing.assert_close(have, torch.cat(own), atol=TOLERANCE, rtol=0)


def other_tensors_like_values(rank, group):
    """In eager mode, too, a tensor's value counts, not the tensor."""
    q = normal("q", 1, 12, 2, 8)
    scale = torch.tensor(0.3)
    burst.attention(q, q, q, softmax_scale=scale)
    scale.fill_(0.9)
    torch.testing.assert_close(burst.attention(q, q, q, softmax_scale=scale),
                               naive(q, q, q, softmax_scale=scale.item())[0], atol=TOLERANCE, rtol=0)


def arrays(rank, group):
    numpy = __import__("numpy")
    q = normal("q", 1, 24, 2, 8)
    compiled = torch.compile(lambda q, bounds: burst.attention(q, q, q, cu_seqlens=bounds), backend="aot_eager")
    for starts in STARTS:
        torch.testing.assert_close(compiled(q, numpy.array(starts + [24])),
                                   naive(q, q, q, starts=[starts])[0], atol=TOLERANCE, rtol=0)


def numbers_that_change(rank, group):
    """Lengths, windows and scales that dynamo takes for any number work; wrong ones are errors by name."""
    q = normal("q", 1, 12, 2, 8)

    def call(q, window, scale):
        n = q.shape[1]
        return burst.attention(q, q, q, window=window, softmax_scale=scale, seqlen=n, documents=[0, n // 2])

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, window, scale in ((12, 3, 0.3), (10, 4, 0.5), (12, 5, 0.9)):
        x = q[:, :n]
        want = naive(x, x, x, window=window, softmax_scale=scale, starts=[[0, n // 2]])[0]
        torch.testing.assert_close(compiled(x, window, scale), want, atol=TOLERANCE, rtol=0)
    for name, wrong in (("window", dict(window="3")), ("dropout_p", dict(dropout_p="a")),
                        ("dropout_seed", dict(dropout_p=0.5, dropout_seed="x"))):
        try:
            torch.compile(lambda q: burst.attention(q, q, q, **wrong), backend="aot_eager")(q)
        except ValueError as error:
            assert str(error).startswith(name + ": "), error
        else:
            raise AssertionError(wrong)


def few_graphs(rank, group):
    """Lengths, their comparisons and Frozen slices that change call after call do not compile a graph for each."""
    masks = [burst.masks.Frozen(burst.masks.tree(4, [end, 20 - end])) for end in range(3, 15)]
    for name, call, want in (
            ("seqlen", lambda q, _: burst.attention(q, q, q, seqlen=q.shape[1]), lambda q, _: naive(q, q, q)),
            ("causal", lambda q, _: burst.attention(q, q, q, causal=q.shape[1] > 1), lambda q, _: naive(q, q, q)),
            ("flash_attn", lambda q, _: flash_attn.flash_attn_func(q, q, q), lambda q, _: naive(q, q, q, causal=False)),
            ("slices", lambda q, mask: burst.attention(q, q, q, causal=False, slices=mask),
             lambda q, mask: naive(q, q, q, causal=False, slices=[mask.slices]))):
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        for i, mask in enumerate(masks):
            q = normal("q", 1, 24 if name == "slices" else 12 + i, 2, 8).requires_grad_()
            have, expected = compiled(q, mask), want(q, mask)[0]
            torch.testing.assert_close(have, expected, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(torch.autograd.grad(have.sin().sum(), q),
                                       torch.autograd.grad(expected.sin().sum(), q), atol=TOLERANCE, rtol=0)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs <= 2, "%s: %d graphs" % (name, graphs)


def frozen_slices(rank, group):
    q = normal("q", 1, 24, 2, 8)
    frozen = burst.masks.Frozen(burst.masks.tree(4, [9, 11]))
    compiled = torch.compile(lambda q: burst.attention(q, q, q, causal=False, slices=frozen), fullgraph=True,
                             backend="aot_eager")
    torch.testing.assert_close(compiled(q), naive(q, q, q, causal=False, slices=[frozen.slices])[0],
                               atol=TOLERANCE, rtol=0)


def built_in_the_graph(rank, group):
    """Slices and slopes that the library builds are constants of a graph."""
    def run(q):
        slices = burst.masks.tree(4, [9, 11]) + burst.masks.blocks(24, 8, [[2], [], []])
        return burst.attention(q, q, q, causal=False, slices=slices, alibi_slopes=burst.alibi_slopes(2))

    q = normal("q", 1, 24, 2, 8)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q), atol=0, rtol=0)


def defaults_of_the_user(rank, group):
    """No result depends on torch's default dtype and device."""
    q = torch.randn(1, 6, 2, 8, dtype=torch.float32)
    want = burst.attention(q, q, q, return_lse=True, return_max_logit=True)
    slopes = burst.alibi_slopes(2)
    for change, back in ((lambda: torch.set_default_dtype(torch.bfloat16),
                          lambda: torch.set_default_dtype(torch.float32)),
                         (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device("cpu"))):
        torch.compiler.reset()
        change()
        try:
            for mode in (lambda f: f, lambda f: torch.compile(f, fullgraph=True, backend="aot_eager")):
                have = mode(lambda q: burst.attention(q, q, q, return_lse=True, return_max_logit=True))(q)
                dropped = mode(lambda q: burst.attention(q, q, q, dropout_p=0.5))(q)
            again = burst.alibi_slopes(2)
            whole = burst.attention(q[0], q[0], q[0], cu_seqlens=[0, 2, 6])
        finally:
            back()
        for a, b in zip(have + (again,), want + (slopes,)):
            assert a.dtype == b.dtype == torch.float32 and a.device == b.device
            torch.testing.assert_close(a, b, atol=0, rtol=0)
        assert dropped.device == q.device and whole.device == q.device


class Causal(torch.nn.Module):
    """A module whose mask is causal or not, with documents as a tensor or without."""

    def __init__(self, causal, group=None):
        super().__init__()
        self.causal, self.group = causal, group

    def forward(self, q, bounds=None):
        return burst.attention(q, q, q, causal=self.causal, cu_seqlens=bounds, group=self.group)


LOADS = textwrap.dedent("""
    import sys, torch, burst
    folder = sys.argv[1]
    q = torch.load(folder + "/q.pt")
    load = lambda name: torch.export.load(folder + "/" + name).module()
    torch.save([load("full.pt2")(q), load("causal.pt2")(q), load("packed.pt2")(q, torch.tensor([0, 2, 6])),
                load("packed.pt2")(q, torch.tensor([0, 5, 6]))], folder + "/out.pt")
    try:
        load("group.pt2")(q)
    except ValueError as error:
        assert "group: " in str(error), error
    else:
        raise AssertionError("a program of a group ran without it")
    """)


def export(folder, name, module, *inputs):
    torch.export.save(torch.export.export(module, inputs), os.path.join(folder, name))


def exported(rank, group):
    """A saved program computes the same in another process."""
    q = normal("q", 1, 6, 2, 8)
    with tempfile.TemporaryDirectory() as folder:
        export(folder, "causal.pt2", Causal(True), q)
        export(folder, "full.pt2", Causal(False), q)
        export(folder, "packed.pt2", Causal(False), q, torch.tensor([0, 3, 6]))
        export(folder, "group.pt2", Causal(True, group), q)
        torch.save(q, folder + "/q.pt")
        done = subprocess.run([sys.executable, "-c", LOADS, folder], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        have = torch.load(folder + "/out.pt")
        torch.testing.assert_close(torch.export.load(folder + "/group.pt2").module()(q), naive(q, q, q)[0],
                                   atol=TOLERANCE, rtol=0)
    for out, mask in zip(have, (dict(causal=False), dict(), dict(causal=False, starts=[[0, 2]]),
                                dict(causal=False, starts=[[0, 5]]))):
        torch.testing.assert_close(out, naive(q, q, q, **mask)[0], atol=TOLERANCE, rtol=0)


def learned(rank, group):
    """The operator refuses what attention() refuses. A compiled call then falls back."""
    q = normal("q", 1, 6, 2, 8)
    scale = torch.nn.Parameter(torch.tensor(0.3))
    compiled = torch.compile(lambda q: burst.attention(q, q, q, softmax_scale=scale), backend="aot_eager")
    try:
        compiled(q)
    except TypeError as error:
        assert "multiply q by it" in str(error), error
    else:
        raise AssertionError("the gradient of a learned scale was dropped")


def checked_by_torch(rank, group):
    """torch's own check of operators: schema, fake results, autograd."""
    from burst import _arguments, _op
    given = {"causal": True, "layout": "zigzag", "strategy": "burst", "deterministic": True, "backward": "auto",
             "cross": False, "window": 0, "ulysses_size": 0, "ranks_per_node": 0, "fp8": False,
             "per_document": 0, "dropout_p": 0.0, "return_max_logit": False}
    for change, seed in ((dict(), None), (dict(dropout_p=0.5), torch.tensor([5])), (dict(return_max_logit=True), None)):
        values = {**given, **change}
        text = _op.arguments_text(group, *map(values.get, _arguments.SCALARS), None, {"tensor": 0}, None, None,
                                  None, None)
        inputs = [normal(name, 1, 6, 2, 8).requires_grad_() for name in "qkv"]
        for sinks in (None, normal("s", 2).requires_grad_()):
            torch.library.opcheck(torch.ops.burst.forward.default,
                                  (*inputs, sinks, text, [torch.tensor([0, 2, 6])], True, seed, False, None))


@unittest.skipUnless(hasattr(torch.library, "custom_op"), "operators need torch 2.4")
class GraphsTest(unittest.TestCase):
    def test_tensors_that_change(self):
        for size in (1, 2):
            with self.subTest(size=size):
                run_ranks(size, tensors_that_change)

    def test_seeds_that_change(self):
        run_ranks(2, seeds_that_change)

    def test_sinks(self):
        run_ranks(1, sinks_in_a_graph)

    def test_varlen_that_changes(self):
        run_ranks(2, varlen_that_changes)

    def test_arrays_and_frozen_slices(self):
        run_ranks(1, arrays)
        run_ranks(1, frozen_slices)
        run_ranks(1, built_in_the_graph)
        run_ranks(1, numbers_that_change)

    def test_few_graphs(self):
        run_ranks(1, few_graphs)

    def test_defaults_of_the_user(self):
        run_ranks(1, defaults_of_the_user)

    def test_checked_by_torch(self):
        run_ranks(1, checked_by_torch)

    def test_exported(self):
        run_ranks(1, exported)

    def test_learned(self):
        run_ranks(1, learned)

    def test_errors_of_one_rank(self):
        run_ranks(2, errors_of_one_rank)


class EagerTest(unittest.TestCase):
    def test_other_tensors_like_values(self):
        run_ranks(1, other_tensors_like_values)


if __name__ == "__main__":
    main()
