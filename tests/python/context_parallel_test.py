"""Tests burst.context_parallel: a Trainer over ranks has the losses and the parameters of one process.

The models are small and random. Their attentions are those that accelerate's context parallelism refuses, and plain
ones. Batches have padding, or packed documents."""

import os
import tempfile
import unittest
import warnings

import torch
import torch.distributed as dist

import burst
from harness import main, run_ranks

try:
    import accelerate
    import transformers
except ImportError:
    accelerate = transformers = None

STEPS, ROWS = 20, 4
SMALL = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
             eos_token_id=2, initializer_range=0.2)
# By the config's name: the changes, and the attention of the one process.
FAMILIES = {
    "Llama": (dict(), "sdpa"),
    "Qwen3": (dict(), "sdpa"),
    "Mistral": (dict(sliding_window=5), "sdpa"),
    "Gemma3": (dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"]), "sdpa"),
    "Gemma2": (dict(sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=3.0), "eager"),
    "GptOss": (dict(sliding_window=6, num_local_experts=2, num_experts_per_tok=2), "eager"),
    "Llama4": (dict(intermediate_size_mlp=48, num_hidden_layers=4, num_local_experts=2, attention_chunk_size=7,
                    floor_scale=4, attn_scale=0.5), "sdpa"),
}


def model_of(family):
    changes, attention = FAMILIES[family]
    name = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}.get(family, family + "Config")
    torch.manual_seed(2)
    config = getattr(transformers, name)(**{**SMALL, **changes})
    config._attn_implementation, config.use_cache = attention, False  # with a cache transformers mixes documents
    model = getattr(transformers, family + "ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def examples():
    """Returns texts of different lengths, as token ids. Some tokens have no label."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for i in range(STEPS * ROWS):
        tokens = torch.randint(3, 50, (3 + (i * 7) % 11,), generator=generator)
        labels = tokens.clone()
        labels[: 1 + i % 3] = -100  # older Trainers count the first label, which nothing predicts
        made.append(dict(input_ids=tokens.tolist(), labels=labels.tolist()))
    return made


def padded(left):
    """Returns a collator that pads rows, at the left or at the right."""
    def collate(rows):
        most = max(len(row["input_ids"]) for row in rows)
        batch = dict(input_ids=[], labels=[], attention_mask=[])
        for row in rows:
            count = len(row["input_ids"])
            for name, values, filler in (("input_ids", row["input_ids"], 0), ("labels", row["labels"], -100),
                                         ("attention_mask", [1] * count, 0)):
                fill = [filler] * (most - count)
                batch[name].append(fill + values if left else values + fill)
        return {name: torch.tensor(values) for name, values in batch.items()}
    return collate


def packed(rows):
    """Returns one row of documents, as DataCollatorWithFlattening does."""
    return dict(input_ids=torch.tensor([sum((row["input_ids"] for row in rows), [])]),
                labels=torch.tensor([sum(([-100] + row["labels"][1:] for row in rows), [])]),
                position_ids=torch.tensor([[i for row in rows for i in range(len(row["input_ids"]))]]))


COLLATORS = {"packed": packed, "right": padded(False), "left": padded(True)}


def environment(rank, size):
    """Sets torchrun's variables, from which accelerate knows the ranks."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0", ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="")


def trained(model, collator, cut=None, dataset=None, rows=ROWS, evaluated=4 * ROWS + 1, trainer_of=None,
            **options):
    """Returns (losses by step, loss of evaluation, parameters) of a Trainer's run. The last evaluated batch is not full."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    data = dataset or examples()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, optim="sgd",
            learning_rate=0.05, lr_scheduler_type="constant", logging_strategy="no", save_strategy="no", report_to=[],
            use_cpu=True, disable_tqdm=True, log_level="error", seed=3, remove_unused_columns=False, prediction_loss_only=True,
            **options)
        trainer = (trainer_of or transformers.Trainer)(model=model, args=arguments, train_dataset=data,
                                                       eval_dataset=data[:evaluated], data_collator=collator)
        if cut is not None:
            cut(trainer)
        seen, step = [], trainer.training_step
        trainer.training_step = lambda *x, **y: seen.append(step(*x, **y)) or seen[-1]
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        losses = torch.stack(seen)
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        return losses, evaluated, {name: p.detach() for name, p in trainer.accelerator.unwrap_model(
            trainer.model).named_parameters()}


def compare(have, want, first):
    """Compares two results of trained(). Errors of float32 grow over the steps."""
    torch.testing.assert_close(have[0], want[0], atol=2e-5, rtol=2e-5)
    assert abs(have[1] - want[1]) < 1e-4 * want[1], (have[1], want[1])
    off = moved = 0.0
    for name, parameter in want[2].items():
        off += (have[2][name] - parameter).square().sum().item()
        moved += (first[name] - parameter).square().sum().item()
    assert off < 1e-8 * moved, (off, moved)  # 1e-4 of the way that the parameters have gone


def alone(family, collator, **more):
    """Returns one process's result, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result")

        def body(rank, group):
            dist.destroy_process_group()
            torch.save(trained(model_of(family), COLLATORS[collator], **more), path)
        run_ranks(1, body)
        return torch.load(path)


def over_ranks(family, collator, want, size, **how):
    def body(rank, group):
        environment(rank, size)
        model = model_of(family)
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        have = trained(model, COLLATORS[collator], lambda trainer: burst.context_parallel(trainer, **how))
        compare(have, want, first)
    run_ranks(size, body)


def two_groups(rank, group):
    """Two groups of two ranks train on other rows, as in data parallelism."""
    environment(rank, 4)
    model, want = model_of("Mistral"), torch.load(os.environ["BURST_WANT"])
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    compare(trained(model, COLLATORS["right"], lambda trainer: burst.context_parallel(trainer, 2), rows=ROWS // 2,
                    evaluated=4 * ROWS), want, first)


def own_loop(rank, group):
    """An Accelerator's caller cuts batches with shard(); the mean of the ranks' gradients is one process's."""
    environment(rank, 2)
    model, batch = model_of("GptOss"), COLLATORS["right"](examples()[:ROWS])
    loss = model(**batch).loss
    want = torch.autograd.grad(loss, model.parameters())
    accelerator = accelerate.Accelerator(cpu=True)
    parallel = burst.context_parallel(accelerator)
    prepared = accelerator.prepare(model)
    local = parallel.shard(batch)
    n = burst.positions(batch["input_ids"].shape[1], group).numel()
    assert local["input_ids"].shape == local["shift_labels"].shape == local["position_ids"].shape == (ROWS, n)
    have = prepared(**local).loss
    accelerator.backward(have)
    total = have.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / 2, loss.detach(), atol=1e-5, rtol=0)
    for a, b in zip(model.parameters(), want):
        torch.testing.assert_close(a.grad, b, atol=2e-5, rtol=1e-4)
    rejected(lambda: accelerator.maybe_context_parallel(), "maybe_context_parallel: must not")
    rejected(lambda: parallel.shard(dict(labels=batch["labels"])), "input_ids: must be in the batch")
    other = burst.context_parallel(accelerator)
    rejected(lambda: other.shard(dict(input_ids=batch["input_ids"] + rank)), "batch: must be equal on all ranks")


def equal_one_process(parallel, group, model, batch, is_compiled=False):
    """Compares the loss and the gradients of a batch with those of one process's sdpa, in float64.

    Norms and the loss of transformers round to float32, so last bits of float64 may become errors of 2^-24 there."""
    model = model.double()
    loss = model(**batch).loss
    want = torch.autograd.grad(loss, model.parameters())
    parallel.attach(model)
    for layer in model.model.layers if is_compiled else ():
        layer.compile(backend="eager")
    have = model(**parallel.shard(batch)).loss / dist.get_world_size(group)
    have.backward()
    total = have.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total.float(), loss.float(), atol=0, rtol=2e-6)
    for a, b in zip(model.parameters(), want):
        dist.all_reduce(a.grad)
        torch.testing.assert_close(a.grad, b, atol=2e-6 * max(1, b.abs().max().item()), rtol=0)


def padding(rank, group):
    """A query of padding sees what it sees in one process, because its token may predict a label."""
    environment(rank, dist.get_world_size(group))
    accelerator = accelerate.Accelerator(cpu=True)
    parallel = burst.context_parallel(accelerator)
    tokens = torch.randint(3, 50, (2, 19), generator=torch.Generator().manual_seed(5))
    at = torch.arange(19)
    masks = dict(left=torch.stack([at >= 8, at >= 0]), right=torch.stack([at < 19, at < 6]), both=(at > 2) & (at < 15),
                 holes=torch.stack([at % 3 > 0, at % 7 < 5]))
    for family in ("Llama", "Mistral", "Llama4"):
        for name, mask in masks.items():
            mask = mask.expand(2, 19).long()
            for labels in (tokens, tokens.masked_fill(mask == 0, -100)):
                batch = dict(input_ids=tokens, labels=labels, attention_mask=mask)
                equal_one_process(parallel, group, model_of(family), batch, (family, name) == ("Mistral", "left"))
    windowed = burst.context_parallel(accelerator, window=3)
    rejected(lambda: equal_one_process(windowed, group, model_of("Llama"), batch), "window: it was registered, and")


def positions_with_a_mask(rank, group):
    """Positions tell of documents where no mask is given, as transformers has it."""
    environment(rank, dist.get_world_size(group))
    parallel = burst.context_parallel(accelerate.Accelerator(cpu=True))
    tokens = torch.randint(3, 50, (1, 19), generator=torch.Generator().manual_seed(6))
    jump = torch.cat([torch.arange(7), torch.arange(20, 32)])[None]
    again = torch.cat([torch.arange(7), torch.arange(12)])[None]
    ones, right = torch.ones_like(tokens), (torch.arange(19) < 15).long()[None]
    for family in ("Llama", "Mistral"):
        for at, mask in ((jump, ones), (jump, None), (again, None), (again, right)):
            batch = dict(input_ids=tokens, labels=tokens, position_ids=at)
            equal_one_process(parallel, group, model_of(family),
                              batch if mask is None else dict(batch, attention_mask=mask))
    rejected(lambda: equal_one_process(parallel, group, model_of("Llama"), dict(batch, attention_mask=ones)),
             "position_ids: they start again")


def loss_by_default(rank, group):
    """GPT-2 has transformers' loss of causal models without naming it. Models without a loss have it, too."""
    environment(rank, 2)
    parallel = burst.context_parallel(accelerate.Accelerator(cpu=True))
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0,
                                     resid_pdrop=0, embd_pdrop=0, use_cache=False)
    tokens = torch.randint(3, 50, (2, 19), generator=torch.Generator().manual_seed(5))
    equal_one_process(parallel, group, transformers.GPT2LMHeadModel(config), dict(input_ids=tokens, labels=tokens))
    for model in (transformers.GPT2Model(config), transformers.GPT2DoubleHeadsModel(config)):
        rejected(lambda: parallel.attach(model), "model: must have transformers' loss")


def batches_that_cannot_be_cut(rank, group):
    """Keywords of other forms are refused by name."""
    environment(rank, 2)
    parallel = burst.context_parallel(accelerate.Accelerator(cpu=True))
    tokens = torch.randint(3, 50, (2, 8), generator=torch.Generator().manual_seed(5))
    for batch, words in ((dict(input_ids=tokens.tolist()), "input_ids: must be a tensor [rows, tokens]"),
                         (dict(input_ids=tokens[0]), "input_ids: must be a tensor"),
                         (dict(inputs_embeds=tokens), "inputs_embeds: must be a tensor [rows, tokens, hidden]"),
                         (dict(input_ids=tokens, labels=tokens.tolist()), "labels: must be a tensor"),
                         (dict(input_ids=tokens, position_ids=tokens.expand(3, 2, 8)), "position_ids: must be a"),
                         (dict(input_ids=tokens, position_ids=tokens[:, 1:]), "position_ids: must be a tensor"),
                         (dict(input_ids=tokens, attention_mask=tokens[:, None, None]), "attention_mask: must be a"),
                         (dict(input_ids=tokens, pixel_values=tokens), "pixel_values: must be left out")):
        rejected(lambda: parallel.shard(batch), words)


def two_batches_before_a_backward(rank, group):
    """Gradient checkpointing repeats each forward with the documents of its own batch."""
    environment(rank, 2)
    rows, parallel = examples(), burst.context_parallel(accelerate.Accelerator(cpu=True))
    for kind in ("right", "packed"):
        model = model_of("Mistral")
        batches = [COLLATORS[kind](rows[:2]), COLLATORS[kind](rows[1::-1])]
        want = torch.autograd.grad(sum(model(**batch).loss for batch in batches), model.parameters())
        parallel.attach(model)
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        sum(model(**parallel.shard(batch)).loss for batch in batches).backward()
        for a, b in zip(model.parameters(), want):
            dist.all_reduce(a.grad)
            torch.testing.assert_close(a.grad / 2, b, atol=2e-5, rtol=1e-4)


def sharded_parameters(rank, group):
    """FSDP2's gradients, the mean over its ranks, are one process's."""
    from torch.distributed.fsdp import fully_shard
    environment(rank, 2)
    model, batch = model_of("Gemma3"), COLLATORS["packed"](examples()[:ROWS])
    loss = model(**batch).loss
    want = torch.autograd.grad(loss, model.parameters())
    parallel = burst.context_parallel(accelerate.Accelerator(cpu=True))
    parallel.attach(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(**parallel.shard(batch)).loss.backward()
    for a, b in zip(model.parameters(), want):
        torch.testing.assert_close(a.grad.full_tensor(), b, atol=2e-5, rtol=1e-4)


def rejected(call, words):
    try:
        call()
    except (ValueError, TypeError) as error:
        assert words in str(error), error
        return
    raise AssertionError("not refused: " + words)


def refusals(rank, group):
    """Options that need whole sequences, and models without attention, are refused by name."""
    environment(rank, 2)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        def trainer_of(model, trainer_options=(), **options):
            arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[], **options)
            return transformers.Trainer(model, arguments, **dict(trainer_options))

        llama = model_of("Llama")
        rejected(lambda: burst.context_parallel(trainer_of(llama), size=3), "size: must divide the 2 processes")
        for arguments, words in ((dict(layout="balanced"), "layout: must be one of"), (dict(seqlen=3), "seqlen: must be"),
                                 (dict(documents=[0]), "documents: must be"), (dict(color=1), "color must be an argument")):
            rejected(lambda: burst.context_parallel(trainer_of(llama), **arguments), words)
        rejected(lambda: burst.context_parallel(3), "trainer: must be a Trainer or an Accelerator")
        rejected(lambda: burst.context_parallel(trainer_of(llama, label_smoothing_factor=0.1)), "label_smoothing_factor")
        for name in ("compute_metrics", "compute_loss_func"):
            rejected(lambda: burst.context_parallel(trainer_of(llama, {name: lambda *_, **__: {}})), name)
        encoder = transformers.BertForMaskedLM(transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32))
        rejected(lambda: burst.context_parallel(trainer_of(encoder)), "model: must")
        recurrent = transformers.MambaForCausalLM(transformers.MambaConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4))
        rejected(lambda: burst.context_parallel(trainer_of(recurrent)), "model: ")
        refusing = trainer_of(llama)
        burst.context_parallel(refusing)
        rejected(lambda: refusing.predict(examples()[:1]), "prediction_loss_only: must be True")
        routed = model_of("GptOss")
        routed.config.output_router_logits = True
        rejected(lambda: burst.context_parallel(trainer_of(routed)), "output_router_logits: must be False")


def supported():
    """Returns why nothing can be tested, or None."""
    if accelerate is None:
        return "needs transformers and accelerate"
    if not hasattr(transformers.Trainer, "_prepare_context_parallel_inputs"):
        return "Trainer has no context parallelism: transformers 4.57 has it"
    return None


@unittest.skipIf(supported(), supported())
class TrainerTest(unittest.TestCase):
    def check(self, family):
        """One process trains on padded rows. Packed documents have the same loss, because none sees another."""
        want = alone(family, "right")
        over_ranks(family, "right", want, 2)
        # Llama 4's scales of queries count all tokens of a row.
        over_ranks(family, "packed", alone(family, "packed") if family == "Llama4" else want, 2)

    def test_llama(self):
        self.check("Llama")
        over_ranks("Llama", "left", alone("Llama", "left"), 3, layout="striped")

    def test_qwen3(self):
        self.check("Qwen3")

    def test_mistral(self):
        self.check("Mistral")

    def test_gemma3(self):
        self.check("Gemma3")

    def test_gemma2(self):
        self.check("Gemma2")

    def test_gpt_oss(self):
        self.check("GptOss")

    def test_llama4(self):
        self.check("Llama4")

    def test_two_groups(self):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BURST_WANT"] = os.path.join(folder, "want")
            torch.save(alone("Mistral", "right", evaluated=4 * ROWS), os.environ["BURST_WANT"])
            run_ranks(4, two_groups)

    def test_own_loop(self):
        run_ranks(2, own_loop)

    def test_padding(self):
        for size in (1, 2):
            run_ranks(size, padding)

    def test_positions_with_a_mask(self):
        for size in (1, 2):
            run_ranks(size, positions_with_a_mask)

    def test_loss_by_default(self):
        run_ranks(2, loss_by_default)

    def test_batches_that_cannot_be_cut(self):
        run_ranks(2, batches_that_cannot_be_cut)

    def test_two_batches_before_a_backward(self):
        run_ranks(2, two_batches_before_a_backward)

    def test_sharded_parameters(self):
        run_ranks(2, sharded_parameters)

    def test_refusals(self):
        run_ranks(2, refusals)


if __name__ == "__main__":
    main()
