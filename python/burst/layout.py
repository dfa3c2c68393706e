"""Which tokens of a sequence are on which rank: shard, unshard, positions."""

import torch

from . import _library
from ._call import LAYOUTS
from ._ranks import _process_group


def _rank_and_size(group):
    if group is None:
        return 0, 1
    group = _process_group(group)
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _check_layout(layout):
    if layout not in LAYOUTS:
        raise ValueError("layout: there is no %r, only %s" % (layout, ", ".join(map(repr, LAYOUTS))))


def positions(seqlen, group=None, layout="zigzag", device=None, rank=None):
    """The positions, in a sequence of `seqlen` tokens, of this rank's (or `rank`'s) tokens: an int64
    tensor that increases. They are what position embeddings take."""
    _check_layout(layout)
    own, size = _rank_and_size(group)
    values, length = _library.positions(layout, seqlen, own if rank is None else rank, size)
    return torch.tensor(values[:length], dtype=torch.int64, device=device)


def shard(x, dim=1, group=None, layout="zigzag"):
    """This rank's part of x, a tensor of the whole sequence, along `dim`. Tokens, labels and position
    ids are all cut in the same way. Differentiable."""
    if group is None:
        return x
    return x.index_select(dim, positions(x.shape[dim], group, layout, x.device))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group, layout):
        dist = torch.distributed
        size = dist.get_world_size(group)
        lengths = [None] * size
        dist.all_gather_object(lengths, x.shape[dim], group=group)
        seqlen, longest = sum(lengths), max(lengths)
        ctx.dim, ctx.group, ctx.layout, ctx.seqlen = dim, group, layout, seqlen
        moved = x.movedim(dim, 0)
        padded = moved.new_zeros((longest,) + tuple(moved.shape[1:]))
        padded[:moved.shape[0]] = moved
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        whole = moved.new_empty((seqlen,) + tuple(moved.shape[1:]))
        for rank, part in enumerate(parts):
            where = positions(seqlen, group, layout, x.device, rank)
            if len(where) != lengths[rank]:
                raise ValueError("x has %d tokens on rank %d; the layout %s gives it %d of %d" %
                                 (lengths[rank], rank, layout, len(where), seqlen))
            whole[where] = part[:lengths[rank]]
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        where = positions(ctx.seqlen, ctx.group, ctx.layout, gradient.device)
        return total.index_select(ctx.dim, where), None, None, None


def unshard(x, dim=1, group=None, layout="zigzag"):
    """The whole tensor on every rank, from every rank's part; the reverse of shard. Collective, over
    the group itself. Differentiable: the gradients of all ranks are added up."""
    _check_layout(layout)
    if group is None:
        return x
    return _Unshard.apply(x, dim % x.dim(), _process_group(group), layout)
