"""Checks models of transformers with burst.register on GPUs, by hand on a machine that has them:

  torchrun --nproc_per_node=2 tests/python/gpu_models.py     # PYTHONPATH: python, tests/python

It compares eager and compiled models, with all kinds of masks, with transformers' sdpa in float64. It also checks how
often they are compiled, padding over the group, and that wrong positions are refused. It prints what was checked. The
exit code is 0 if all checks pass.
"""

import accelerate
import torch
import torch.distributed as dist
import transformers

import burst
from gpu_checks import run, start

ROWS, N, VOCABULARY = 2, 192, 97
FACTOR = 4  # how much larger than sdpa's an error may be: products are summed in another order


def model_of(name, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=256, intermediate_size=256,
                                      num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                      max_position_embeddings=1024)
    model = transformers.LlamaForCausalLM(config).cuda().to(dtype)
    model.set_attn_implementation(name)
    return model


def tokens(rows, n, seed=0):
    return torch.randint(0, VOCABULARY, (rows, n), generator=torch.Generator().manual_seed(seed)).cuda()


def padding(*hidden):
    mask = torch.ones(ROWS, N, dtype=torch.long, device="cuda")
    for row, where in zip(mask, hidden):
        row[where] = 0
    return mask


def packed(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None].cuda()


def batches():
    """Yields (input_ids, other arguments, tokens that are not padding)."""
    for seed, n in enumerate((N, N - 1, 64)):
        yield tokens(ROWS, n, seed), {}, slice(None)
    for hidden in ((slice(0, 40), slice(0, 0)), (slice(100, None), slice(191, None)), (slice(3, 9), slice(0, 1))):
        mask = padding(*hidden)
        yield tokens(ROWS, N), dict(attention_mask=mask), mask.bool()
    for lengths in ((100, 92), (1, 191), (64, 64, 64)):
        yield tokens(1, N), dict(position_ids=packed(*lengths)), slice(None)


def values_of(model, ids, given, real):
    """Returns the logits, and the gradients of a loss, of the tokens that are not padding."""
    logits = model(input_ids=ids, use_cache=False, **given).logits[real]
    gradients = torch.autograd.grad(logits.sin().sum(), tuple(model.parameters()))
    return [logits.detach(), *gradients]


def distance(have, want):
    return max(((a.double() - b).norm() / b.norm()).item() for a, b in zip(have, want))


def masks(compiled):
    """Compares all batches, and returns the largest error and sdpa's."""
    burst.register()
    exact, plain, model = model_of("sdpa", torch.float64), model_of("sdpa"), model_of("burst")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    most, of_sdpa = 0, 0
    for ids, given, real in batches():
        want = values_of(exact, ids, given, real)
        error, allowed = (distance(values_of(of, ids, given, real), want) for of in (model, plain))
        most, of_sdpa = max(most, error), max(of_sdpa, allowed)
        if error > FACTOR * allowed:
            raise AssertionError("%s: off by %.1e, sdpa by %.1e" % (sorted(given), error, allowed))
    return "off by %.1e, sdpa by %.1e, %d graphs" % (most, of_sdpa, check_graphs())


def check_graphs():
    """Returns the number of graphs. Raises an AssertionError at the number from which on torch compiles no more."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if graphs >= torch._dynamo.config.recompile_limit:
        raise AssertionError("layers were compiled %d times" % graphs)
    return graphs


def eager(group):
    return masks(False)


def compiled_layers(group):
    return masks(True)


def compiled_model(group):
    """A whole model has one graph for all lengths, and refuses masks that it does not know."""
    burst.register()
    exact, plain, model = model_of("sdpa", torch.float64), model_of("sdpa"), model_of("burst")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graph = torch.compile(model)
    graph.parameters = model.parameters
    for seed in range(6):
        ids = tokens(ROWS, N - seed, seed)
        want = values_of(exact, ids, {}, slice(None))
        error, allowed = (distance(values_of(of, ids, {}, slice(None)), want) for of in (graph, plain))
        if error > FACTOR * allowed:
            raise AssertionError("off by %.1e, sdpa by %.1e" % (error, allowed))
    graphs = check_graphs()
    for given in (dict(attention_mask=padding(slice(0, 9), slice(0, 0))), dict(position_ids=packed(100, 92))):
        try:
            with torch.no_grad():
                graph(input_ids=tokens(1 if "position_ids" in given else ROWS, N), use_cache=False, **given)
        except (ValueError, RuntimeError) as error:
            if "attention_mask" not in str(error) and "position_ids" not in str(error):
                raise
            continue
        raise AssertionError("no error with %s" % sorted(given))
    if graphs > 2:
        raise AssertionError("%d graphs for six lengths" % graphs)
    return "right, %d graphs for six lengths; padding and documents are refused" % graphs


def default_device(group):
    """The user's default device changes nothing."""
    burst.register()
    model = model_of("burst")
    for ids, given, real in batches():
        want = values_of(model, ids, given, real)
        torch.set_default_device("cuda")
        try:
            have = values_of(model, ids, given, real)
        finally:
            torch.set_default_device(None)
        if not all(map(torch.equal, have, want)):
            raise AssertionError("other bits with %s" % sorted(given))
    return "the same bits"


def autocast(group):
    """Models in float32 compute in autocast's dtype, with errors like sdpa's, eagerly and with compiled layers."""
    burst.register()
    exact, plain, model, compiled = (model_of("sdpa", torch.float64), model_of("sdpa"), model_of("burst"),
                                     model_of("burst"))
    for layer in compiled.model.layers:
        layer.compile()
    most, of_sdpa = 0, 0
    for ids, given, real in batches():
        want = values_of(exact, ids, given, real)
        with torch.autocast("cuda", torch.bfloat16):
            *errors, allowed = (distance(values_of(of, ids, given, real), want) for of in (model, compiled, plain))
        most, of_sdpa = max(most, *errors), max(of_sdpa, allowed)
        if max(errors) > FACTOR * allowed:
            raise AssertionError("%s: off by %s, sdpa by %.1e" % (sorted(given), errors, allowed))
    return "off by %.1e, sdpa by %.1e" % (most, of_sdpa)


def ranks(group):
    """Layers over the group, compiled once, give a whole sequence's logits; forgotten positions are refused."""
    burst.register(group)
    exact, plain = model_of("sdpa", torch.float64), model_of("sdpa")
    errors, graphs = [], 0
    for is_compiled in (False, True):
        model = model_of("burst")
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        if is_compiled:
            for layer in model.model.layers:
                layer.compile()
        for seed, lengths in enumerate(((N,), (100, 92), (1, 191), (64, 64, 64), (150, 8))):
            n = sum(lengths)
            documents = [sum(lengths[:i]) for i in range(len(lengths))]
            burst.register(group, seqlen=n, documents=documents)
            ids, at = tokens(1, n, seed), packed(*lengths)
            own = burst.positions(n, group).cuda()
            with torch.no_grad():
                want, allowed = (of(input_ids=ids, position_ids=at, use_cache=False).logits[:, own]
                                 for of in (exact, plain))
                have = model(input_ids=ids[:, own], position_ids=at[:, own], use_cache=False).logits
            errors.append((distance([have], [want]), distance([allowed], [want])))
            if errors[-1][0] > FACTOR * errors[-1][1]:
                raise AssertionError("%s: off by %.1e, sdpa by %.1e" % (lengths, *errors[-1]))
        graphs = check_graphs()
        burst.register(group)  # with seqlen= an error would end the connection
        try:
            with torch.no_grad():
                model(input_ids=ids[:, own], use_cache=False)
        except ValueError as error:
            if "position_ids" not in str(error):
                raise
        else:
            if dist.get_world_size(group) > 1:
                raise AssertionError("forgotten positions were not refused")
    return "off by %.1e, sdpa by %.1e, %d graphs" % (*(max(column) for column in zip(*errors)), graphs)


def padded(group):
    """Padding over the group gives the loss and the gradients of one GPU, also of labels that padding predicts."""
    parallel = burst.context_parallel(accelerate.Accelerator())
    exact, plain, model = model_of("sdpa", torch.float64), model_of("sdpa"), model_of("sdpa")
    parallel.attach(model)
    errors = []
    for hidden in ((slice(0, 40), slice(0, 0)), (slice(100, None), slice(191, None)), (slice(3, 9), slice(0, 1))):
        batch = dict(input_ids=tokens(ROWS, N), labels=tokens(ROWS, N), attention_mask=padding(*hidden))
        want, allowed = ([(loss := of(**batch).loss).detach(), *torch.autograd.grad(loss, of.parameters())]
                         for of in (exact, plain))
        loss = model(**parallel.shard(batch)).loss / dist.get_world_size(group)
        have = [loss.detach(), *torch.autograd.grad(loss, model.parameters())]
        for value in have:
            dist.all_reduce(value, group=group)
        errors.append((distance(have, want), distance(allowed, want)))
        if errors[-1][0] > FACTOR * errors[-1][1]:
            raise AssertionError("%s: off by %.1e, sdpa by %.1e" % (hidden, *errors[-1]))
    return "off by %.1e, sdpa by %.1e" % tuple(max(column) for column in zip(*errors))


if __name__ == "__main__":
    run((eager, compiled_layers, compiled_model, default_device, autocast, ranks, padded), start()[1])
