"""The functions of ring-flash-attention, with its names and arguments:

    from burst.ring_flash_attn import zigzag_ring_flash_attn_func

The ring_ functions take contiguous parts of a sequence, zigzag_ring_ and stripe_ those of their layouts. The
_varlen_ functions take every packed document cut in that way.

q, k, v (Tensor): [batch, tokens of this rank, heads, head_dim]; _varlen_: [tokens, heads, head_dim].
kv, qkv (Tensor): k and v, or all three, stacked in a new dimension before the heads.
cu_seqlens (Tensor or list of int): [documents + 1]: where the parts of documents on this rank begin and end. Each
    call waits for a tensor on a GPU, but not for a list. max_seqlen is taken and changes nothing.
window_size (pair of int): flash_attn's (left, right), -1 for no limit.
group (ProcessGroup or DeviceMesh): None: all ranks.
return_attn_probs (bool): return (out, lse, None) instead of out.

llama3_flash_attn_varlen_func takes contiguous parts of a whole packed sequence, of equal lengths, and what
llama3_flash_attn_prepare_cu_seqlens returns. substitute_hf_flash_attn and update_ring_flash_attn_params do so for
models of transformers.

For the other arguments and the errors, see burst.attention.
"""

import json
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from . import _ranks
from ._arguments import Refusal
from ._attention import _attend, attention
from ._types import Group, Integers, Numbers
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
    def function(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Integers, max_seqlen: int,
                 dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                 window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: Optional[Group] = None) -> _Result:
        return _varlen(layout, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size,
                       alibi_slopes, deterministic, return_attn_probs, group)

    def kvpacked(q: Tensor, kv: Tensor, cu_seqlens: Integers, max_seqlen: int,
                 dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                 window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                 deterministic: bool = False, return_attn_probs: bool = False,
                 group: Optional[Group] = None) -> _Result:
        return _varlen(layout, q, kv[:, 0], kv[:, 1], cu_seqlens, dropout_p, softmax_scale, causal,
                       window_size, alibi_slopes, deterministic, return_attn_probs, group)

    def qkvpacked(qkv: Tensor, cu_seqlens: Integers, max_seqlen: int,
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


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens: Integers, causal: bool, rank: int,
                                         world_size: int) -> Tuple[Tensor, Tensor, int, int, slice]:
    """Returns the bounds of this rank's queries and of the keys that they see, for llama3_flash_attn_varlen_func.

    Args:
        cu_seqlens (Tensor): [documents + 1], of the whole sequence, whose length world_size divides.
        causal (bool): as for llama3_flash_attn_varlen_func.
        rank, world_size (int): this rank and the number of ranks.

    Returns:
        tuple: cu_seqlens_q, cu_seqlens_k (int32, on the device of cu_seqlens), max_seqlen_q, max_seqlen_k, and
            local_k_slice, the keys' place in the whole sequence.

    Raises ValueError if world_size does not divide the length.
    """
    whole = torch.as_tensor(cu_seqlens)
    bounds = whole.tolist()
    if bounds[-1] % world_size:
        raise ValueError("cu_seqlens: must end with a multiple of the %d ranks; got %d" % (world_size, bounds[-1]))
    length = bounds[-1] // world_size
    begin, end = rank * length, (rank + 1) * length
    own = [(start, stop) for start, stop in zip(bounds, bounds[1:]) if begin < stop and start < end and start < stop]
    first, last = own[0][0], end if causal else own[-1][1]
    both = ([0] + [min(stop, end) - begin for _, stop in own], [0] + [min(stop, last) - first for _, stop in own])
    tensors = [torch.tensor(of, dtype=torch.int32, device=whole.device) for of in both]
    longest = [max(b - a for a, b in zip(of, of[1:])) for of in both]
    return tensors[0], tensors[1], longest[0], longest[1], slice(first, last)


def _starts_of_all(cu_seqlens_q, local_k_slice, tokens, device, group):
    """Returns the starts of all documents. Each rank knows those among its own tokens. Collective."""
    begin = 0 if group is None else torch.distributed.get_rank(group) * tokens
    own = [begin + bound for bound in torch.as_tensor(cu_seqlens_q).tolist()[1:-1]]
    if local_k_slice.start == begin:
        own.insert(0, begin)
    if _ranks.size_of(group) == 1:
        return own
    ranks = _ranks.ranks_of(_ranks.process_group(group), device)
    with ranks.device.lock:
        ranks.device.enter()
        text = json.dumps(own).encode()
        lengths = [int.from_bytes(length, "little") for length in ranks.exchange(len(text).to_bytes(8, "little"))]
        texts = ranks.exchange(text.ljust(max(lengths), b" "))
    return sorted({start for other in texts for start in json.loads(other)})


def llama3_flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers,
                                  max_seqlen_q: int, max_seqlen_k: int, heads_k_stride: int, local_k_slice: slice,
                                  dropout_p: float = 0.0, softmax_scale: Optional[float] = None, causal: bool = False,
                                  window_size: Tuple[int, int] = (-1, -1), alibi_slopes: Optional[Numbers] = None,
                                  deterministic: bool = False, return_attn_probs: bool = False,
                                  group: Optional[Group] = None) -> _Result:
    """Computes attention of packed documents over contiguous parts of the whole sequence; see the module.

    heads_k_stride is taken and changes nothing, because keys go around a ring. Raises as burst.attention does.
    """
    group = _world(group)
    starts = _starts_of_all(cu_seqlens_q, local_k_slice, q.shape[0], q.device, group)
    causal, window = _window(window_size, causal)
    out, lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, documents=starts,
                         group=group, layout="contiguous", deterministic=deterministic, return_lse=True,
                         alibi_slopes=alibi_slopes, dropout_p=dropout_p)
    return (out, lse, None) if return_attn_probs else out


_substituted: Dict[str, Any] = {}  # registered attentions, by names of implementations


def substitute_hf_flash_attn(process_group: Optional[Group], heads_k_stride: int = 1) -> None:
    """Makes transformers' flash_attention_2, and "burst", attend over contiguous parts of packed sequences.

    Call update_ring_flash_attn_params for each batch. heads_k_stride is taken and changes nothing.

    Raises ImportError without transformers 4.53 or newer.
    """
    from ._transformers import Served, check_version, put
    check_version("substitute_hf_flash_attn")
    for name in ("flash_attention_2", "burst"):
        _substituted[name] = Served(_world(process_group), "contiguous", {})
        put(name, _substituted[name])


def update_ring_flash_attn_params(cu_seqlens: Integers, process_group: Optional[Group] = None) -> None:
    """Says where the documents of the next batch begin, for models after substitute_hf_flash_attn.

    Args:
        cu_seqlens (Tensor): [documents + 1], of the whole sequence.
        process_group: taken for its name, because the group is the substituted one.

    Raises ValueError before substitute_hf_flash_attn.
    """
    if not _substituted:
        raise ValueError("update_ring_flash_attn_params: substitute_hf_flash_attn must come first; got no substitution")
    bounds = torch.as_tensor(cu_seqlens).tolist()
    for served in _substituted.values():
        served.set_cu_seqlens(bounds)
