"""Tests burst.register over a group of ranks and under torch.compile. Logits are right, or there is an error on
every rank or when the graph runs."""

import functools
import gc
import shutil
import unittest
import unittest.mock
import warnings

import torch
import torch.distributed as dist

import burst
from burst import _transformers_positions
from burst._context_parallel import ContextParallel
from harness import main, run_ranks
from transformers_test import BOUNDS, LEFT, N, PACKED, RIGHT, model_of, needs, padding, tokens


DEFAULT = "inductor" if shutil.which("g++") else "aot_eager"  # torch's default backend needs a compiler


def rejected(call, words, kinds=ValueError):
    try:
        call()
    except kinds as error:
        assert words in str(error), error
        return
    raise AssertionError("no ValueError of " + words)


def whole(model, **given):
    """Returns the logits of transformers' own attention for the whole sequences."""
    model.set_attn_implementation("sdpa")
    logits = model(use_cache=False, **given).logits
    model.set_attn_implementation("burst")
    return logits


def documents(rank, group):
    """Packed documents, registered or as cu_seq_lens, have one rank's logits and gradients."""
    burst.register(group)
    model = model_of("LlamaForCausalLM").double()
    ids, labels = tokens(1), torch.roll(tokens(1), -1, 1)
    want = whole(model, input_ids=ids, position_ids=PACKED)
    gradients = torch.autograd.grad(torch.nn.functional.cross_entropy(want[0], labels[0], reduction="sum"),
                                    model.parameters())
    bounds = dict(cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS)
    for layout in ("zigzag", "contiguous", "balanced"):
        own = burst.positions(N, group, layout, **({} if layout != "balanced" else dict(documents=[0, 4])))
        for registered, given in ((dict(documents=[0, 4]), {}), (dict(cu_seqlens=BOUNDS), {}), ({}, bounds)):
            burst.register(group, layout, **registered)
            for positions in (PACKED[:, own], own[None]):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # without a length, the balanced layout is not checked
                    have = model(input_ids=ids[:, own], position_ids=positions, use_cache=False, **given).logits
                # Rotations depend only on distances within a document, so both kinds of positions give the same logits.
                torch.testing.assert_close(have, want[:, own], atol=2e-6, rtol=0)
    loss = torch.nn.functional.cross_entropy(
        model(input_ids=ids[:, own], position_ids=PACKED[:, own], use_cache=False, **given).logits[0],
        labels[0, own], reduction="sum")
    for part, gradient in zip(torch.autograd.grad(loss, model.parameters()), gradients):
        dist.all_reduce(part, group=group)
        torch.testing.assert_close(part, gradient, atol=2e-6, rtol=0)


def positions(rank, group):
    """Forgotten position_ids, and those of another layout, are a ValueError on every rank before the call."""
    burst.register(group)
    model, ids = model_of("LlamaForCausalLM").double(), tokens(2, 13)
    want = whole(model, input_ids=ids)
    for layout in ("zigzag", "contiguous", "striped"):
        burst.register(group, layout)
        own = burst.positions(13, group, layout)
        other = burst.positions(13, group, "striped" if layout == "zigzag" else "zigzag")
        for given in (own[None], own[None].expand(2, len(own))):
            have = model(input_ids=ids[:, own], position_ids=given, use_cache=False).logits
            torch.testing.assert_close(have, want[:, own], atol=2e-6, rtol=0)
        for wrong in ({}, dict(position_ids=other[None]), dict(attention_mask=torch.ones(2, len(own)))):
            for _ in range(2):
                if len(other) == len(own) or "position_ids" not in wrong:
                    rejected(lambda: model(input_ids=ids[:, own], use_cache=False, **wrong),
                             "position_ids: they must")
    burst.register(group, seqlen=13)
    own = burst.positions(13, group)
    model(input_ids=ids[:, own], position_ids=own[None], use_cache=False)
    dist.barrier(group)
    rejected(lambda: model(input_ids=ids[:, own], use_cache=False), "position_ids: they must",
             (ValueError, burst.RankLostError))  # with seqlen= the other rank may not ask


def refused(rank, group):
    """An error that one rank finds in its mask is an error on all ranks, and the next call works."""
    burst.register(group)
    model, ids = model_of("LlamaForCausalLM").double(), tokens(2)
    want, own = whole(model, input_ids=ids), burst.positions(N, group)

    def run(**given):
        return model(input_ids=ids[:, own], position_ids=own[None], use_cache=False, **given).logits

    padded = torch.ones(2, len(own))
    if rank == 1:
        padded[0, 0] = 0
    rejected(lambda: run(attention_mask=padded), "attention_mask: padding over a group")
    rejected(lambda: run(attention_mask=torch.ones(1, 1, len(own), len(own))), "a tensor of the shape")
    torch.testing.assert_close(run(attention_mask=torch.ones(2, len(own))), want[:, own], atol=2e-6, rtol=0)
    model = model_of("Llama4ForCausalLM", "Llama4TextConfig", intermediate_size_mlp=48, head_dim=8,
                     num_hidden_layers=4, num_local_experts=2, attention_chunk_size=4)
    model.set_attn_implementation("burst")
    rejected(run, "seqlen: must be registered for chunked attention")


def models_refused(rank, group):
    """Models whose tokens mix outside of attention, or whose positions a part cannot know, are a ValueError."""
    burst.register(group)
    ids, own = tokens(1), burst.positions(N, group)
    run = lambda model, at: model(input_ids=ids[:, own], position_ids=at[None], use_cache=False)
    for name, words, given in (
            ("Lfm2ForCausalLM", "layers must be attention; got conv",
             dict(layer_types=["conv", "full_attention"])),
            ("EsmForMaskedLM", "token_dropout must be False",
             dict(config="EsmConfig", token_dropout=True, mask_token_id=3)),
            ("MobileBertForMaskedLM", "trigram_input must be False",
             dict(config="MobileBertConfig", embedding_size=32, true_hidden_size=32, intra_bottleneck_size=32)),
            ("BartForCausalLM", "forward must take position_ids", dict(decoder_layers=1, decoder_attention_heads=2))):
        model = model_of(name, **given)
        model.set_attn_implementation("burst")
        rejected(lambda: run(model, own), words)
    # RoBERTa's positions begin after the padding's row.
    model = model_of("RobertaModel", pad_token_id=1)
    want = model(input_ids=ids, position_ids=torch.arange(N)[None] + 2)[0]
    model.set_attn_implementation("burst")
    rejected(lambda: run(model, own), "positions begin at 2, so add 2")
    torch.testing.assert_close(run(model, own + 2)[0], want[:, own], atol=2e-6, rtol=0)
    # A RoPE's frequencies that depend on the length: only rank 0 has the last token.
    for rope in (dict(rope_type="dynamic", factor=2.0, rope_theta=1e4),
                 dict(rope_type="longrope", factor=2.0, rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
                      original_max_position_embeddings=N - 1)):
        config = dict(max_position_embeddings=N - 1, rope_parameters=rope, rope_scaling=rope)
        model = model_of("LlamaForCausalLM", **config).double()
        model.set_attn_implementation("burst")
        rejected(lambda: run(model, own), "rope_type: must not depend on the length")


def graphs_over_ranks(rank, group):
    """A compiled model is right, and finds forgotten positions when it runs."""
    burst.register(group)
    model, ids = model_of("LlamaForCausalLM"), tokens(2)
    want, own = whole(model, input_ids=ids), burst.positions(N, group)
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    have = graph(input_ids=ids[:, own], position_ids=own[None], use_cache=False).logits
    torch.testing.assert_close(have, want[:, own], atol=2e-5, rtol=0)
    rejected(lambda: graph(input_ids=ids[:, own], position_ids=torch.arange(len(own))[None], use_cache=False),
             "position_ids: they must")


def count_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def few_graphs_over_ranks(kind, rank, group):
    """Batches of other lengths and documents, from shard() or registered anew, do not compile a graph for each."""
    torch._dynamo.utils.counters.clear()
    model, reference = model_of("LlamaForCausalLM").train(), model_of("LlamaForCausalLM")
    parallel = ContextParallel(group, "zigzag", {})
    parallel.attach(model)
    graph = model if kind == "layers" else torch.compile(model, backend="aot_eager", fullgraph=True)
    if kind == "layers":
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    if kind == "checkpoints":
        model.gradient_checkpointing_enable()
    for i in range(6):
        n = 16 + 4 * i
        ids, own = tokens(1, n), burst.positions(n, group)
        at = torch.tensor([[*range(3 + i), *range(n - 3 - i)]])
        want = reference(input_ids=ids, position_ids=at, use_cache=False).logits
        if kind == "registered":
            burst.register(group, seqlen=n, documents=[0, 3 + i])
            model.set_attn_implementation("burst")
            have = graph(input_ids=ids[:, own], position_ids=at[:, own], use_cache=False).logits
        else:
            have = graph(**parallel.shard(dict(input_ids=ids, position_ids=at))).logits
            parallel.check_used()
        torch.testing.assert_close(have, want[:, own], atol=2e-5, rtol=0)
        have.sum().backward()
    assert count_graphs() <= 3, "%s: %d graphs" % (kind, count_graphs())


def no_leak(rank, group):
    """Attentions that were registered in another one's place are forgotten, with their documents."""
    model, own = model_of("LlamaForCausalLM"), burst.positions(N, group)
    for i in range(1, 10):
        burst.register(group, documents=[0, i])
        model.set_attn_implementation("burst")
        model(input_ids=tokens(1)[:, own], position_ids=own[None], use_cache=False)
    gc.collect()
    assert len(_transformers_positions._all) == 1, list(_transformers_positions._all)


def one_look_a_batch(rank, group):
    """The layers of a model look at position_ids once, because a look makes the host wait for a GPU."""
    burst.register(group, cu_seqlens=BOUNDS)
    model, own = model_of("LlamaForCausalLM", num_hidden_layers=4), burst.positions(N, group)
    model.set_attn_implementation("burst")
    for _ in range(2):
        with unittest.mock.patch.object(_transformers_positions.Positions, "_candidates", autospec=True,
                                        return_value=[[own[None]]]) as looks:
            model(input_ids=tokens(1)[:, own], position_ids=own[None], use_cache=False)
        assert looks.call_count == 1, looks.call_count


class RanksTest(unittest.TestCase):
    @needs("LlamaConfig")
    def test_documents(self):
        run_ranks(2, documents)

    @needs("LlamaConfig")
    def test_positions(self):
        run_ranks(2, positions)

    @needs("Llama4TextConfig")
    def test_refused(self):
        run_ranks(2, refused)

    @needs("Lfm2ForCausalLM", "BartConfig", "RobertaConfig")
    def test_models_refused(self):
        run_ranks(2, models_refused)

    @needs("LlamaConfig")
    def test_graphs(self):
        run_ranks(2, graphs_over_ranks)

    @needs("LlamaConfig")
    def test_few_graphs(self):
        for kind in ("layers", "checkpoints", "registered"):
            with self.subTest(kind):
                run_ranks(2, functools.partial(few_graphs_over_ranks, kind))

    @needs("LlamaConfig")
    def test_registered_again(self):
        run_ranks(2, no_leak)

    @needs("LlamaConfig")
    def test_one_look_a_batch(self):
        run_ranks(2, one_look_a_batch)


class GraphsTest(unittest.TestCase):
    def check(self, model, graph, given, real, words):
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            want = model(input_ids=tokens(2), **given)[0][real.bool()]
            model.set_attn_implementation("burst")
            if words:
                rejected(lambda: graph(input_ids=tokens(2), **given), words)
            else:
                torch.testing.assert_close(graph(input_ids=tokens(2), **given)[0][real.bool()], want, atol=2e-5, rtol=0)

    @needs("MistralConfig", "ModernBertConfig", "Llama4TextConfig")
    def test_models(self):
        """A graph of a whole model is right without padding, and raises an error with padding."""
        burst.register()
        every = torch.ones(2, N, dtype=torch.long)
        words = "a compiled model takes no padding"
        for model, packed in (
                (model_of("MistralForCausalLM", sliding_window=4, use_cache=False), words),
                (model_of("ModernBertModel", num_hidden_layers=3, local_attention=6, cls_token_id=1, sep_token_id=2),
                 None),
                (model_of("Llama4ForCausalLM", "Llama4TextConfig", intermediate_size_mlp=48, head_dim=8,
                          num_hidden_layers=4, num_local_experts=2, attention_chunk_size=20, use_cache=False), words)):
            torch._dynamo.reset()
            graph = torch.compile(model, backend="aot_eager", fullgraph=True)
            for given, real, refused_by in (({}, every, None), (dict(attention_mask=LEFT), LEFT, words),
                                            (dict(attention_mask=every), every, None),
                                            (dict(position_ids=PACKED.expand(2, N)), every, packed)):
                with self.subTest(type(model).__name__, given=given):
                    self.check(model, graph, given, real, refused_by)
        model = model_of("Llama4ForCausalLM", "Llama4TextConfig", intermediate_size_mlp=48, head_dim=8,
                         num_hidden_layers=4, num_local_experts=2, attention_chunk_size=4, use_cache=False)
        graph = torch.compile(model, backend="aot_eager", fullgraph=True)
        self.check(model, graph, {}, every, words)  # chunks are within the sequence

    @needs("LlamaConfig")
    def test_batches(self):
        """The default backend compiles a model once, and the loss of each batch is right."""
        burst.register()
        model, eager = (model_of("LlamaForCausalLM", num_hidden_layers=1, use_cache=False) for _ in range(2))
        model.set_attn_implementation("burst")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        graph = torch.compile(model, backend=DEFAULT)
        for i in range(3):
            ids = (tokens(2) + i) % 50
            with torch.no_grad():
                torch.testing.assert_close(graph(input_ids=ids, labels=ids).loss, eager(input_ids=ids, labels=ids).loss,
                                           atol=2e-5, rtol=0)
        self.assertEqual(count_graphs(), 1)

    @needs("LlamaConfig")
    def test_layers(self):
        """Compiled layers follow the masks of batch after batch."""
        torch._dynamo.reset()
        burst.register()
        model = model_of("LlamaForCausalLM", use_cache=False)
        eager = model_of("LlamaForCausalLM", use_cache=False)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        every, other = torch.ones(2, N, dtype=torch.long), torch.tensor([[*range(7), *range(5)]]).expand(2, N)
        for given, real in ((dict(attention_mask=LEFT), LEFT), (dict(attention_mask=RIGHT), RIGHT), ({}, every),
                            (dict(position_ids=PACKED.expand(2, N)), every), (dict(position_ids=other), every),
                            (dict(attention_mask=LEFT), LEFT)):
            with self.subTest(given=given), torch.no_grad():
                want = whole(eager, input_ids=tokens(2), **given)
                model.set_attn_implementation("burst")
                have = model(input_ids=tokens(2), **given).logits
                torch.testing.assert_close(have[real.bool()], want[real.bool()], atol=2e-5, rtol=0)

    @needs("LlamaConfig")
    def test_few_graphs(self):
        """Compiled layers are not compiled again for each batch, by the default backend."""
        burst.register()
        for kind in ("padding", "documents"):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            model, eager = (model_of("LlamaForCausalLM", use_cache=False) for _ in range(2))
            for layer in model.model.layers:
                layer.compile(fullgraph=True, backend=DEFAULT)
            model.set_attn_implementation("burst")
            for i in range(6):
                if kind == "padding":
                    given = dict(attention_mask=padding(slice(0, 2 + i), slice(0, 1)))
                else:
                    given = dict(position_ids=torch.tensor([[*range(k), *range(N - k)] for k in (2 + i, 3)]))
                real = given.get("attention_mask", torch.ones(2, N)).bool()
                with self.subTest(kind, i=i), torch.no_grad():
                    torch.testing.assert_close(model(input_ids=tokens(2), **given).logits[real],
                                               whole(eager, input_ids=tokens(2), **given)[real], atol=2e-5, rtol=0)
            self.assertLessEqual(count_graphs(), 2, kind)

    @needs("LlamaConfig")
    def test_documents_that_the_mask_does_not_know(self):
        """With a cache, transformers' mask keeps no documents apart. Compiled models and layers refuse them, too."""
        burst.register()
        eager, layers = (model_of("LlamaForCausalLM", use_cache=True) for _ in range(2))
        for layer in layers.model.layers:
            layer.compile(backend="aot_eager")
        first = (torch.arange(N)[None] - 1).clamp(min=0)  # the first document has one token
        for model in (eager, layers, torch.compile(eager, backend="aot_eager")):
            torch._dynamo.reset()
            model.set_attn_implementation("burst")
            for positions in (PACKED, first):
                with torch.no_grad():
                    rejected(lambda: model(input_ids=tokens(1), position_ids=positions), "position_ids: they start again")
                    model(input_ids=tokens(1), position_ids=torch.arange(N)[None])


if __name__ == "__main__":
    main()
