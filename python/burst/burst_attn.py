"""The functions of the published BurstAttention, with its names and arguments:

    from burst.burst_attn import OpBurstAttn, burst_attn_func

q, k, v (Tensor): [batch, tokens of this rank, heads, head_dim].
softmax_scale (float): default: 1 / sqrt(head_dim).
flash (str): with another than "cuda" and "triton", tensors are [batch, heads, tokens, head_dim].
optimize_bwd_comm (bool): it is taken and changes nothing: the backward never sends the output.
process_group (ProcessGroup or DeviceMesh): None: all ranks.
double_group (pair): the groups within and between nodes; (None, None) for a flat ring.
"""

from typing import Any, Optional, Sequence

import torch
from torch import Tensor

from ._attention import attention
from ._types import Group


def _world(group):
    if group is not None:
        return group
    dist = torch.distributed
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _ranks_per_node(double_group):
    within = double_group[0]
    if isinstance(within, tuple):
        within = within[0]
    return 0 if within is None else torch.distributed.get_world_size(within)


def _call(layout, q, k, v, softmax_scale, flash, causal, deterministic, process_group, double_group):
    heads_first = flash not in ("cuda", "triton")
    if heads_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, group=_world(process_group),
                    layout=layout, deterministic=deterministic,
                    ranks_per_node=_ranks_per_node(double_group))
    return out.transpose(1, 2) if heads_first else out


def burst_attn_func(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Optional[float] = None,
                    flash: Optional[str] = "cuda", causal: bool = False, optimize_bwd_comm: bool = False,
                    deterministic: bool = False, process_group: Optional[Group] = None,
                    double_group: Sequence[Any] = (None, None)) -> Tensor:
    """Computes attention over the zigzag layout; see the module for arguments and shapes.

    Returns out, like q. Raises as burst.attention does.
    """
    return _call("zigzag", q, k, v, softmax_scale, flash, causal, deterministic, process_group,
                 double_group)


def burst_attn_func_striped(q: Tensor, k: Tensor, v: Tensor, softmax_scale: Optional[float] = None,
                            flash: Optional[str] = "cuda", causal: bool = False, optimize_bwd_comm: bool = False,
                            deterministic: bool = False, process_group: Optional[Group] = None,
                            double_group: Sequence[Any] = (None, None)) -> Tensor:
    """Computes attention over the striped layout; see the module for arguments and shapes.

    Returns out, like q. Raises as burst.attention does.
    """
    return _call("striped", q, k, v, softmax_scale, flash, causal, deterministic, process_group,
                 double_group)


class OpBurstAttn:
    """OpBurstAttn.apply(...) is burst_attn_func(...)."""

    apply = staticmethod(burst_attn_func)


class OpBurstAttnStrip:
    """OpBurstAttnStrip.apply(...) is burst_attn_func_striped(...)."""

    apply = staticmethod(burst_attn_func_striped)
