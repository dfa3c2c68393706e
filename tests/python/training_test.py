"""Tests the losses and gradients of docs/pytorch.md: by hand, under DDP, and under FSDP2 where torch has it."""

import copy
import unittest

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import burst
from harness import main, run_ranks

SEQLEN, WORDS = 22, 11
TOLERANCE = 1e-12  # gradients are below 1; their sums have a few hundred products in double


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 48).double()
        self.sinks = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.head = torch.nn.Linear(16, WORDS).double()

    def forward(self, x, group):
        q, k, v = self.inner(x).view(1, -1, 3, 2, 8).unbind(2)
        return self.head(burst.attention(q, k, v, group=group, sinks=self.sinks).flatten(2))


def batch_of(replica):
    generator = torch.Generator().manual_seed(7 + replica)
    x = torch.randn(1, SEQLEN, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(WORDS, (1, SEQLEN), generator=generator)
    labels[0, :5 * replica] = -100
    return x, labels


def loss_of(model, x, labels, group):
    """Returns the docs' loss: the sum over this rank's tokens, divided by the number of labels on all ranks."""
    count = (labels != -100).sum()
    x, labels = (burst.shard(part, 1, group) for part in (x, labels))
    return cross_entropy(model(x, group).flatten(0, 1), labels.flatten(), reduction="sum") / count


def whole_gradients(model, replicas):
    """Returns the gradients of the mean over replicas of the mean loss over tokens, on one rank."""
    model = copy.deepcopy(model)
    for replica in range(replicas):
        x, labels = batch_of(replica)
        (cross_entropy(model(x, None).flatten(0, 1), labels.flatten()) / replicas).backward()
    return [parameter.grad for parameter in model.parameters()]


def compare(have, want):
    for a, b in zip(have, want):
        a = a.full_tensor() if hasattr(a, "full_tensor") else a
        torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=0)


def by_hand(rank, group):
    torch.manual_seed(0)
    model = Model()
    want = whole_gradients(model, 1)
    loss_of(model, *batch_of(0), group).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
    compare([parameter.grad for parameter in model.parameters()], want)


def under(wrap):
    """Spreads sequences over all ranks, then over pairs, whose replicas have their own batches."""
    def body(rank, group):
        pairs = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(dist.get_world_size() // 2)]
        for own, replica, replicas in ((group, 0, 1), (pairs[rank // 2], rank // 2, len(pairs))):
            torch.manual_seed(0)
            model = Model()
            want = whole_gradients(model, replicas)
            wrapped = wrap(model)
            (loss_of(wrapped, *batch_of(replica), own) * dist.get_world_size(own)).backward()
            compare([parameter.grad for parameter in wrapped.parameters()], want)
    return body


def with_fsdp(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def has_fsdp():
    if not hasattr(torch.library, "custom_op"):  # FSDP2 needs torch 2.4; Debian's fails with Python 3.11
        return False
    from torch.distributed import fsdp
    return hasattr(fsdp, "fully_shard")


class TrainingTest(unittest.TestCase):
    def test_by_hand(self):
        run_ranks(3, by_hand)

    def test_under_ddp(self):
        run_ranks(4, under(torch.nn.parallel.DistributedDataParallel))

    @unittest.skipUnless(has_fsdp(), "this torch has no fully_shard (FSDP2)")
    def test_under_fsdp(self):
        run_ranks(4, under(with_fsdp))


if __name__ == "__main__":
    main()
