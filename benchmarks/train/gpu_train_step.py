#!/usr/bin/env python3
"""Whole training steps on one GPU: Burst beside PyTorch, the same shapes, the same run.

    gpu_train_step.py BENCHMARK [FILE.json] [MODEL...]     BENCHMARK: the binary train_step_benchmark
                                                           MODEL: d12, llama_1b

The PyTorch side is tuned as far as we know how: blocks through torch.compile, cuDNN attention, bf16
parameters with fp32 masters, AdamW compiled over flat buffers, and the LM head with its loss in
chunks whose gradients are made in the forward. Steps alternate with nothing; each side is warmed up,
then timed as a whole.
"""

import datetime
import json
import math
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

MODELS = {
    # layers, width, heads, kv_heads, ffn, vocab, batch, seqlen, family
    # The vocabulary of GPT-2 padded from 50,257: PyTorch's products are several times slower without.
    "d12": dict(layers=12, width=768, heads=12, kv_heads=12, ffn=3072, vocab=50304, batch=64,
                seqlen=1024, family="gpt2"),
    "llama_1b": dict(layers=16, width=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000, batch=1,
                     seqlen=16384, family="llama"),
}
STEPS = 20


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of x W^T; gradients are made chunk by chunk while the logits are there."""

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
    def backward(ctx, grad):
        dx, dweight = ctx.saved_tensors
        return dx * grad, dweight * grad, None, None


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

    def forward(self, ids, targets, cos, sin):
        x = self.tokens(ids)
        gpt2 = self.m["family"] == "gpt2"
        if gpt2:
            x = x + self.positions.weight[None]
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.norm(x)
        weight = self.tokens.weight if gpt2 else self.head
        return HeadLoss.apply(x.flatten(0, 1), weight, targets.flatten(), 8192)


@torch.compile(dynamic=False)
def adamw(master, m, v, grad, scale, lr, beta1, beta2, correct1, correct2):
    g = grad.float() * scale
    m.lerp_(g, 1 - beta1)
    v.lerp_(g * g, 1 - beta2)
    master.mul_(1 - lr * 0.1).sub_(lr * (m / correct1) / ((v / correct2).sqrt() + 1e-8))
    return master.to(torch.bfloat16)


def pytorch(name):
    """tokens/s and GiB of one training step."""
    m = MODELS[name]
    torch.manual_seed(0)
    model = Model(m).cuda().to(torch.bfloat16)
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    grads = torch.zeros_like(flat)
    offset = 0
    for p in parameters:
        p.data = flat[offset:offset + p.numel()].view(p.shape)
        p.grad = grads[offset:offset + p.numel()].view(p.shape)
        offset += p.numel()
    master, moment, square = flat.float(), torch.zeros_like(flat, dtype=torch.float32), \
        torch.zeros_like(flat, dtype=torch.float32)
    for block in model.blocks:
        block.compile(dynamic=False)

    t, head_dim = m["seqlen"], m["width"] // m["heads"]
    angle = torch.outer(torch.arange(t, device="cuda").float(),
                        10000.0 ** (-torch.arange(0, head_dim, 2, device="cuda") / head_dim))
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    ids = torch.randint(m["vocab"], (m["batch"], t + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()

    def step(number):
        grads.zero_()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            model(ids[:, :-1], ids[:, 1:].contiguous(), cos, sin).backward()
        norm = torch.linalg.vector_norm(grads.float())
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        lr = torch.tensor(1e-4)
        flat.copy_(adamw(master, moment, square, grads, scale, lr, 0.9, 0.95,
                         torch.tensor(1 - 0.9 ** number), torch.tensor(1 - 0.95 ** number)))

    for number in range(1, 6):
        step(number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(6, 6 + STEPS):
        step(number)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / STEPS
    return m["batch"] * t / seconds, torch.cuda.max_memory_allocated() / 2**30


def burst(binary, name):
    """The counters of train_step_benchmark."""
    command = [binary, f"--benchmark_filter=cuda_{name}/", "--benchmark_format=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result = json.loads(output[output.index("{"):])["benchmarks"][0]
    if result.get("error_occurred"):
        raise SystemExit(f"{name}: {result['error_message']}")
    return result["tokens/s"], result["GiB"], result


def main():
    binary, arguments = sys.argv[1], sys.argv[2:]
    path = next((a for a in arguments if a.endswith(".json")), None)
    names = [a for a in arguments if a in MODELS] or list(MODELS)
    rows = []
    for name in names:
        ours, our_gib, counters = burst(binary, name)
        try:
            theirs, their_gib = pytorch(name)
        except Exception as error:  # the peer's trouble is not ours: report what there is
            print(f"{name}: PyTorch failed: {error}", file=sys.stderr)
            theirs, their_gib = math.nan, math.nan
        torch.cuda.empty_cache()
        rows.append(dict(model=name, tokens_per_second=ours, pytorch_tokens_per_second=theirs,
                         ratio=ours / theirs, gib=our_gib, pytorch_gib=their_gib,
                         mfu=counters["vs_peak"]))
    print(f"{'model':10} {'Burst tok/s':>12} {'PyTorch':>12} {'ratio':>6} {'GiB':>6} {'PyTorch':>8}")
    for r in rows:
        print(f"{r['model']:10} {r['tokens_per_second']:12,.0f} "
              f"{r['pytorch_tokens_per_second']:12,.0f} {r['ratio']:6.3f} {r['gib']:6.1f} "
              f"{r['pytorch_gib']:8.1f}")
    if path:
        driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                capture_output=True, text=True).stdout.split("\n")[0]
        with open(path, "w") as file:
            json.dump(dict(date=str(datetime.date.today()), gpu=torch.cuda.get_device_name(),
                           driver=driver, torch=torch.__version__, rows=rows), file, indent=1)


if __name__ == "__main__":
    main()
