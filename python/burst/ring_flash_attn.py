"""The functions of ring-flash-attention, with its names and arguments:

    from burst.ring_flash_attn import zigzag_ring_flash_attn_func

The ring_ functions take contiguous parts of a sequence, zigzag_ring_ and stripe_ those of their layouts. The
_varlen_ functions take every packed document cut in that way.

q, k, v (Tensor): [batch, tokens of this rank, heads, head_dim]; _varlen_: [tokens, heads, head_dim].
kv, qkv (Tensor): k and v, or all three, stacked in a new dimension before the heads.
cu_seqlens (Tensor): [documents + 1]: where the parts of documents on this rank begin and end. max_seqlen is
    taken and changes nothing.
window_size (pair of int): flash_attn's (left, right), -1 for no limit.
group (ProcessGroup or DeviceMesh): None: all ranks.
return_attn_probs (bool): return (out, lse, None) instead of out.

For the other arguments and the errors, see burst.attention. Use burst.attention with documents instead of
llama3_flash_attn_varlen_func, and burst.register instead of the adapters.
"""

from typing import Callable, Optional, Tuple, Union

import torch
from torch import Tensor

from ._arguments import Refusal
from ._attention import _attend, attention
from ._types import Group, Numbers
from .burst_attn import _world

_Result = Union[Tensor, Tuple[Tensor, Tensor, None]]
_Functions = Tuple[Callable[..., _Result], ...]


def _window(window_size, causal):
    """Returns flash_attn's window_size (left, right) as (causal, window)."""
    left, right = window_size
    if left < 0 and right < 0:
        return causal, 0
    if causal:
        return True, left + 1 if left >= 0 else 0
    if left < 0 and right == 0:
        return True, 0
    if left >= 0 and right == 0:
        return True, left + 1
    if left == right:
        return False, left + 1
    return causal, Refusal("window_size: (%s, %s) without causal must be equal on both sides, or end at "
                           "the token itself" % (left, right))


def _batch(layout, q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
           return_attn_probs, group):
    causal, window = _window(window_size, causal)
    out, lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, window=window,
                         group=_world(group), layout=layout, deterministic=deterministic,
                         return_lse=True, alibi_slopes=alibi_slopes, dropout_p=dropout_p)
    return (out, lse, None) if return_attn_probs else out


def _varlen(layout, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
            deterministic, return_attn_probs, group):
    group = _world(group)
    size = 1 if group is None else torch.distributed.get_world_size(group)
    causal, window = _window(window_size, causal)
    out, lse = _attend(q, k, v, None, None, True, group,
                       (causal, softmax_scale, window, layout, "burst", None, deterministic, "auto", 0, 0, None,
                        False, 0.0, dropout_p, False, False, None, size),
                       (None, cu_seqlens, None, None, alibi_slopes, None))
    return (out, lse, None) if return_attn_probs else out


def _batch_functions(name: str, layout: str) -> _Functions:
    def function(q: Tensor, k: Tensor, v: Tensor,
                 dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                 window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: Optional[Group] = None) -> _Result:
        return _batch(layout, q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                      deterministic, return_attn_probs, group)

    def kvpacked(q: Tensor, kv: Tensor,
                 dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                 window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: Optional[Group] = None) -> _Result:
        return _batch(layout, q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal,
                      window_size, alibi_slopes, deterministic, return_attn_probs, group)

    def qkvpacked(qkv: Tensor,
                  dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                  window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                  deterministic: bool = False, return_attn_probs: bool = False,
                  group: Optional[Group] = None) -> _Result:
        return _batch(layout, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale,
                      causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)

    return _named(name, layout, function, kvpacked, qkvpacked)


def _varlen_functions(name: str, layout: str) -> _Functions:
    def function(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                 dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                 window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: Optional[Group] = None) -> _Result:
        return _varlen(layout, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size,
                       alibi_slopes, deterministic, return_attn_probs, group)

    def kvpacked(q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                 dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                 window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: Optional[Group] = None) -> _Result:
        return _varlen(layout, q, kv[:, 0], kv[:, 1], cu_seqlens, dropout_p, softmax_scale, causal,
                       window_size, alibi_slopes, deterministic, return_attn_probs, group)

    def qkvpacked(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                  dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                  window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                  deterministic: bool = False, return_attn_probs: bool = False,
                  group: Optional[Group] = None) -> _Result:
        return _varlen(layout, qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, dropout_p, softmax_scale,
                       causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)

    return _named(name, layout, function, kvpacked, qkvpacked)


def _named(name, layout, *functions):
    for function, infix in zip(functions, ("", "kvpacked_", "qkvpacked_")):
        function.__name__ = function.__qualname__ = name + "_" + infix + "func"
        function.__doc__ = ("Computes attention over the layout %s, with ring-flash-attention's arguments; see the "
                            "module.\n\nRaises as burst.attention does." % layout)
    return functions


(ring_flash_attn_func, ring_flash_attn_kvpacked_func,
 ring_flash_attn_qkvpacked_func) = _batch_functions("ring_flash_attn", "contiguous")
(zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func,
 zigzag_ring_flash_attn_qkvpacked_func) = _batch_functions("zigzag_ring_flash_attn", "zigzag")
(stripe_flash_attn_func, stripe_flash_attn_kvpacked_func,
 stripe_flash_attn_qkvpacked_func) = _batch_functions("stripe_flash_attn", "striped")
(ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func,
 ring_flash_attn_varlen_qkvpacked_func) = _varlen_functions("ring_flash_attn_varlen", "contiguous")
(zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
 zigzag_ring_flash_attn_varlen_qkvpacked_func) = _varlen_functions("zigzag_ring_flash_attn_varlen",
                                                                   "zigzag")
