"""Checks burst.attention on GPUs, by hand on a machine that has them:

  torchrun --nproc_per_node=2 tests/python/gpu_checks.py     # PYTHONPATH: python, tests/python

It compares with naive attention over layouts, masks, strategies and dtypes. It also checks streams, IPC, that there is
one NCCL, torch.compile, memory, and calls after a refused capture or without memory. With --lose, rank 1 is killed
and the others must say so. It prints what was checked. The exit code is 0 if all checks pass.
"""

import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist

import burst
from burst import flash_attn
from flash_attn_test import by_definition, of_documents, shown
from harness import normal


def naive(q, k, v, dtype, causal=True, window=0, starts=None, softcap=0.0, alibi_slopes=None, kept=None):
    """Computes attention in the given dtype and rounds after each step, as a plain implementation does."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    at = torch.arange(q.shape[1], device=q.device)
    distance = at[:, None] - at[None, :]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window:
        hidden |= distance.abs() >= window
    if starts:
        of = torch.bucketize(at, torch.tensor(starts[1:], device=q.device), right=True)
        hidden |= of[:, None] != of[None, :]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3]**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = torch.tensor(alibi_slopes, device=q.device).to(dtype)
        scores = scores - slopes[:, None, None] * distance.abs().to(dtype)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = scores.softmax(-1)
    if kept is not None:
        weights = weights * kept.to(dtype)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


MASKS = [dict(causal=True), dict(causal=False), dict(causal=True, window=100),
         dict(causal=True, starts=[0, 77, 150])]


class Problem:
    def __init__(self, device, seqlen, heads, kv_heads, head_dim, dtype, **mask):
        """head_dim: may be a pair, of q and k and of v."""
        self.mask, self.dtype = mask, dtype
        head_dim, of_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        self.inputs = [normal(name, 1, seqlen, h, dim).to(device).to(dtype)
                       for name, h, dim in (("q", heads, head_dim), ("k", kv_heads, head_dim), ("v", kv_heads, of_v))]
        self.dout = normal("o", 1, seqlen, heads, of_v).to(device).to(dtype)
        self.dlse = normal("l", 1, heads, seqlen).to(device)

    def results(self, dtype, **scores):
        inputs = [x.to(dtype).requires_grad_() for x in self.inputs]
        out, lse = naive(*inputs, dtype, **self.mask, **scores)
        loss = (out * self.dout.to(dtype)).sum() + (lse * self.dlse.to(dtype)).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]

    def burst(self, group, layout, **arguments):
        local = [burst.shard(x, 1, group, layout).requires_grad_() for x in self.inputs]
        mask = dict(self.mask)
        starts = mask.pop("starts", None)
        out, lse = burst.attention(*local, group=group, layout=layout, documents=starts, return_lse=True,
                                   **mask, **arguments)
        loss = (out * burst.shard(self.dout, 1, group, layout)).sum() + (
            lse * burst.shard(self.dlse, 2, group, layout).to(lse.dtype)).sum()
        return [out.detach(), lse.detach(), *torch.autograd.grad(loss, local)]


def error(have, want):
    return ((have.double() - want.double()).norm() / want.double().norm()).item()


def parity(device, group):
    """Checks relative errors in the norm. In bf16 and fp16 they are at most 1.25 times those of a naive
    computation; in float32 at most 1e-5, in double 1e-12."""
    checked, worst = 0, 0.0
    for dtype, seqlen, head_dims in ((torch.bfloat16, 509, (128, 64, (192, 128))), (torch.float16, 509, (128, 36, (64, 20))),
                                     (torch.float32, 200, (32, (40, 24))), (torch.float64, 200, (32,))):
        for head_dim in head_dims:
            for kv_heads in (4, 2):
                for mask in MASKS:
                    problem = Problem(device, seqlen, 4, kv_heads, head_dim, dtype, **mask)
                    want = problem.results(torch.float64)
                    plain = problem.results(dtype) if dtype.itemsize == 2 else None
                    for layout, arguments in (("zigzag", {}), ("contiguous", {}), ("striped", {}),
                                              ("zigzag", dict(strategy="ring")),
                                              ("zigzag", dict(backward="burst")),
                                              ("striped", dict(strategy="ulysses")),
                                              ("zigzag", dict(deterministic=False))):
                        have = problem.burst(group, layout, **arguments)
                        for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
                            cut = burst.shard(want[i], 2 if i == 1 else 1, group, layout)
                            off = error(have[i], cut)
                            if plain is not None:
                                bound = 1.25 * error(plain[i].double(), want[i]) + 1e-6
                            else:
                                bound = 1e-5 if dtype == torch.float32 else 1e-12
                            worst = max(worst, off / bound)
                            assert off <= bound, (name, off, bound, dtype, layout, mask, arguments)
                        checked += 1
    return "%d cases; the largest error is %.2f of its bound" % (checked, worst)


def changed_scores(device, group):
    """Checks softcap, ALiBi and dropout. A CPU says which weights are dropped: with equal weights and the unit
    matrix for V, out shows them."""
    seqlen, heads, seed, probability = 253, 4, 11, 0.25
    slopes = burst.alibi_slopes(heads).tolist()
    zeros, unit = torch.zeros(1, seqlen, heads, seqlen), torch.eye(seqlen)[None, :, None].repeat(1, 1, heads, 1)
    drop = dict(dropout_p=probability, dropout_seed=seed)
    weights = burst.attention(zeros, zeros, unit, causal=False, **drop)
    kept = ((weights > 0).double() / (1 - probability)).transpose(1, 2).to(device)
    checked, worst = 0, 0.0
    for dtype, head_dim in ((torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.bfloat16, (192, 128)),
                            (torch.float16, 96), (torch.float32, 64), (torch.float64, 32)):
        for mask in MASKS:
            problem = Problem(device, seqlen, heads, 2, head_dim, dtype, **mask)
            for scores, dropped in ((dict(softcap=1.5), None), (dict(alibi_slopes=slopes), None),
                                    (dict(), kept), (dict(softcap=2.0, alibi_slopes=slopes), kept)):
                arguments = dict(scores, **(drop if dropped is not None else {}))
                want = problem.results(torch.float64, **scores, kept=dropped)
                plain = problem.results(dtype, **scores, kept=dropped) if dtype.itemsize == 2 else None
                for layout, strategy in (("zigzag", "burst"), ("striped", "ring"), ("contiguous", "ulysses")):
                    have = problem.burst(group, layout, strategy=strategy, **arguments)
                    for i, name in enumerate(("out", "lse", "dq", "dk", "dv")):
                        off = error(have[i], burst.shard(want[i], 2 if i == 1 else 1, group, layout))
                        if plain is not None:
                            bound = 1.25 * error(plain[i].double(), want[i]) + 1e-6
                        else:
                            bound = 1e-5 if dtype == torch.float32 else 1e-12
                        worst = max(worst, off / bound)
                        assert off <= bound, (name, off, bound, dtype, layout, mask, arguments)
                    checked += 1
    problem = Problem(device, seqlen, heads, 2, 64, torch.float32)
    local = [burst.shard(x, 1, group) for x in problem.inputs]
    _, largest = burst.attention(*local, group=group, return_max_logit=True)
    q, k, _ = problem.inputs
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.repeat_interleave(2, 2).double()) / 8
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).tril()
    want = scores.masked_fill(~seen, float("-inf")).amax((2, 3)).float().cpu()
    torch.testing.assert_close(largest, want, atol=1e-5, rtol=1e-5)
    try:
        burst.attention(*(x.bfloat16() for x in local), group=group, fp8=True, softcap=1.0)
    except ValueError as refused:
        assert "softcap" in str(refused) and "fp8" in str(refused), refused
    else:
        raise AssertionError("fp8 with softcap was not refused")
    return "%d cases; the largest error is %.2f of its bound" % (checked, worst)


def more_keys(device, group):
    """Queries and keys of different numbers, with flash-attn's arguments, have the bounds of parity()."""
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        for bounds, keys, causal, window in ((None, None, True, (-1, -1)), (None, None, False, (60, 60)),
                                             ([0, 100, 300], [0, 333, 513], True, (64, 0))):
            whole = [normal(name, 1, n, heads, 72).to(device).to(dtype) for name, n, heads in (
                ("q", 300, 4), ("k", 513, 2), ("v", 513, 2))]
            mask = shown(300, 513, causal, window) if bounds is None else of_documents(bounds, keys, causal, window)
            results = []
            for kind in (torch.float64, dtype, None):
                inputs = [x.to(kind or dtype).requires_grad_() for x in whole]
                if kind is not None:
                    out = by_definition(*inputs, mask.to(device))[0]
                elif bounds is None:
                    out = flash_attn.flash_attn_func(*inputs, causal=causal, window_size=window)
                else:
                    bounds_of_both = (torch.tensor(x, dtype=torch.int32, device=device) for x in (bounds, keys))
                    out = flash_attn.flash_attn_varlen_func(*(x[0] for x in inputs), *bounds_of_both, 300, 513,
                                                            causal=causal, window_size=window)[None]
                results.append([out.detach(), *torch.autograd.grad(out.double().sin().sum(), inputs)])
            for want, plain, have in zip(*results):
                bound = 1e-5 if dtype == torch.float32 else 1.25 * error(plain, want) + 1e-6
                worst = max(worst, error(have, want) / bound)
                assert error(have, want) <= bound, (error(have, want), bound, dtype, bounds, window)
    return "the largest error is %.2f of its bound" % worst


def trainer_with_fsdp2(device, group):
    """A Trainer with FSDP2 over the group moves the parameters as a plain loop of one GPU does."""
    from context_parallel_test import COLLATORS, ROWS, examples, model_of, supported, transformers
    if supported():
        return supported()
    rows, checked = examples()[:ROWS], []
    for family in ("Mistral", "GptOss"):
        plain, batch = model_of(family).to(device), COLLATORS["right"](rows)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        for _ in range(5):
            plain(**{name: value.to(device) for name, value in batch.items()}).loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        options = transformers.TrainingArguments(
            "/tmp/burst-trainer", max_steps=5, per_device_train_batch_size=ROWS, optim="sgd", learning_rate=0.05,
            lr_scheduler_type="constant", save_strategy="no", report_to=[], disable_tqdm=True, max_grad_norm=1.0,
            fsdp="full_shard", fsdp_config=dict(version=2), remove_unused_columns=False)
        trainer = transformers.Trainer(model_of(family), options, train_dataset=rows, data_collator=COLLATORS["right"])
        burst.context_parallel(trainer)
        trainer.train()
        assert trainer.accelerator.is_fsdp2
        have = dict(trainer.accelerator.unwrap_model(trainer.model).named_parameters())
        off = max(error(have[name].full_tensor(), parameter) for name, parameter in plain.named_parameters()
                  if parameter.abs().max() > 1e-3)
        assert off < 1e-4, (family, off)
        checked.append("%s is off by %.1e" % (family, off))
        trainer.accelerator.state._reset_state(reset_partial_state=False)
    return ", ".join(checked)


def bits(device, group):
    problem = Problem(device, 4096, 4, 2, 128, torch.bfloat16)
    first = problem.burst(group, "zigzag")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for i in range(6):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream if i % 2 else torch.cuda.current_stream()):
            again = problem.burst(group, "zigzag")
        torch.cuda.current_stream().wait_stream(stream)
        for a, b in zip(first, again):
            assert torch.equal(a, b), i
    return "the same on two streams, six times"


def carriers(device, group):
    """A group that was connected with BURST_IPC=1, whose short messages CUDA IPC carries, gets the same bits."""
    os.environ["BURST_IPC"] = "1"
    other = dist.new_group()
    burst.connect(other, device)
    del os.environ["BURST_IPC"]
    for seqlen, heads in ((301, 4), (4096, 4), (8192, 32)):  # the last one's gradients are longer than mail takes
        for mask in MASKS:
            problem = Problem(device, seqlen, heads, heads, 128, torch.bfloat16, **mask)
            for arguments in (dict(), dict(strategy="ring"), dict(strategy="ulysses")):
                for a, b in zip(problem.burst(group, "zigzag", **arguments),
                                problem.burst(other, "zigzag", **arguments)):
                    assert torch.equal(a, b), (seqlen, mask, arguments)
    burst.disconnect(other)
    return "the same by IPC and by NCCL"


def fp8(device, group):
    """On Hopper the forward in 8 bits differs from the forward in 16 bits by about 5 %."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "not on this GPU"
    problem = Problem(device, 3000, 8, 2, 128, torch.bfloat16)
    errors = [error(a, b) for a, b in zip(problem.burst(group, "zigzag", fp8=True),
                                          problem.burst(group, "zigzag"))]
    assert 0.01 < errors[0] < 0.08, errors
    assert all(0 < off < 0.2 for off in errors[2:]), errors
    return "out and gradients differ by " + ", ".join("%.3f" % off for off in errors)


def compiled(device, group):
    problem = Problem(device, 512, 4, 2, 128, torch.bfloat16)
    local = [burst.shard(x, 1, group).requires_grad_() for x in problem.inputs]

    def function(q, k, v):
        return burst.attention(2 * q, k, v, group=group).float().sin().sum()

    want = torch.autograd.grad(function(*local), local)
    have = torch.autograd.grad(torch.compile(function, fullgraph=True, backend="aot_eager")(*local), local)
    for a, b in zip(have, want):
        assert torch.equal(a, b)
    return "the bits of eager"


def one_nccl(device, group):
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "nccl" in line.rsplit("/", 1)[-1]}
    assert len(libraries) <= 1, libraries
    return ", ".join(os.path.basename(library) for library in libraries) or "none"


def memory(device, group):
    """Measures the memory of forward and backward beyond inputs, outputs and the ring's buffers, in MiB."""
    seqlen, heads = 16384, 16
    x = torch.randn(1, seqlen // 2, heads, 128, device=device, dtype=torch.bfloat16)
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    dout = torch.randn_like(x)
    burst.attention(q, k, v, group=group).backward(dout)
    q.grad = k.grad = v.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = burst.attention(q, k, v, group=group)
    forward = torch.cuda.max_memory_allocated() - before
    out.backward(dout)
    peak = torch.cuda.max_memory_allocated() - before
    one = x.numel() * 2
    return "a tensor is %d MiB; forward takes %.2f of it, both %.2f" % (one >> 20, forward / one, peak / one)


def refused_capture(device, group):
    """A refused capture leaves torch's generators and the group as they were."""
    x = torch.randn(1, 256, 4, 64, device=device, dtype=torch.bfloat16)
    for own in (group, None):
        want = burst.attention(x, x, x, group=own)
        graph = torch.cuda.CUDAGraph()
        refused = ""
        with torch.cuda.graph(graph):
            y = x + 1
            try:
                burst.attention(y, y, y, group=own, dropout_p=0.5)
            except burst.BurstError as error:
                refused = str(error)
        assert "cannot be captured in a CUDA graph" in refused, refused
        torch.randn(3, device=device)
        graph.replay()
        assert torch.equal(y, x + 1)
        assert torch.equal(burst.attention(x, x, x, group=own), want)
    reduced = torch.compile(lambda x: burst.attention(2 * x, x, x, group=group) + 1, mode="reduce-overhead")
    want = burst.attention(2 * x, x, x, group=group) + 1
    for _ in range(3):
        torch.testing.assert_close(reduced(x), want)
    torch.randn(3, device=device)
    return "refused by name; generators and calls go on; reduce-overhead equals eager"


def out_of_memory(device, group):
    """A call of one rank without memory is an error, and the next call works."""
    if dist.get_rank() == 0:
        x = torch.randn(1, 4096, 32, 128, device=device, dtype=torch.bfloat16)
        want = burst.attention(x, x, x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        filling = []
        for size in (1 << 30, 1 << 26, 1 << 22):
            while True:
                try:
                    filling.append(torch.empty(size, dtype=torch.uint8, device=device))
                except torch.cuda.OutOfMemoryError:
                    break
        try:
            burst.attention(x, x, x)
        except (burst.OutOfMemoryError, torch.cuda.OutOfMemoryError) as error:
            said = type(error).__name__
        else:
            raise AssertionError("there was memory")
        del filling
        assert torch.equal(burst.attention(x, x, x), want)
        torch.cuda.empty_cache()  # PyTorch would keep the memory that other libraries' kernels need
        torch.randn(3, device=device)
    dist.barrier()
    return said if dist.get_rank() == 0 else ""


def changing_scales(device, group):
    """A new softmax_scale in every step does not keep memory."""
    x = torch.randn(1, 128, 4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    used = []
    for step in range(200):
        burst.attention(x, x, x, group=group, softmax_scale=0.1 + step / 1000).float().sum().backward()
        used.append(torch.cuda.mem_get_info(device)[0])
    assert used[80] - used[-1] < 64 << 20, (used[80], used[-1])
    return "%d MiB after 200 steps" % ((used[0] - used[-1]) >> 20)


def lost(device, group):
    q, k, v = (torch.randn(1, 4096, 8, 128, device=device, dtype=torch.bfloat16) for _ in range(3))
    burst.attention(q, k, v, group=group)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for _ in range(100000):
            burst.attention(q, k, v, group=group)
    except burst.RankLostError as raised:
        print("lost: after %.1f s: %s" % (time.monotonic() - begin, raised), flush=True)
    torch.cuda.synchronize()
    burst.attention(q, k, v)  # a call of one rank works
    torch.cuda.synchronize()
    print("lost: alone it works, %.1f s" % (time.monotonic() - begin), flush=True)
    os._exit(0)


def start():
    """Returns (device, group) of this process of torchrun."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device, dist.group.WORLD


def run(checks, *arguments):
    """Calls each check, prints what it returns, and exits: with 1 if one of them raised an exception."""
    failed = False
    for check in checks:
        begin = time.monotonic()
        try:
            said, raised = check(*arguments), False
        except Exception:
            said, raised = traceback.format_exc(), True
        if dist.get_rank() == 0 or raised:
            print("%s: %s (%.1f s)" % (check.__name__, said, time.monotonic() - begin), flush=True)
        failed = failed or raised
    burst.disconnect()
    dist.destroy_process_group()
    sys.exit(failed)


def main():
    device, group = start()
    burst.connect(group, device, timeout=60)
    if "--lose" in sys.argv:
        lost(device, group)
    run((parity, changed_scores, more_keys, bits, carriers, fp8, compiled, one_nccl, memory, refused_capture,
         changing_scales, out_of_memory, trainer_with_fsdp2), device, group)


if __name__ == "__main__":
    main()
