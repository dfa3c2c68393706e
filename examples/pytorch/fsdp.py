"""Trains a small Transformer with every sequence spread over the ranks, which also divide the parameters (FSDP2):

  torchrun --nproc_per_node=4 examples/pytorch/fsdp.py      # GPUs if there are enough, else CPUs

PyTorch has this FSDP since its version 2.6."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import burst

SEQLEN, HEADS, HEAD_DIM, VOCABULARY, LAYERS, STEPS = 256, 4, 16, 64, 2, 10


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, group):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + self.out(burst.attention(q, k, v, causal=True, group=group).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.positions = nn.Embedding(SEQLEN, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HEADS * HEAD_DIM, VOCABULARY)

    def forward(self, tokens, positions, group):
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, group)
        return self.head(x)


def main():
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("LOCAL_RANK: must be set; start this program with torchrun, as its first lines show")
    local_rank, ranks_here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks_here
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    group = dist.group.WORLD

    torch.manual_seed(0)  # every rank makes the same parameters and the same batches
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    positions = burst.positions(SEQLEN, group, device=device)
    text = (torch.arange(STEPS * SEQLEN + 1) ** 2 % 61).to(device)
    for step in range(STEPS):
        sequence = text[None, step * SEQLEN:(step + 1) * SEQLEN + 1]
        tokens, labels = (burst.shard(x, dim=1, group=group) for x in (sequence[:, :-1], sequence[:, 1:]))
        logits = model(tokens, positions, group)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / SEQLEN
        (loss * dist.get_world_size()).backward()  # losses of the ranks add up; FSDP takes their mean
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print("step %d/%d  loss %.5f" % (step + 1, STEPS, total), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
