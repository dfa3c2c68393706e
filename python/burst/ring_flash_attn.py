"""The functions of ring-flash-attention, with its names and arguments:

    from burst.ring_flash_attn import zigzag_ring_flash_attn_func

ring_ functions have contiguous parts, zigzag_ring_ and stripe_ theirs; the _varlen_ ones cut every
packed document in that way, and take cu_seqlens of this rank's parts. group None: all ranks.
return_attn_probs: (out, lse, None).

llama3_flash_attn_varlen_func and the adapters are not here; burst.attention with documents and
burst.register do what they are for.
"""

from ._attention import apply, attention
from ._call import list_of, make_call
from .burst_attn import _world
from .scores import scores_of

import torch


def _window(window_size, causal):
    """flash_attn's window_size (left, right) as (causal, window)."""
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
    raise ValueError("window_size: (%d, %d) without causal must be equal on both sides, or end at "
                     "the token itself" % (left, right))


def _batch(layout, q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
           return_attn_probs, group):
    causal, window = _window(window_size, causal)
    out, lse = attention(q, k, v, causal=causal, softmax_scale=softmax_scale, window=window,
                         group=_world(group), layout=layout, deterministic=deterministic,
                         return_lse=True, alibi_slopes=alibi_slopes, dropout_p=dropout_p)
    return (out, lse, None) if return_attn_probs else out


def _tokens(bounds, size, zigzag):
    """The positions of every rank's tokens, where every document is cut into as many equal parts."""
    ranks = []
    for rank in range(size):
        own = []
        for begin, end in zip(bounds, bounds[1:]):
            length = end - begin
            if zigzag:
                half = length // 2
                for chunk in (rank, 2 * size - 1 - rank):
                    own.extend(range(begin * size + chunk * half, begin * size + (chunk + 1) * half))
            else:
                own.extend(range(begin * size + rank * length, begin * size + (rank + 1) * length))
        ranks.append(tuple(own))
    return tuple(ranks)


_known_tokens = {}


def _varlen(zigzag, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
            deterministic, return_attn_probs, group):
    group = _world(group)
    bounds = tuple(int(bound) for bound in list_of(cu_seqlens))
    if zigzag and any((end - begin) % 2 for begin, end in zip(bounds, bounds[1:])):
        raise ValueError("cu_seqlens: zigzag parts have two chunks each, and a document has an odd "
                         "number of tokens here")
    size = 1 if group is None else torch.distributed.get_world_size(group)
    key = (bounds, size, zigzag)
    tokens = _known_tokens.get(key)
    if tokens is None:
        if len(_known_tokens) >= 64:
            _known_tokens.clear()
        tokens = _known_tokens[key] = _tokens(bounds, size, zigzag)
    causal, window = _window(window_size, causal)
    call = make_call(group, causal, softmax_scale, window, None, [bound * size for bound in bounds],
                     "zigzag" if zigzag else "contiguous", "burst", None, deterministic, "auto", 0, 0,
                     None, None, tokens, False, None, None, False, None,
                     scores_of(0, alibi_slopes, dropout_p))
    out, lse, _ = apply(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), call)
    out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse, None) if return_attn_probs else out


def _batch_functions(name, layout):
    def function(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                 alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):
        return _batch(layout, q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                      deterministic, return_attn_probs, group)

    def kvpacked(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                 alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):
        return _batch(layout, q, kv[:, :, 0], kv[:, :, 1], dropout_p, softmax_scale, causal,
                      window_size, alibi_slopes, deterministic, return_attn_probs, group)

    def qkvpacked(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                  alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):
        return _batch(layout, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], dropout_p, softmax_scale,
                      causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)

    return _named(name, function, kvpacked, qkvpacked)


def _varlen_functions(name, zigzag):
    def function(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                 window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                 group=None):
        return _varlen(zigzag, q, k, v, cu_seqlens, dropout_p, softmax_scale, causal, window_size,
                       alibi_slopes, deterministic, return_attn_probs, group)

    def kvpacked(q, kv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                 window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                 group=None):
        return _varlen(zigzag, q, kv[:, 0], kv[:, 1], cu_seqlens, dropout_p, softmax_scale, causal,
                       window_size, alibi_slopes, deterministic, return_attn_probs, group)

    def qkvpacked(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                  window_size=(-1, -1), alibi_slopes=None, deterministic=False, return_attn_probs=False,
                  group=None):
        return _varlen(zigzag, qkv[:, 0], qkv[:, 1], qkv[:, 2], cu_seqlens, dropout_p, softmax_scale,
                       causal, window_size, alibi_slopes, deterministic, return_attn_probs, group)

    return _named(name, function, kvpacked, qkvpacked)


def _named(name, *functions):
    for function, infix in zip(functions, ("", "kvpacked_", "qkvpacked_")):
        function.__name__ = function.__qualname__ = name + "_" + infix + "func"
    return functions


(ring_flash_attn_func, ring_flash_attn_kvpacked_func,
 ring_flash_attn_qkvpacked_func) = _batch_functions("ring_flash_attn", "contiguous")
(zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func,
 zigzag_ring_flash_attn_qkvpacked_func) = _batch_functions("zigzag_ring_flash_attn", "zigzag")
(stripe_flash_attn_func, stripe_flash_attn_kvpacked_func,
 stripe_flash_attn_qkvpacked_func) = _batch_functions("stripe_flash_attn", "striped")
(ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func,
 ring_flash_attn_varlen_qkvpacked_func) = _varlen_functions("ring_flash_attn_varlen", False)
(zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
 zigzag_ring_flash_attn_varlen_qkvpacked_func) = _varlen_functions("zigzag_ring_flash_attn_varlen", True)
