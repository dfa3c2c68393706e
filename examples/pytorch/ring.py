"""Computes attention over a sequence that is spread over ranks, forward and backward, and compares it with
attention on one rank:

  torchrun --nproc_per_node=4 examples/pytorch/ring.py      # GPUs if there are enough, else CPUs
"""

import os

import torch
import torch.distributed as dist

import burst

BATCH, SEQLEN, HEADS, KV_HEADS, HEAD_DIM = 1, 1024, 4, 2, 32


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

    # Here every rank makes the same whole sequence. Usually each rank loads it, or its own part.
    torch.manual_seed(0)
    q, k, v = (torch.randn(BATCH, SEQLEN, heads, HEAD_DIM, dtype=torch.float64).to(device)
               for heads in (HEADS, KV_HEADS, KV_HEADS))

    # This rank's tokens attend to the tokens of all ranks.
    own = [burst.shard(x, dim=1, group=group).requires_grad_() for x in (q, k, v)]
    out = burst.attention(*own, causal=True, group=group)
    out.square().sum().backward()

    # Without a group, one rank has the whole sequence.
    whole = [x.requires_grad_() for x in (q, k, v)]
    want = burst.attention(*whole, causal=True)
    want.square().sum().backward()
    error = (out - burst.shard(want, dim=1, group=group)).abs().max()
    gradient_error = max((a.grad - burst.shard(b.grad, dim=1, group=group)).abs().max()
                         for a, b in zip(own, whole))
    errors = torch.stack([error.detach(), gradient_error])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print("%s tokens over %d ranks: out is off by %.1e, gradients by %.1e" %
              (format(SEQLEN, ","), dist.get_world_size(), *errors.tolist()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
