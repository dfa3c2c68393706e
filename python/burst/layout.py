"""shard, unshard and positions: which tokens of a sequence are on which rank."""

from typing import Any, Optional, Union

import torch
from torch import Tensor

from . import _library
from ._arguments import LAYOUTS, read_count, rows_of_documents, shown
from ._ranks import process_group
from ._types import Group


def _rank_and_size(group):
    if group is None:
        return 0, 1
    group = process_group(group)
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _check_layout(layout):
    if layout not in LAYOUTS:
        raise ValueError("layout: must be one of %s; got %s" % (", ".join(LAYOUTS), shown(layout)))


def _check_dim(x, dim):
    if not -x.dim() <= dim < x.dim():
        raise IndexError("dim: must be within [%d, %d); got %d" % (-x.dim(), x.dim(), dim))


def positions(seqlen: int, group: Optional[Group] = None, layout: str = "zigzag",
              device: Union[torch.device, str, None] = None, rank: Optional[int] = None,
              **packed: Any) -> Tensor:
    """Returns the positions of a rank's tokens in a sequence, as position embeddings take them.

    Args:
        seqlen (int): tokens of the whole sequence.
        group (ProcessGroup or one-dimensional DeviceMesh): None: one rank, which has every token.
        layout (str): "zigzag", "contiguous", "striped" or "balanced", as for burst.attention.
        device (torch.device): the device of the result. Default: the CPU.
        rank (int): default: this process's rank in the group.
        packed: for "balanced", whose tokens depend on the attention: the attention's documents or
            cu_seqlens, causal, window and ulysses_size (with strategy="ulysses": the number of ranks).

    Returns:
        Tensor: [tokens of the rank], int64, increasing.

    Raises:
        ValueError: an argument is wrong, or this process is not in the group.
    """
    _check_layout(layout)
    seqlen = read_count("seqlen", seqlen)
    own, size = _rank_and_size(group)
    rank = own if rank is None else rank
    documents, options = _packed(layout, seqlen, **packed)
    if documents is None:
        values, length = _library.positions(layout, seqlen, rank, size)
    else:
        causal, window, group_size = options
        mask = _library.mask(causal, window, documents)
        values, length = _library.balanced_positions(mask, seqlen, rank, size, group_size or 1)
    return torch.tensor(values[:length], dtype=torch.int64, device=device or "cpu")


def _packed(layout, seqlen, documents=None, cu_seqlens=None, causal=True, window=0, ulysses_size=0):
    """Returns (rows of document starts, other options), or (None, None) if tokens do not depend on them."""
    if layout != "balanced" or (documents is None and cu_seqlens is None):
        return None, None
    documents, _ = rows_of_documents(documents, cu_seqlens, seqlen)
    return documents, (causal, window, ulysses_size)


def shard(x: Tensor, dim: int = 1, group: Optional[Group] = None, layout: str = "zigzag",
          **packed: Any) -> Tensor:
    """Returns this rank's part of a tensor of the whole sequence. Differentiable.

    Tokens, labels and position ids are all cut in the same way.

    Args:
        x (Tensor): any shape whose dimension `dim` is the sequence's tokens. Equal on all ranks.
        dim (int): the dimension to cut.
        group, layout, packed: see positions.

    Returns:
        Tensor: like x with the rank's tokens only; x itself where group is None.

    Raises:
        ValueError: see positions.
        IndexError: x has no such dimension.
    """
    if group is None:
        return x
    _check_dim(x, dim)
    return x.index_select(dim, positions(x.shape[dim], group, layout, x.device, **packed))


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group, layout, packed):
        dist = torch.distributed
        size = dist.get_world_size(group)
        lengths = [None] * size
        dist.all_gather_object(lengths, x.shape[dim], group=group)
        seqlen, longest = sum(lengths), max(lengths)
        ctx.dim, ctx.group, ctx.layout, ctx.seqlen, ctx.packed = dim, group, layout, seqlen, packed
        moved = x.movedim(dim, 0)
        padded = moved.new_zeros((longest,) + tuple(moved.shape[1:]))
        padded[:moved.shape[0]] = moved
        parts = [torch.empty_like(padded) for _ in range(size)]
        dist.all_gather(parts, padded, group=group)
        whole = moved.new_empty((seqlen,) + tuple(moved.shape[1:]))
        for rank, part in enumerate(parts):
            where = positions(seqlen, group, layout, x.device, rank, **packed)
            if len(where) != lengths[rank]:
                raise ValueError("x has %d tokens on rank %d; the layout %s gives it %d of %d" %
                                 (lengths[rank], rank, layout, len(where), seqlen))
            whole[where] = part[:lengths[rank]]
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        where = positions(ctx.seqlen, ctx.group, ctx.layout, gradient.device, **ctx.packed)
        return total.index_select(ctx.dim, where), None, None, None, None


def unshard(x: Tensor, dim: int = 1, group: Optional[Group] = None, layout: str = "zigzag",
            **packed: Any) -> Tensor:
    """Returns the whole tensor on every rank, from every rank's part: the reverse of shard.

    Collective over the group. Differentiable: the gradients of all ranks are added up.

    Args:
        x (Tensor): this rank's part, as shard returns it.
        dim (int): the dimension that was cut.
        group, layout, packed: see positions.

    Returns:
        Tensor: like x with the tokens of all ranks, in the sequence's order.

    Raises:
        ValueError: a rank's number of tokens is not what the layout gives it.
        IndexError: x has no such dimension.
    """
    _check_layout(layout)
    if group is None:
        return x
    _check_dim(x, dim)
    return _Unshard.apply(x, dim % x.dim(), process_group(group), layout, packed)
