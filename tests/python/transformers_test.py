"""Compares burst.register with transformers' own attentions. Every mask of masking_utils is the same mask, and
logits and gradients are equal, or a ValueError says what is not served."""

import functools
import itertools
import unittest

import torch

import burst
from harness import main

try:
    import transformers
    from transformers import masking_utils
except ImportError:
    transformers = masking_utils = None


def set_attention(model, name):
    """Does what transformers' set_attn_implementation does, which 4.53 lacks."""
    model.config._attn_implementation = name
    for config in (getattr(model.config, key) for key in getattr(model.config, "sub_configs", ())):
        config._attn_implementation = name


if transformers is not None and not hasattr(transformers.PreTrainedModel, "set_attn_implementation"):
    transformers.PreTrainedModel.set_attn_implementation = set_attention

SMALL = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
BART = dict(vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32)
VISION = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32, image_size=8,
              patch_size=4)
N = 12


def needs(*names):
    """Skips a test where transformers, or one of its models, is missing, and says so."""
    def decorate(test):
        @functools.wraps(test)
        def run(self):
            if masking_utils is None:
                self.skipTest("needs transformers with masking_utils (4.53): nothing was tested")
            missing = [name for name in names if not hasattr(transformers, name)]
            if missing:
                self.skipTest("this transformers has no %s: they were not tested" % ", ".join(missing))
            test(self)
        return run
    return decorate


def model_of(name, config="", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, config or name.replace("ForCausalLM", "").replace("Model", "") + "Config")
    return getattr(transformers, name)(config(**{**SMALL, **changes})).eval()


def tokens(rows, count=N):
    return torch.randint(3, 50, (rows, count), generator=torch.Generator().manual_seed(count))


def padding(*hidden):
    """Returns an attention_mask whose rows hide the tokens of slices."""
    mask = torch.ones(len(hidden), N, dtype=torch.long)
    for row, where in zip(mask, hidden):
        row[where] = 0
    return mask


LEFT, RIGHT = padding(slice(0, 4), slice(0, 0)), padding(slice(8, None), slice(11, None))
HOLES = padding(slice(3, 5), slice(0, 0))
PACKED = torch.tensor([[*range(4), *range(8)]])
BOUNDS = torch.tensor([0, 4, 12], dtype=torch.int32)


def own_mask(mask, rows, n):
    """Returns the keys that a Mask shows, bool [rows, n, n], by attention() itself. Values are the keys' numbers."""
    q = torch.zeros(rows, n, 1, n, dtype=torch.float64)
    v = torch.eye(n, dtype=torch.float64).expand(rows, n, n)[:, :, None]
    out = burst.attention(q, q, v, causal=mask.causal, window=mask.window, documents=mask.documents,
                          slices=mask.slices)
    return out[:, :, 0] > 0


def mask_functions():
    """Returns (name, function of two rows) for all functions of masking_utils and their compositions."""
    m = masking_utils
    shift, blocks = torch.tensor([0, 3]), torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1],
                                                        [0, 0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2]])
    positions = torch.tensor([[*range(5), *range(7)], [*range(3, 10), *range(2, 7)]])
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * 7 + [1] * 5])
    base = {"causal": m.causal_mask_function, "bidirectional": m.bidirectional_mask_function,
            "window": m.sliding_window_causal_mask_function(4), "window of 1": m.sliding_window_causal_mask_function(1),
            "window on both sides": m.and_masks(m.bidirectional_mask_function, lambda b, h, q, k: abs(q - k) <= 3),
            "chunks": m.chunked_causal_mask_function(4, shift)}
    if hasattr(m, "sliding_window_bidirectional_mask_function"):
        base["window on both sides"] = m.sliding_window_bidirectional_mask_function(3)
    blockwise = getattr(m, "blockwise_overlay", lambda labels: lambda b, h, q, k: (
        labels[b, q] == labels[b, k]) & (labels[b, q] >= 0))
    for name, function in base.items():
        yield name, function
        yield name + ", blocks", m.or_masks(function, blockwise(blocks))
        yield name + ", prefix", m.or_masks(function, lambda b, h, q, k: k < 5)
        yield name + ", odd", m.and_masks(function, lambda b, h, q, k: (q + k) % 3 > 0)
        if hasattr(m, "remap_positions_for_packed_sequence"):
            function = m.remap_positions_for_packed_sequence(function, positions)
        yield name + ", packed", m.and_masks(function, m.packed_sequence_mask_function(documents))
        yield name + ", packed, blocks", m.and_masks(m.or_masks(function, blockwise(blocks)),
                                                     m.packed_sequence_mask_function(documents))


class MaskTest(unittest.TestCase):
    @needs()
    def test_every_mask(self):
        """Queries see the keys that sdpa_mask shows them, for every function with every padding."""
        from burst import _transformers_masks
        make, count = _transformers_masks.mask_function(lambda: 1), 0
        for (name, function), padded in itertools.product(mask_functions(), (None, LEFT, RIGHT, HOLES)):
            with self.subTest(name, padded=padded):
                padded = padded if padded is None else padded.bool()
                values = _transformers_masks._values_of(masking_utils.sdpa_mask, function, 2, N, padded, False, "cpu")
                mask = make(batch_size=2, q_length=N, kv_length=N, mask_function=function, attention_mask=padded,
                            device="cpu")
                self.assertIsNone(mask.refusal)
                self.assertTrue(torch.equal(own_mask(mask, 2, N), values(0, N, True).expand(2, N, N)))
                count += 1
        self.assertGreater(count, 100)

    @needs()
    def test_long_masks_are_read(self):
        """At a million tokens, known functions are read. Unknown ones are refused before any n x n tensor is made."""
        from burst import _transformers_masks
        n, m = 2**20, masking_utils
        make = functools.partial(_transformers_masks.mask_function(lambda: 1), batch_size=1, q_length=n, kv_length=n,
                                 device="cpu")
        documents = (torch.arange(n) // 1000)[None]
        mask = make(mask_function=m.and_masks(m.sliding_window_causal_mask_function(99),
                                              m.packed_sequence_mask_function(documents)))
        self.assertEqual((mask.causal, mask.window, mask.documents), (True, 99, (tuple(range(0, n, 1000)),)))
        kept = torch.ones(1, n, dtype=torch.bool)
        kept[0, :7] = False
        mask = make(mask_function=m.causal_mask_function, attention_mask=kept)
        self.assertEqual(mask.slices, (((7, n, 7, n, "causal"),),))
        mask = make(mask_function=m.or_masks(m.causal_mask_function, lambda b, h, q, k: k < 5))
        self.assertIn("<lambda>", mask.refusal)

    @needs()
    def test_a_function_of_a_known_name_is_tried(self):
        """A later version's function with another meaning is evaluated, not read."""
        from burst import _transformers_masks

        def sliding_window_overlay(sliding_window):
            def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
                return kv_idx >= q_idx - sliding_window
            inner_mask.__module__ = "transformers.masking_utils"
            inner_mask.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
            return inner_mask

        function = masking_utils.and_masks(sliding_window_overlay(3), masking_utils.causal_mask_function)
        trusted = set(_transformers_masks._trusted)
        mask = _transformers_masks.mask_function(lambda: 1)(
            batch_size=1, q_length=N, kv_length=N, mask_function=function, device="cpu")
        _transformers_masks._trusted.update(trusted)
        self.assertEqual((mask.causal, mask.window), (True, 4))


class ModelsTest(unittest.TestCase):
    def check(self, run, model, reference="sdpa", refused=None, real=None, tolerance=2e-5):
        """Checks that run(model) with burst equals run(model) with `reference`, or is a ValueError with `refused`."""
        with torch.no_grad():
            model.set_attn_implementation("burst")
            if refused is not None:
                with self.assertRaisesRegex(ValueError, refused):
                    run(model)
                return
            have = run(model)
            model.set_attn_implementation(reference)
            want = run(model)
        if real is not None:
            have, want = have[real.bool()], want[real.bool()]
        torch.testing.assert_close(have, want, atol=tolerance, rtol=0)

    def check_masks(self, model, reference="sdpa", windowed=False, tells_packing=True):
        """Checks every kind of mask that a decoder or an encoder takes."""
        decoder = {} if type(model).__name__ in ("BertModel", "ModernBertModel") else dict(use_cache=False)
        additive = torch.full((1, 1, N, N), torch.finfo(torch.float32).min).triu(1)
        torch.manual_seed(3)
        odd = (torch.rand(2, 1, N, N) < 0.5) | torch.eye(N, dtype=torch.bool)

        def check(rows=2, real=None, refused=None, **given):
            with self.subTest(type(model).__name__, given=sorted(given), real=real):
                self.check(lambda model: model(input_ids=tokens(rows), **given, **decoder)[0], model, reference,
                           refused, real)

        check()
        for mask in (LEFT, RIGHT, HOLES):
            check(attention_mask=mask, real=mask)
        # With a mask of four dimensions, a model drops its windows (except with flash-attention).
        refused = "sliding_window" if windowed else None
        check(attention_mask=additive, refused=refused)
        if reference == "sdpa":
            check(attention_mask=torch.ones(2, 1, N, N, dtype=torch.bool), refused=refused)
            check(attention_mask=odd)
        refused = None if tells_packing else "position_ids: they start again"
        check(rows=1, position_ids=PACKED, refused=refused)
        for length in (1, 3):  # no document is longer than the window
            check(rows=1, position_ids=torch.arange(N)[None] % length, refused=refused)
        check(rows=1, position_ids=(torch.arange(N)[None] - 1).clamp(min=0), refused=refused)  # one token, then the rest
        check(position_ids=PACKED.expand(2, N), refused=refused)
        check(attention_mask=torch.full((1, 1, N, N), 0.5), refused="adds to logits")
        self.check_lengths(model, decoder)

    def check_lengths(self, model, decoder):
        """cu_seq_lens keep documents apart, as in flash-attention: each has the values that it has alone."""
        model.set_attn_implementation("burst")
        ids = tokens(1)
        run = lambda ids, positions, **given: model(input_ids=ids, position_ids=positions, **given, **decoder)[0]
        with torch.no_grad():
            have = run(ids, PACKED, cu_seq_lens_q=BOUNDS, cu_seq_lens_k=BOUNDS, max_length_q=8, max_length_k=8)
            lists = run(ids, PACKED, cu_seq_lens_q=BOUNDS.tolist(), cu_seq_lens_k=BOUNDS.tolist())
            self.assertTrue(torch.equal(lists, have))
            for begin, end in ((0, 4), (4, 12)):
                want = run(ids[:, begin:end], PACKED[:, begin:end])
                torch.testing.assert_close(have[:, begin:end], want, atol=2e-5, rtol=0)
            for bounds, other in ((BOUNDS, BOUNDS[[0, 2]]), (BOUNDS - 1, BOUNDS - 1), (BOUNDS[:2], BOUNDS[:2]),
                                  (BOUNDS, None)):
                with self.assertRaisesRegex(ValueError, "cu_seq_lens_[qk]: it must"):
                    run(ids, PACKED, cu_seq_lens_q=bounds, cu_seq_lens_k=other)

    @needs("LlamaConfig")
    def test_tensors_that_numpy_changes(self):
        """A loader may fill a mask, bounds and positions anew, which torch does not see."""
        burst.register()
        model = model_of("LlamaForCausalLM")
        mask, bounds, positions = torch.ones(1, 1, N, N, dtype=torch.bool).tril(), BOUNDS.clone(), PACKED.clone()
        for begin in (4, 6, 1):
            mask.numpy()[0, 0, begin:, :begin] = False
            bounds.numpy()[1] = begin
            positions.numpy()[0] = [*range(begin), *range(N - begin)]
            self.check(lambda model: model(input_ids=tokens(1), attention_mask=mask, use_cache=False)[0], model)
            with torch.no_grad():
                model.set_attn_implementation("burst")
                have = model(input_ids=tokens(1), position_ids=positions, use_cache=False, cu_seq_lens_q=bounds,
                             cu_seq_lens_k=bounds)[0]
                alone = model(input_ids=tokens(1)[:, begin:], use_cache=False)[0]
            torch.testing.assert_close(have[:, begin:], alone, atol=2e-5, rtol=0)

    @needs("LlamaConfig", "GptOssConfig")
    def test_autocast(self):
        """Models in float32 compute in bfloat16, with errors like those of transformers' own attention."""
        burst.register()
        for model, own in ((model_of("LlamaForCausalLM"), "sdpa"),
                           (model_of("GptOssForCausalLM", head_dim=8, num_local_experts=2, num_experts_per_tok=1), "eager")):
            def run(name, autocast):
                model.set_attn_implementation(name)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = model(input_ids=tokens(2), use_cache=False).logits.float()
                return [logits.detach(), *torch.autograd.grad(logits.sin().sum(), model.parameters())]

            want = run(own, False)
            have, others = ([((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in zip(run(name, True), want)]
                            for name in ("burst", own))
            self.assertTrue(all(a <= 2 * b + 1e-6 for a, b in zip(have, others)), list(zip(have, others)))

    @needs("LlamaConfig", "Qwen2Config", "MistralConfig")
    def test_decoders(self):
        burst.register()
        self.check_masks(model_of("LlamaForCausalLM"))
        self.check_masks(model_of("MistralForCausalLM", sliding_window=4), windowed=True)
        self.check_masks(model_of("Qwen2ForCausalLM", use_sliding_window=True, sliding_window=4, max_window_layers=1),
                         windowed=True)

    @needs("LlamaConfig")
    def test_default_device(self):
        """What the package makes for itself is on the CPU, also where the user's default is another device."""
        burst.register()
        model = model_of("LlamaForCausalLM")
        model.set_attn_implementation("burst")
        for given in (dict(attention_mask=HOLES), dict(position_ids=PACKED.expand(2, N))):
            run = lambda ids: model(input_ids=ids, use_cache=False, **given)[0]
            ids = tokens(2)
            with torch.no_grad(), torch.device("meta"):
                have = run(ids)
            torch.testing.assert_close(have, run(ids), atol=0, rtol=0)

    @needs("Gemma2Config", "GptOssConfig")
    def test_decoders_with_capped_logits_and_sinks(self):
        burst.register()
        self.check_masks(model_of("Gemma2ForCausalLM", head_dim=8, sliding_window=4), "eager", windowed=True)
        self.check_masks(model_of("GptOssForCausalLM", head_dim=8, sliding_window=4, num_local_experts=2,
                                  num_experts_per_tok=1), "eager", windowed=True, tells_packing=False)

    @needs("Llama4TextConfig", "Gemma3TextConfig")
    def test_chunks_and_windows_on_both_sides(self):
        burst.register()
        self.check_masks(model_of("Llama4ForCausalLM", "Llama4TextConfig", intermediate_size_mlp=48, head_dim=8,
                                  num_hidden_layers=4, num_local_experts=2, attention_chunk_size=4))
        self.check_masks(model_of("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, sliding_window=4,
                                  layer_types=["sliding_attention", "full_attention"],
                                  use_bidirectional_attention=True), windowed=True)

    @needs("BertConfig", "ModernBertConfig")
    def test_encoders(self):
        burst.register()
        self.check_masks(model_of("BertModel"), tells_packing=False)
        self.check_masks(model_of("ModernBertModel", num_hidden_layers=4, local_attention=6, cls_token_id=1,
                                  sep_token_id=2), windowed=True)

    @needs("ViTConfig", "CLIPConfig")
    def test_vision(self):
        burst.register()
        pixels = torch.ones(2, 3, 8, 8).cumsum(-1)
        torch.manual_seed(0)
        self.check(lambda model: model(pixel_values=pixels)[0],
                   transformers.ViTModel(transformers.ViTConfig(**VISION)).eval())
        text = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION)).eval()
        self.check(lambda model: model(input_ids=tokens(2), attention_mask=RIGHT, pixel_values=pixels).logits_per_text,
                   model)

    @needs("BartConfig", "T5Config")
    def test_encoder_decoders(self):
        burst.register()
        torch.manual_seed(0)
        model = transformers.BartModel(transformers.BartConfig(**BART)).eval()
        for keys, mask, refused in ((N, None, None), (N, RIGHT, None), (9, None, None), (N, RIGHT, "padded keys")):
            queries = 5 if refused or keys != N else N
            self.check(lambda model: model(input_ids=tokens(2, keys), attention_mask=mask, use_cache=False,
                                           decoder_input_ids=tokens(2, queries))[0], model, refused=refused)
        model = transformers.T5Model(transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1,
                                                           num_heads=4)).eval()
        model.set_attn_implementation("burst")
        reached = model.decoder.config._attn_implementation == "burst"  # older versions leave T5 its own attention
        self.check(lambda model: model(input_ids=tokens(2), decoder_input_ids=tokens(2))[0], model,
                   refused="position_bias" if reached else None)

    @needs("T5GemmaConfig")
    def test_windows_with_both_ends(self):
        """T5Gemma's encoder tells its layers a window that is one token less than its mask's."""
        burst.register()
        for window, queries in itertools.product((4, 64), (N, 5)):
            part = dict(SMALL, head_dim=8, sliding_window=window, initializer_range=0.5,
                        attn_logit_softcapping=3.0 if queries == N else None)
            torch.manual_seed(0)
            model = transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(
                encoder=dict(part), decoder=dict(part), vocab_size=50)).eval().double()
            self.check(lambda model: model(input_ids=tokens(2), decoder_input_ids=tokens(2, queries),
                                           use_cache=False).logits, model, "eager")

    @needs("LlamaConfig")
    def test_dropout(self):
        """A registered dropout_p drops weights in training only."""
        burst.register(name="burst_dropout", dropout_p=0.5)
        model = model_of("LlamaForCausalLM").double()
        run = lambda: model(input_ids=tokens(2), use_cache=False).logits
        want = run()
        model.set_attn_implementation("burst_dropout")
        torch.testing.assert_close(run(), want, atol=1e-6, rtol=0)
        model.train()
        self.assertGreater((run() - want).abs().max(), 1e-3)

    @needs("PaliGemmaConfig", "Gemma3Config")
    def test_prefixes_and_images(self):
        burst.register()
        vision = dict(VISION, model_type="siglip_vision_model", projection_dim=32, vision_use_head=False)
        text = dict(SMALL, head_dim=8)
        pixels = torch.ones(2, 3, 8, 8).cumsum(-1)
        torch.manual_seed(0)
        model = transformers.PaliGemmaForConditionalGeneration(transformers.PaliGemmaConfig(
            text_config=dict(text, model_type="gemma"), vision_config=vision, image_token_id=49,
            projection_dim=32, hidden_size=32))
        ids = tokens(2).clamp(max=48)
        ids[:, 4:8] = 49
        prefix = torch.zeros(2, N, dtype=torch.long)
        prefix[:, 10:] = 1
        mask = padding(slice(0, 3), slice(0, 0))
        for train, mask in itertools.product((False, True), (None, mask)):
            self.check(lambda model: model(input_ids=ids, pixel_values=pixels, token_type_ids=prefix,
                                           attention_mask=mask, use_cache=False).logits, model.train(train), real=mask)
        model = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
            text_config=dict(text, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
            vision_config=vision, mm_tokens_per_image=4, image_token_id=49))
        for train, mask in itertools.product((False, True), (None, mask)):
            self.check(lambda model: model(input_ids=ids, pixel_values=pixels, token_type_ids=(ids == 49).long(),
                                           attention_mask=mask, use_cache=False).logits, model.train(train), real=mask)

    @needs("LlamaConfig")
    def test_what_is_not_served(self):
        burst.register()
        model, ids = model_of("LlamaForCausalLM"), tokens(1)
        for refused, given in (("output_attentions", dict(output_attentions=True, use_cache=False)),
                               ("attention_mask", dict(attention_mask=torch.ones(1, 1, N, N), use_cache=False)),
                               ("attention_bias: this keyword", dict(attention_bias=ids, use_cache=False))):
            self.check(lambda model: model(input_ids=ids, **given).logits, model, refused=refused)
        generate = functools.partial(lambda model, **given: model.generate(ids, max_new_tokens=3, do_sample=False,
                                                                           **given))
        self.check(generate, model, refused="past_key_values: keys of a cache")
        self.check(functools.partial(generate, use_cache=False), model)
        self.check(functools.partial(generate, cache_implementation="static"), model, refused="past_key_values")
        with self.assertRaisesRegex(ValueError, "register: return_lse"):
            burst.register(return_lse=True)
        with self.assertRaisesRegex(ValueError, "register: widnow"):
            burst.register(widnow=3)
        for name in ("my/burst", "paged|burst", "flash_attention_2", "my_flash", "", None, ["burst"]):
            with self.assertRaisesRegex(ValueError, "name: must be a text without"):
                burst.register(name=name)
        for error, given in (("cu_seqlens: must end with seqlen, 12; got 9", dict(cu_seqlens=[0, 5, 9])),
                             ("cu_seqlens: must begin with 0", dict(cu_seqlens=[3, 5, N])),
                             ("cu_seqlens: must be integers", dict(cu_seqlens=torch.tensor([0, 5.5, N]))),
                             ("documents: must be integers", dict(documents=[0, 5.5])),
                             ("documents: must not be given with cu_seqlens", dict(documents=[0], cu_seqlens=[0, N]))):
            burst.register(name="burst_wrong", **given)
            model.set_attn_implementation("burst_wrong")
            with self.assertRaisesRegex(ValueError, error):
                model(input_ids=ids, use_cache=False)
        found = []
        for given in (dict(documents=[0, 5]), dict(cu_seqlens=[0, 5, 5, N]), dict(cu_seqlens=[0, 0, 5, N, N])):
            burst.register(name="burst_packed", **given)
            model.set_attn_implementation("burst_packed")
            found.append(model(input_ids=ids, use_cache=False).logits)
        assert all(torch.equal(found[0], logits) for logits in found)
        burst.register(name="burst_documents", documents=[0, 5])
        model.set_attn_implementation("burst_documents")
        with self.assertRaisesRegex(ValueError, "documents: must be left out with a mask"):
            model(input_ids=tokens(2), attention_mask=LEFT, use_cache=False)

    @needs("LlamaConfig")
    def test_gradients(self):
        """A packed and two padded examples have sdpa's gradients."""
        burst.register()
        model = model_of("LlamaForCausalLM").double()
        labels = tokens(2)
        for given, real in ((dict(position_ids=PACKED.expand(2, N)), torch.ones(2, N)),
                            (dict(attention_mask=LEFT), LEFT), (dict(attention_mask=RIGHT), RIGHT)):
            found = []
            for name in ("sdpa", "burst"):
                model.set_attn_implementation(name)
                logits = model(input_ids=tokens(2), use_cache=False, **given).logits
                loss = torch.nn.functional.cross_entropy(logits[real.bool()], labels[real.bool()])
                found.append([logits[real.bool()], *torch.autograd.grad(loss, model.parameters())])
            for want, have in zip(*found):
                torch.testing.assert_close(have, want, atol=2e-6, rtol=0)


if __name__ == "__main__":
    main()
