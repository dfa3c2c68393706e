#!/usr/bin/env python3
"""Times whole training steps of Burst and of PyTorch on one GPU, with equal shapes, in turns.

    gpu_train_step.py BENCHMARK [FILE.json] [MODEL...]     BENCHMARK: the binary train_step_benchmark
                                                           MODEL: d12, llama_1b

The PyTorch side has blocks through torch.compile, cuDNN attention, bf16 parameters with fp32 masters, and
AdamW compiled over flat buffers. The LM head takes its loss in chunks whose gradients are made in the
forward. So only the norm and AdamW pass over the gradients.

Each side warms up and is timed ROUNDS times, in changing order. A figure is the median of the medians of
whole steps, taken between the ends of steps on the device. Burst is measured with --deterministic (the
default) and with --deterministic=false. PyTorch's cuDNN backward is not deterministic.
"""

import json
import math
import statistics
import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import turns, write

MODELS = {
    # layers, width, heads, kv_heads, ffn, vocab, batch, seqlen, family
    # GPT-2's vocabulary is padded from 50,257, because PyTorch's GEMMs are several times slower without it.
    "d12": dict(layers=12, width=768, heads=12, kv_heads=12, ffn=3072, vocab=50304, batch=64,
                seqlen=1024, family="gpt2"),
    "llama_1b": dict(layers=16, width=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000, batch=1,
                     seqlen=16384, family="llama"),
}
ROUNDS = 3
WARMUP_STEPS = 3
STEPS = 15


class HeadLoss(torch.autograd.Function):
    """Computes the mean cross-entropy of x W^T. Gradients are made chunk by chunk while the logits are there."""

    @staticmethod
    def forward(ctx, x, weight, targets, chunk):
        tokens = x.shape[0]
        dx = torch.empty_like(x)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=x.device)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for i in range(0, tokens, chunk):
            part = x[i:i + chunk]
            logits = part @ weight.t()
            part_loss, dlogits = softmax_loss(logits, targets[i:i + chunk], 1.0 / tokens)
            loss += part_loss
            torch.mm(dlogits, weight, out=dx[i:i + chunk])
            dweight += dlogits.t() @ part
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, grad):  # grad is 1, because backward() starts from the loss
        return (*ctx.saved_tensors, None, None)


@torch.compile(dynamic=False)
def softmax_loss(logits, targets, scale):
    logits = logits.float()
    lse = torch.logsumexp(logits, dim=1, keepdim=True)
    picked = logits.gather(1, targets[:, None])
    dlogits = torch.exp(logits - lse)
    columns = torch.arange(logits.shape[1], device=logits.device)
    dlogits = (dlogits - (columns[None] == targets[:, None]).float()) * scale
    return (lse - picked).sum() * scale, dlogits.to(torch.bfloat16)


def rope(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m, width, head_dim = m, m["width"], m["width"] // m["heads"]
        gpt2 = m["family"] == "gpt2"
        norm = (lambda: nn.LayerNorm(width)) if gpt2 else (lambda: nn.RMSNorm(width, eps=1e-5))
        self.norm1, self.norm2 = norm(), norm()
        self.qkv = nn.Linear(width, width + 2 * m["kv_heads"] * head_dim, bias=gpt2)
        self.out = nn.Linear(width, width, bias=gpt2)
        self.up = nn.Linear(width, m["ffn"] * (1 if gpt2 else 2), bias=gpt2)
        self.down = nn.Linear(m["ffn"], width, bias=gpt2)

    def forward(self, x, cos, sin):
        m = self.m
        b, t, width = x.shape
        head_dim = width // m["heads"]
        qkv = self.qkv(self.norm1(x)).view(b, t, m["heads"] + 2 * m["kv_heads"], head_dim)
        q, k, v = qkv.transpose(1, 2).split([m["heads"], m["kv_heads"], m["kv_heads"]], dim=1)
        if m["family"] == "llama":
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                           enable_gqa=m["heads"] != m["kv_heads"])
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        h = self.up(self.norm2(x))
        if m["family"] == "gpt2":
            h = F.gelu(h, approximate="tanh")
        else:
            gate, up = h.chunk(2, dim=-1)
            h = F.silu(gate) * up
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m = m
        gpt2 = m["family"] == "gpt2"
        self.tokens = nn.Embedding(m["vocab"], m["width"])
        if gpt2:
            self.positions = nn.Embedding(m["seqlen"], m["width"])
        else:
            self.head = nn.Parameter(torch.empty(m["vocab"], m["width"]))
        self.blocks = nn.ModuleList(Block(m) for _ in range(m["layers"]))
        self.norm = nn.LayerNorm(m["width"]) if gpt2 else nn.RMSNorm(m["width"], eps=1e-5)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def features(self, ids, cos, sin):
        """Returns what the head multiplies: the tokens' features [batch * tokens, width] and the weight."""
        x = self.tokens(ids)
        gpt2 = self.m["family"] == "gpt2"
        if gpt2:
            x = x + self.positions.weight[None]
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.norm(x).flatten(0, 1), self.tokens.weight if gpt2 else self.head

    def forward(self, ids, targets, cos, sin):
        return HeadLoss.apply(*self.features(ids, cos, sin), targets.flatten(), 8192)


@torch.compile(dynamic=False)
def adamw(master, m, v, grad, scale, lr, beta1, beta2, correct1, correct2):
    g = grad.float() * scale
    m.lerp_(g, 1 - beta1)
    v.lerp_(g * g, 1 - beta2)
    master.mul_(1 - lr * 0.1).sub_(lr * (m / correct1) / ((v / correct2).sqrt() + 1e-8))
    return master.to(torch.bfloat16)


class PyTorchStep:
    """Holds a model and its optimizer. step() takes one training step."""

    def __init__(self, name):
        m = self.m = MODELS[name]
        torch.manual_seed(0)
        self.model = Model(m).cuda().to(torch.bfloat16)
        parameters = list(self.model.parameters())
        self.flat = torch.cat([p.detach().flatten() for p in parameters])
        self.grads = torch.zeros_like(self.flat)
        offset = 0
        for p in parameters:
            p.data = self.flat[offset:offset + p.numel()].view(p.shape)
            p.grad = self.grads[offset:offset + p.numel()].view(p.shape)
            offset += p.numel()
        self.master = self.flat.float()
        self.moment, self.square = torch.zeros_like(self.master), torch.zeros_like(self.master)
        for block in self.model.blocks:
            block.compile(dynamic=False)
        t, head_dim = m["seqlen"], m["width"] // m["heads"]
        angle = torch.outer(torch.arange(t, device="cuda").float(),
                            10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim))
        self.cos, self.sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
        ids = torch.randint(m["vocab"], (m["batch"], t + 1), device="cuda")
        self.ids, self.targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        self.number = 0

    def step(self):
        self.number += 1
        self.grads.zero_()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            self.model(self.ids, self.targets, self.cos, self.sin).backward()
        norm = torch.linalg.vector_norm(self.grads, dtype=torch.float32)
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        correct = [torch.tensor(1 - beta ** self.number) for beta in (0.9, 0.95)]
        self.flat.copy_(adamw(self.master, self.moment, self.square, self.grads, scale,
                              torch.tensor(1e-4), 0.9, 0.95, *correct))

    def measure(self):
        """Returns the median milliseconds of whole steps."""
        for _ in range(WARMUP_STEPS):
            self.step()
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        ends[0].record()
        for end in ends[1:]:
            self.step()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in zip(ends, ends[1:]))


def burst(binary, name):
    """Returns the counters of train_step_benchmark, by default and with --deterministic=false."""
    command = [binary, f"--benchmark_filter=cuda_{name}(_nondeterministic)?/",
               "--benchmark_format=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = json.loads(output[output.index("{"):])["benchmarks"]
    for result in results:
        if result.get("error_occurred"):
            raise SystemExit(f"{result['name']}: {result['error_message']}")
    free = [r for r in results if "_nondeterministic" in r["name"]]
    default = [r for r in results if "_nondeterministic" not in r["name"]]
    return default[0], free[0]


def measure(binary, name):
    try:
        torch.cuda.reset_peak_memory_stats()
        peer = PyTorchStep(name)
        peer.measure()  # compiles
    except Exception as error:  # the peer failed: report the other figures
        print(f"{name}: PyTorch failed: {error}", file=sys.stderr)
        peer = None

    def ours():
        torch.cuda.empty_cache()
        return burst(binary, name)
    sides = {"burst": ours, "pytorch": peer.measure if peer is not None else lambda: math.nan}
    found = turns(sides, ROUNDS, lambda side: side(), warm=0, order=list.reverse)
    default, free = zip(*found["burst"])
    tokens = MODELS[name]["batch"] * MODELS[name]["seqlen"]
    rate = lambda runs: tokens / statistics.median(r["step_ms"] for r in runs) * 1e3
    pytorch = tokens / statistics.median(found["pytorch"]) * 1e3
    return dict(model=name, tokens_per_second=rate(default), nondeterministic=rate(free),
                pytorch=pytorch, ratio=rate(default) / pytorch,
                ratio_nondeterministic=rate(free) / pytorch, gib=default[0]["GiB"],
                pytorch_gib=torch.cuda.max_memory_allocated() / 2**30,
                mfu=statistics.median(r["vs_peak"] for r in default))


def main():
    binary, arguments = sys.argv[1], sys.argv[2:]
    path = next((a for a in arguments if a.endswith(".json")), None)
    rows = []
    for name in [a for a in arguments if a in MODELS] or list(MODELS):
        rows.append(measure(binary, name))
        torch.cuda.empty_cache()
    print(f"{'tokens/s':10} {'Burst':>10} {'(free)':>10} {'PyTorch':>10} {'ratio':>6} {'(free)':>6} "
          f"{'GiB':>6} {'PyTorch':>8}   free: --deterministic=false")
    for r in rows:
        print(f"{r['model']:10} {r['tokens_per_second']:10,.0f} {r['nondeterministic']:10,.0f} "
              f"{r['pytorch']:10,.0f} {r['ratio']:6.3f} {r['ratio_nondeterministic']:6.3f} "
              f"{r['gib']:6.1f} {r['pytorch_gib']:8.1f}")
    write(path, rows)


if __name__ == "__main__":
    main()
