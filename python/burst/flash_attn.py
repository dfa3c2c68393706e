"""The functions of flash-attn, with its names and arguments, on one device:

    from burst.flash_attn import flash_attn_func, flash_attn_varlen_func

q (Tensor): [batch, queries, heads, head_dim]; _varlen_: [queries of all documents, heads, head_dim].
k, v (Tensor): like q with kv_heads heads, which divide heads, and any number of keys.
kv, qkv (Tensor): k and v, or all three, stacked in a new dimension before the heads.
cu_seqlens_q, cu_seqlens_k (Tensor or list of int): [documents + 1]: where documents begin and end among queries and
    keys. Each call waits for a tensor on a GPU, but not for a list. The max_seqlen_ arguments are taken and change
    nothing.
causal, window_size: counted from the last query and the last key of a document. window_size is (left, right),
    -1 for no limit.
return_attn_probs (bool): return (out, lse, None) instead of out.

For the other arguments and the errors, see burst.attention. block_table is not served.
"""

from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from ._attention import _attend
from ._ranks import is_compiling
from ._types import Integers, Numbers
from .ring_flash_attn import _window

_Result = Union[Tensor, Tuple[Tensor, Tensor, None]]


def _call(q, k, v, bounds, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
          return_attn_probs):
    """Returns a function's result. bounds: (cu_seqlens_q, cu_seqlens_k), or a pair of None."""
    causal, window = _window(window_size, causal)
    cross = not _are_equal(*bounds) if bounds[0] is not None else q.shape[1] != k.shape[1]
    lists = (None, bounds[0], None, None, alibi_slopes, bounds[1] if cross else None)
    out, lse = _attend(q, k, v, None, None, True, None,
                       (causal, softmax_scale, window, "contiguous", "burst", None, deterministic, "auto", 0, 0, None,
                        False, softcap, dropout_p, False, cross, None, 0), lists)
    return (out, lse, None) if return_attn_probs else out


def _are_equal(of_queries, of_keys):
    """Returns whether the documents of queries and keys are the same. In a graph this is known of one tensor only."""
    if of_queries is of_keys:
        return True
    return not is_compiling() and torch.equal(torch.as_tensor(of_queries), torch.as_tensor(of_keys))


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                    causal: bool = False, window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: Optional[Numbers] = None, deterministic: bool = False,
                    return_attn_probs: bool = False) -> _Result:
    """Computes attention of queries to as many keys, to more or to fewer; see the module.

    Raises as burst.attention does.
    """
    return _call(q, k, v, (None, None), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                 deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                             causal: bool = False, window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: Optional[Numbers] = None, deterministic: bool = False,
                             return_attn_probs: bool = False) -> _Result:
    """Computes flash_attn_func of kv [batch, keys, 2, kv_heads, head_dim].

    Raises as burst.attention does.
    """
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_qkvpacked_func(qkv: Tensor, dropout_p: float = 0.0, softmax_scale: Optional[float] = None,
                              causal: bool = False, window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: Optional[Numbers] = None, deterministic: bool = False,
                              return_attn_probs: bool = False) -> _Result:
    """Computes flash_attn_func of qkv [batch, tokens, 3, heads, head_dim].

    Raises as burst.attention does.
    """
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)


def flash_attn_varlen_func(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers,
                           max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                           softmax_scale: Optional[float] = None, causal: bool = False,
                           window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                           alibi_slopes: Optional[Numbers] = None, deterministic: bool = False,
                           return_attn_probs: bool = False, block_table: None = None) -> _Result:
    """Computes attention of packed documents, whose queries and keys may differ in number; see the module.

    Raises as burst.attention does.
    """
    if block_table is not None:
        raise ValueError("block_table: must be None; got %s; gather the keys of the pages first" % type(block_table))
    return _call(q, k, v, (cu_seqlens_q, cu_seqlens_k), dropout_p, softmax_scale, causal, window_size, softcap,
                 alibi_slopes, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Integers, cu_seqlens_k: Integers,
                                    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
                                    softmax_scale: Optional[float] = None, causal: bool = False,
                                    window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                    alibi_slopes: Optional[Numbers] = None, deterministic: bool = False,
                                    return_attn_probs: bool = False) -> _Result:
    """Computes flash_attn_varlen_func of kv [keys, 2, kv_heads, head_dim].

    Raises as burst.attention does.
    """
    return flash_attn_varlen_func(q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Integers, max_seqlen: int, dropout_p: float = 0.0,
                                     softmax_scale: Optional[float] = None, causal: bool = False,
                                     window_size: Tuple[int, int] = (-1, -1), softcap: float = 0.0,
                                     alibi_slopes: Optional[Numbers] = None, deterministic: bool = False,
                                     return_attn_probs: bool = False) -> _Result:
    """Computes flash_attn_varlen_func of qkv [tokens, 3, heads, head_dim].

    Raises as burst.attention does.
    """
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                                  return_attn_probs)
