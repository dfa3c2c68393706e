"""The functions of the published BurstAttention, with its names and arguments:

    from burst.burst_attn import OpBurstAttn, burst_attn_func

q, k, v: [batch, tokens of this rank, heads, head_dim]; with a `flash` other than "cuda" and "triton"
[batch, heads, tokens, head_dim]. Causal attention is over the zigzag layout, the striped functions
over the striped one. process_group None: all ranks. double_group: groups within and between nodes,
[None, None] for a flat ring. optimize_bwd_comm is taken and changes nothing: what the backward sends
never includes the output.
"""

import torch

from ._attention import attention


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


def burst_attn_func(q, k, v, softmax_scale=None, flash="cuda", causal=False, optimize_bwd_comm=False,
                    deterministic=False, process_group=None, double_group=(None, None)):
    return _call("zigzag", q, k, v, softmax_scale, flash, causal, deterministic, process_group,
                 double_group)


def burst_attn_func_striped(q, k, v, softmax_scale=None, flash="cuda", causal=False,
                            optimize_bwd_comm=False, deterministic=False, process_group=None,
                            double_group=(None, None)):
    return _call("striped", q, k, v, softmax_scale, flash, causal, deterministic, process_group,
                 double_group)


class OpBurstAttn:
    """OpBurstAttn.apply(...) is burst_attn_func(...)."""

    apply = staticmethod(burst_attn_func)


class OpBurstAttnStrip:
    """OpBurstAttnStrip.apply(...) is burst_attn_func_striped(...)."""

    apply = staticmethod(burst_attn_func_striped)
