"""Burst for PyTorch: attention over a sequence that is spread over the ranks of a group.

    import burst
    group = torch.distributed.group.WORLD
    tokens, labels = (burst.shard(x, dim=1, group=group) for x in (tokens, labels))
    out = burst.attention(q, k, v, causal=True, group=group)   # [batch, own tokens, heads, head_dim]
"""

from . import masks
from ._attention import attention, cross_attention, ulysses_attention
from ._context_parallel import ContextParallel, context_parallel
from ._library import BurstError, OutOfMemoryError, RankLostError
from ._ranks import connect, disconnect
from ._transformers import register
from .layout import positions, shard, unshard
from .scores import alibi_slopes

__version__ = "0.1.0"
__all__ = [
    "BurstError", "ContextParallel", "OutOfMemoryError", "RankLostError", "alibi_slopes", "attention", "connect",
    "context_parallel", "cross_attention", "disconnect", "masks", "positions", "register", "shard",
    "ulysses_attention", "unshard",
]
