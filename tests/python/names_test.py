"""Tests functions with other packages' names and arguments, and features of newer versions of torch and
transformers: compiled graphs, selective checkpointing, attention of transformers' models."""

import functools
import importlib
import inspect
import os
import typing
import unittest

import torch
import torch.distributed as dist

import burst
from burst import _types, burst_attn, ring_flash_attn
from harness import main, naive, normal, run_ranks

LAYOUTS = {"ring": "contiguous", "zigzag_ring": "zigzag", "stripe": "striped"}


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def gradients_close(loss, inputs, want_loss, want_inputs, cut):
    want = torch.autograd.grad(want_loss, want_inputs)
    for a, b in zip(torch.autograd.grad(loss, inputs), want):
        close(a, cut(b))


def ring_flash_attn_batch(rank, group):
    whole = [normal(name, 2, 24, 4, 8).requires_grad_() for name in "qkv"]
    for name, layout in LAYOUTS.items():
        function = getattr(ring_flash_attn, name + "_flash_attn_func")
        cut = functools.partial(burst.shard, dim=1, group=group, layout=layout)
        for arguments, mask in ((dict(), dict(causal=False)), (dict(causal=True), dict()),
                                (dict(causal=True, window_size=(3, 0)), dict(window=4)),
                                (dict(window_size=(3, 3)), dict(causal=False, window=4)),
                                (dict(window_size=(3, 0)), dict(window=4)),
                                (dict(alibi_slopes=burst.alibi_slopes(4)),
                                 dict(causal=False, alibi_slopes=burst.alibi_slopes(4).tolist())),
                                (dict(softmax_scale=0.3), dict(causal=False, softmax_scale=0.3))):
            local = [cut(x).detach().requires_grad_() for x in whole]
            out, lse, nothing = function(*local, return_attn_probs=True, **arguments)
            want, want_lse = naive(*whole, **mask)
            close(out, cut(want))
            close(lse, burst.shard(want_lse, 2, group, layout))
            assert nothing is None
            gradients_close(out.sin().sum(), local, want.sin().sum(), whole, cut)
        packed = getattr(ring_flash_attn, name + "_flash_attn_qkvpacked_func")
        close(packed(torch.stack(local, 2), 0.0, None, True, group=group), function(*local, causal=True))
        packed = getattr(ring_flash_attn, name + "_flash_attn_kvpacked_func")
        close(packed(local[0], torch.stack(local[1:], 2), causal=True), function(*local, causal=True))
        torch.manual_seed(3)
        dropped = function(*local, 0.5)
        torch.manual_seed(3)
        close(dropped, burst.attention(*local, causal=False, dropout_p=0.5, group=group, layout=layout))
        assert not torch.allclose(dropped, function(*local))
        for wrong in (dict(dropout_p=1.5), dict(alibi_slopes=torch.ones(3)), dict(window_size=(3, 1))):
            try:
                function(*local, **wrong)
            except ValueError as raised:
                assert str(raised).startswith(next(iter(wrong))), raised
            else:
                raise AssertionError(wrong)


def ring_flash_attn_varlen(rank, group):
    size = dist.get_world_size(group)
    bounds = [0, 2 * size, 8 * size, 8 * size, 12 * size]
    whole = [normal(name, bounds[-1], 4, 8).requires_grad_() for name in "qkv"]

    def cut(x, zigzag):
        parts = []
        for begin, end in zip(bounds, bounds[1:]):
            chunks = x[begin:end].chunk(2 * size if zigzag else size) if end > begin else []
            if chunks:
                parts += [chunks[rank], chunks[2 * size - 1 - rank]] if zigzag else [chunks[rank]]
        return torch.cat(parts)

    for name in ("ring", "zigzag_ring"):
        for causal in (True, False):
            mine = functools.partial(cut, zigzag=name == "zigzag_ring")
            local = [mine(x).detach().requires_grad_() for x in whole]
            own = torch.tensor(bounds, dtype=torch.int32) // size
            function = getattr(ring_flash_attn, name + "_flash_attn_varlen_func")
            out, lse, _ = function(*local, own, 6, causal=causal, return_attn_probs=True, group=group)
            want, want_lse = naive(*(x[None] for x in whole), causal=causal, starts=[bounds[:-1]])
            close(out, mine(want[0]))
            close(lse, mine(want_lse[0].t()).t())
            gradients_close(out.sin().sum(), local, want.sin().sum(), whole, mine)
            packed = getattr(ring_flash_attn, name + "_flash_attn_varlen_qkvpacked_func")
            close(packed(torch.stack(local, 1), own, 6, causal=causal), out)


def llama3(rank, group):
    """Contiguous parts of a packed sequence, by the bounds that each rank prepares."""
    size = dist.get_world_size(group)
    for bounds in ([0, 12], [0, 3, 12], [0, 6, 6, 12], [0, 1, 5, 11, 12]):
        bounds = [bound * size for bound in bounds]
        whole = [normal(name, bounds[-1], heads, 8).requires_grad_() for name, heads in (("q", 4), ("k", 2), ("v", 2))]
        for causal, window in ((True, 0), (False, 0), (True, 4)):
            cut = functools.partial(burst.shard, dim=0, group=group, layout="contiguous")
            local = [cut(x).detach().requires_grad_() for x in whole]
            *prepared, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
                torch.tensor(bounds, dtype=torch.int32), causal, rank, size)
            # The published meaning: attention of the rank's queries to the keys of the slice, from the last ones.
            want = by_documents(local[0], whole[1][keys], whole[2][keys], *(x.tolist() for x in prepared[:2]), causal,
                                window)
            out, lse, nothing = ring_flash_attn.llama3_flash_attn_varlen_func(
                *local, *prepared, 1, keys, causal=causal, window_size=(window - 1, 0) if window else (-1, -1),
                return_attn_probs=True, group=group)
            close(out, want)
            assert nothing is None and lse.shape == (4, len(local[0]))
            full, _ = naive(*(x[None] for x in whole), causal=causal, window=window, starts=[bounds[:-1]])
            gradients_close(out.sin().sum(), local, full.sin().sum(), whole, cut)
    if size > 1:
        try:
            ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens([0, 2 * size + 1], True, rank, size)
        except ValueError as error:
            assert str(error).startswith("cu_seqlens: must end with a multiple"), error
        else:
            raise AssertionError("an odd length")


def by_documents(q, k, v, bounds, key_bounds, causal, window):
    """Returns attention of documents one by one; query i of a document is at the place of its key i + keys - queries."""
    parts = []
    for a, b, c, d in zip(bounds, bounds[1:], key_bounds, key_bounds[1:]):
        ahead = torch.arange(d - c)[None] - torch.arange(b - a)[:, None] - (d - c - b + a)
        hidden = (ahead > 0) if causal else torch.zeros_like(ahead, dtype=torch.bool)
        if window:
            hidden |= ahead <= -window
        keys, values = (x[c:d].repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) / q.shape[2]**0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -float("inf")).softmax(-1), values))
    return torch.cat(parts)


def adapters(rank, group):
    """A substituted flash_attention_2 has the logits of documents alone, batch after batch."""
    import transformers
    try:
        ring_flash_attn.update_ring_flash_attn_params([0, 4])
    except ValueError as error:
        assert "substitute_hf_flash_attn must come first" in str(error), error
    else:
        raise AssertionError("nothing was substituted")
    ring_flash_attn.substitute_hf_flash_attn(group, 1)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL)
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config).double()
    cut = functools.partial(burst.shard, dim=1, group=group, layout="contiguous")
    for bounds in ([0, 5, 16], [0, 3, 9, 16]):
        tokens, documents = torch.randint(50, (1, 16)), list(zip(bounds, bounds[1:]))
        at = torch.cat([torch.arange(b - a) for a, b in documents])[None]
        model.config._attn_implementation = "sdpa"
        want = torch.cat([model(input_ids=tokens[:, a:b], use_cache=False).logits for a, b in documents], 1)
        ring_flash_attn.update_ring_flash_attn_params(torch.tensor(bounds, dtype=torch.int32), group)
        for name in ("flash_attention_2", "burst"):
            model.config._attn_implementation = name
            have = model(input_ids=cut(tokens), position_ids=cut(at), use_cache=False).logits
            torch.testing.assert_close(have, cut(want), atol=2e-6, rtol=0)


def published(rank, group):
    whole = [normal(name, 1, 24, 4, 8).requires_grad_() for name in "qkv"]
    for apply, layout in ((burst_attn.OpBurstAttn.apply, "zigzag"),
                          (burst_attn.OpBurstAttnStrip.apply, "striped")):
        cut = functools.partial(burst.shard, dim=1, group=group, layout=layout)
        for causal in (False, True):
            local = [cut(x).detach().requires_grad_() for x in whole]
            out = apply(*local, None, "cuda", causal, True, True, None)
            want = naive(*whole, causal=causal)[0]
            close(out, cut(want))
            gradients_close(out.sin().sum(), local, want.sin().sum(), whole, cut)
            heads_first = [x.transpose(1, 2) for x in local]
            close(apply(*heads_first, 0.5, None, causal).transpose(1, 2),
                  cut(naive(*whole, causal=causal, softmax_scale=0.5)[0]))
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    local = [burst.shard(x, 1, group) for x in whole]
    close(burst_attn.burst_attn_func(*local, causal=True,
                                     double_group=[nodes[rank // 2], across[rank % 2]]),
          burst.shard(naive(*whole)[0], 1, group))


def compiled(rank, group):
    inputs = [burst.shard(normal(name, 1, 24, 4, 8), 1, group).requires_grad_() for name in "qkv"]

    def with_lse(q, k, v):
        out, lse = burst.attention(2 * q, k, v, group=group, return_lse=True)
        return out.sin().sum() + lse.sum()

    def with_documents(q, k, v):
        return burst.attention(q, k, v, group=group, documents=[0, 5], window=4).sin().sum()

    def packed(q, k, v):
        return burst.attention(q[0], k[0], v[0], group=group, strategy="ulysses").sin().sum()

    def with_spans(q, k, v):
        return burst.attention(q, k, v, group=group, spans=[(2, 9)]).sin().sum()

    def with_slices(q, k, v):
        slices = burst.masks.tree(2, [3, 1])
        return burst.attention(q, k, v, group=group, causal=False, slices=slices).sin().sum()

    def across(q, k, v):
        shorter = slice(0, 4)
        return burst.cross_attention(q, k[:, shorter], v[:, shorter], group=group).sin().sum()

    def with_changed_scores(q, k, v):
        return burst.attention(q, k, v, group=group, softcap=2.0, alibi_slopes=[0.5, 0.25, 0.1, 1.0],
                               dropout_p=0.4, dropout_seed=8).sin().sum()

    def with_largest_score(q, k, v):
        out, largest = burst.attention(q, k, v, group=group, return_max_logit=True)
        return out.sin().sum() + largest.sum()

    for function in (with_lse, with_documents, packed, with_spans, with_slices, across,
                     with_changed_scores, with_largest_score):
        graph = torch.compile(function, fullgraph=True, backend="aot_eager")
        want = torch.autograd.grad(function(*inputs), inputs)
        for a, b in zip(torch.autograd.grad(graph(*inputs), inputs), want):
            close(a, b)
    with torch.no_grad():
        close(torch.compile(with_lse, fullgraph=True, backend="aot_eager")(*inputs), with_lse(*inputs))
    # The gradient uses the weights that the forward dropped: out is linear in v.
    drops = torch.compile(lambda v: burst.attention(*inputs[:2], v, group=group, dropout_p=0.5),
                          fullgraph=True, backend="aot_eager")
    out = drops(inputs[2])
    weight = torch.ones_like(out)
    whole = torch.stack([(torch.autograd.grad(out, inputs[2], weight)[0] * inputs[2]).sum(),
                         (weight * out).sum()]).detach()
    dist.all_reduce(whole, group=group)
    close(whole[0], whole[1])


def selective_checkpointing(rank, group):
    """With the operator's outputs kept, attention runs once."""
    from torch.utils import checkpoint
    inputs = [burst.shard(normal(name, 1, 24, 4, 8), 1, group).requires_grad_() for name in "qkv"]

    def function(q, k, v):
        return burst.attention(q.sin(), k, v, group=group).sin().sum()

    want = torch.autograd.grad(function(*inputs), inputs)
    runs, forward = [], burst._call.forward
    burst._call.forward = lambda *arguments, **named: runs.append(0) or forward(*arguments, **named)
    keep = [torch.ops.burst.forward.default]
    out = checkpoint.checkpoint(
        function, *inputs, use_reentrant=False,
        context_fn=functools.partial(checkpoint.create_selective_checkpoint_contexts, keep))
    have = torch.autograd.grad(out, inputs)
    assert len(runs) == 1, len(runs)
    for a, b in zip(have, want):
        close(a, b)


def check_model(model, group, tolerance):
    """Logits and gradients over the group equal those of one rank with the model's own attention."""
    tokens = torch.randint(50, (2, 26))
    labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    want = model(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, model.parameters(), allow_unused=True)
    model.config._attn_implementation = "burst"  # transformers 4.53 has no set_attn_implementation
    own = burst.positions(26, group)
    have = model(input_ids=tokens[:, own], position_ids=own[None], use_cache=False).logits
    close = functools.partial(torch.testing.assert_close, atol=tolerance, rtol=0)
    close(have, want[:, own])
    loss = torch.nn.functional.cross_entropy(have.flatten(0, 1), labels[:, own].flatten(), reduction="sum")
    for gradient, parts in zip(gradients, torch.autograd.grad(loss, model.parameters(), allow_unused=True)):
        assert (gradient is None) == (parts is None)
        if gradient is not None:
            dist.all_reduce(parts, group=group)
            close(parts, gradient)


SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=50, max_position_embeddings=64)


def model_of_transformers(rank, group):
    import transformers
    burst.register(group)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SMALL)
    config._attn_implementation = "sdpa"
    # The model's norms and rotations are in float32, with errors of 2^-24 of values below 4.
    check_model(transformers.LlamaForCausalLM(config).double(), group, 2e-6)


def model_with_sinks(rank, group):
    import transformers
    burst.register(group)
    torch.manual_seed(1)
    config = transformers.GptOssConfig(**SMALL, head_dim=8, sliding_window=8, num_local_experts=1,
                                       num_experts_per_tok=1)
    config._attn_implementation = "eager"
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    # The model's experts need float32: errors of 2^-24 in sums of a few hundred products below 4.
    check_model(model, group, 2**-24 * 4 * 300)


def model_with_capped_logits(rank, group):
    import transformers
    burst.register(group)
    torch.manual_seed(1)
    config = transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=8, query_pre_attn_scalar=1,
                                       attn_logit_softcapping=0.5)
    config._attn_implementation = "eager"
    model = transformers.Gemma2ForCausalLM(config)
    # The model's softmax is in float32: errors of 2^-24 in sums of a few hundred products below 4.
    check_model(model, group, 2**-24 * 4 * 300)


class NamesTest(unittest.TestCase):
    def test_ring_flash_attn_batch(self):
        run_ranks(2, ring_flash_attn_batch)

    def test_ring_flash_attn_varlen(self):
        run_ranks(3, ring_flash_attn_varlen)

    def test_llama3(self):
        for size in (1, 3):
            with self.subTest(size=size):
                run_ranks(size, llama3)

    def test_adapters(self):
        try:
            from transformers import masking_utils  # noqa: F401
        except ImportError:
            self.skipTest("needs transformers with masking_utils (4.53)")
        run_ranks(2, adapters)

    def test_published(self):
        run_ranks(4, published)

    def test_arguments(self):
        """The arguments are the published ones, in order."""
        own = list(inspect.signature(burst_attn.burst_attn_func).parameters)
        self.assertEqual(own, ["q", "k", "v", "softmax_scale", "flash", "causal", "optimize_bwd_comm",
                               "deterministic", "process_group", "double_group"])
        tail = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic",
                "return_attn_probs", "group"]
        own = list(inspect.signature(ring_flash_attn.stripe_flash_attn_kvpacked_func).parameters)
        self.assertEqual(own, ["q", "kv"] + tail)
        own = list(inspect.signature(ring_flash_attn.zigzag_ring_flash_attn_varlen_func).parameters)
        self.assertEqual(own, ["q", "k", "v", "cu_seqlens", "max_seqlen"] + tail)

    def test_annotations(self):
        """Every public function has a docstring and says the types of its arguments and of its result."""
        folder = os.path.dirname(burst.__file__)
        self.assertTrue(os.path.exists(os.path.join(folder, "py.typed")))
        names = sorted(name[:-3] for name in os.listdir(folder) if name.endswith(".py") and name[0] != "_")
        modules = [burst] + [importlib.import_module("burst." + name) for name in names]
        seen = 0
        for module in modules:
            for name, value in vars(module).items():
                home = getattr(value, "__module__", None)  # where it is defined, not where it is used
                if name[0] == "_" or not (home == module.__name__ or (module is burst and callable(value))):
                    continue
                functions = [value]
                if inspect.isclass(value):
                    functions = [method for key, method in inspect.getmembers(value, inspect.isfunction)
                                 if key == "__init__" or key[0] != "_"]
                for function in functions:
                    place, seen = "%s.%s" % (module.__name__, name), seen + 1
                    self.assertTrue(value.__doc__, place)
                    parameters = set(inspect.signature(function).parameters) - {"self"}
                    self.assertEqual(set(typing.get_type_hints(function)), parameters | {"return"}, place)
        self.assertGreaterEqual(seen, 40)

    def test_overloads(self):
        """The overloads have the keywords of their function, and the results that a type checker then knows."""
        results = {"return_lse", "return_max_logit"}
        for function, options in ((burst.attention, _types.Options), (burst.cross_attention, _types.CrossOptions)):
            hints = typing.get_type_hints(function)
            keywords = set(hints) - results - {"q", "k", "v", "return"}
            self.assertEqual(typing.get_type_hints(options), {name: hints[name] for name in keywords})
        if hasattr(typing, "get_overloads"):  # Python 3.11
            def returned(overload):
                return overload.__annotations__["return"]
            self.assertEqual([returned(overload) for overload in typing.get_overloads(burst.attention)],
                             ["Tensor"] + 2 * ["Tuple[Tensor, Tensor]"]
                             + ["Tuple[Tensor, Tensor, Tensor]", "Union[Tensor, Tuple[Tensor, ...]]"])
            self.assertEqual(len(typing.get_overloads(burst.cross_attention)), 3)

    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "operators need torch 2.4")
    def test_compiled(self):
        run_ranks(2, compiled)

    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "operators need torch 2.4")
    def test_selective_checkpointing(self):
        run_ranks(2, selective_checkpointing)

    def test_models_of_transformers(self):
        try:
            import transformers
        except ImportError:
            self.skipTest("needs transformers")
        run_ranks(2, model_of_transformers)
        if hasattr(transformers, "GptOssConfig"):
            run_ranks(2, model_with_sinks)
        if hasattr(transformers, "Gemma2Config"):
            run_ranks(2, model_with_capped_logits)


if __name__ == "__main__":
    main()
