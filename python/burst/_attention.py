"""attention() and its relatives: the calls of _call.py, with autograd and for torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Tuple, Union, overload

import torch
from torch import Tensor

from . import _ranks
from ._arguments import ALIGNED, OF_16_BITS, SCALARS, make_call, transform_error
from ._call import backward, device_of, forward, refuse
from ._types import CrossOptions, Documents, Group, Integers, Numbers, Options, Slices, Spans
from .scores import draw_seed, read_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MULTIPLES = dict.fromkeys(OF_16_BITS, ALIGNED)  # of head_dim in the kernels, by dtype
_op = None
if hasattr(torch.library, "custom_op"):
    from . import _op


class _OnlyOnce(torch.autograd.Function):
    """Passes gradients on, and refuses to differentiate them: kernels have no second derivatives."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("attention: must be differentiated once; got a second derivative, which kernels do not "
                           "have; use torch's scaled_dot_product_attention with SDPBackend.MATH")


def _refuse_twice(gradients, *given):
    """Returns the gradients as results that cannot be differentiated again, where a graph of them is made.

    given: what the gradients were computed from. Autograd reaches the refusal on its way to these tensors."""
    if not torch.is_grad_enabled():
        return gradients
    found = [x for x in gradients if x is not None]
    kept = iter(_OnlyOnce.apply(len(found), *found, *(x for x in given if x is not None)))
    return [x if x is None else next(kept) for x in gradients]


class AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, group, call, needs_grad, seed, drawn):
        out, lse, max_logit, _, seed, state = forward(q, k, v, group, call, needs_grad, sinks, seed, drawn)
        ctx.set_materialize_grads(False)
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        if needs_grad:
            ctx.save_for_backward(q, k, v, sinks, out, lse)
            ctx.state, ctx.seed = state, seed
        return out, lse, max_logit

    @staticmethod
    def backward(ctx, dout, dlse, _):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        error = transform_error(False, dout, dlse)
        if error is not None:
            raise error
        with torch.no_grad():
            if dout is None:
                dout = torch.zeros_like(out)
            gradients = backward(q, k, v, sinks, out, lse, dout.to(out.dtype), dlse, ctx.state, ctx.seed)
        return (*_refuse_twice(gradients, q, k, v, sinks, dout, dlse), None, None, None, None, None)


def _any_requires_grad(*tensors):
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            return True
    return False


def _apply(q, k, v, sinks, seed, group, scalars, lists):
    """Returns (out, lse, largest scores or None) of [batch, tokens, heads, head_dim]. out and lse are
    differentiable.

    The default of dropout's seed is the next one that torch draws."""
    error = transform_error(_ranks.is_compiling(), q, k, v, sinks)
    if error is not None:
        refuse(group, device_of(q, k, v, sinks), scalars[SCALARS.index("seqlen")] is not None, error)
    if _op is not None and _op.is_wanted():
        if _ranks.is_compiling() or _op.takes(q, k, v, sinks, seed, scalars, lists):
            return _op.apply(q, k, v, sinks, seed, group, scalars, lists)
    group, call = _ranks.process_group(group), make_call(scalars, lists)
    drawn = False
    if not call.dropout_p or call.error is not None:
        seed = None
    elif seed is None:
        if getattr(q, "is_cuda", False):
            _ranks.refuse_capture()
        seed, drawn = draw_seed().item(), True
    else:
        seed = read_seed(seed)
    needs_grad = torch.is_grad_enabled() and _any_requires_grad(q, k, v, sinks)
    return AttentionFunction.apply(q, k, v, sinks, group, call, needs_grad, seed, drawn)


# The overloads tell a type checker what comes back; each has all keywords.
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ...,
              return_max_logit: Literal[False] = ..., **options: Unpack[Options]) -> Tensor: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
              return_max_logit: Literal[False] = ..., **options: Unpack[Options]) -> Tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ...,
              return_max_logit: Literal[True], **options: Unpack[Options]) -> Tuple[Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
              return_max_logit: Literal[True], **options: Unpack[Options]) -> Tuple[Tensor, Tensor, Tensor]: ...


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ...,
              return_max_logit: bool = ..., **options: Unpack[Options]) -> Union[Tensor, Tuple[Tensor, ...]]: ...


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True,
              softmax_scale: Optional[float] = None, window: int = 0,
              documents: Optional[Documents] = None, cu_seqlens: Optional[Integers] = None,
              group: Optional[Group] = None, layout: str = "zigzag",
              ring_grad_dtype: Optional[torch.dtype] = None, deterministic: bool = True,
              return_lse: bool = False, strategy: str = "burst", ulysses_size: int = 0,
              ranks_per_node: int = 0, backward: str = "auto", sinks: Optional[Tensor] = None,
              seqlen: Optional[int] = None, spans: Optional[Spans] = None,
              slices: Optional[Slices] = None, fp8: bool = False, softcap: float = 0.0,
              alibi_slopes: Optional[Numbers] = None, dropout_p: float = 0.0,
              dropout_seed: Union[int, Tensor, None] = None,
              return_max_logit: bool = False) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Computes exact attention over a sequence whose tokens are spread over the ranks of a group.

    Args:
        q (Tensor): [batch, tokens of this rank, heads, head_dim], or packed [tokens, heads, head_dim].
            In 16 bits a head_dim is padded with zeros to a multiple of 8. The rank's tokens are those that `layout` gives it (burst.shard, burst.positions), in order.
        k, v (Tensor): like q with kv_heads heads, which divide heads. v may have another head_dim, as in
            multi-head latent attention, and out then has it. Kernels that serve one head_dim only take a
            smaller one padded with zeros.
        causal (bool): a token sees itself and earlier tokens.
        softmax_scale (float): default: 1 / sqrt(head_dim). It gets no gradient.
        window (int): a token sees tokens less than `window` positions away. 0: no limit.
        documents (list of int, or one list for each row): positions in the whole sequence where packed
            documents start. A token sees its own document only.
        cu_seqlens (Tensor or list of int): flash_attn's form of `documents`: [0, end of the first, ...,
            end of the sequence]. Each call waits for a tensor on a GPU, but not for a list.
        group (ProcessGroup or one-dimensional DeviceMesh): None: one rank. The first call with a group
            connects its ranks.
        layout (str): "zigzag", "contiguous", "striped", or "balanced". The last deals whole documents to
            ranks if that gives each rank nearly equal work; without documents it is zigzag.
        ring_grad_dtype (torch.dtype): torch.bfloat16 halves the bytes of gradients in the ring, and
            rounds them.
        deterministic (bool): False: a faster backward on GPUs, whose last bits vary.
        return_lse (bool): also return lse.
        strategy (str): "burst", "ring", or "ulysses" (all-to-all of heads).
        ulysses_size (int): the number of neighboring ranks that divide the heads. The ring then connects
            such groups.
        ranks_per_node (int): a double ring over nodes with this number of ranks.
        backward (str): the tensors that go around in the backward: "burst" (queries), "ring" (keys and
            values), or "auto".
        sinks (Tensor): [heads], learnable: one more logit of each head's softmax, without a value (the
            sinks of gpt-oss). Their gradient is this rank's part: sum it over the group.
        seqlen (int): the length of the whole sequence, and a promise that the ranks pass equal arguments.
            They compare them in the first such call only, which saves a round of messages a call.
        spans (list of pairs, or one list for each row): positions (begin, end) in the whole sequence. Tokens of
            a span see one another, whatever `causal` and `window` say. Examples: an image in a text, the
            prompt of a prefix-LM. Each span is within a document.
        slices (list of tuples, or one list for each row): a mask of any shape, with causal=False. It is the
            union of slices (q_begin, q_end, k_begin, k_end, kind). The queries from q_begin to q_end see
            the keys from k_begin to k_end. With "full" they see all of them. With "causal" the last query
            sees all keys, and each query before it one fewer. With "inverse_causal" the first query sees
            all keys, and each query after it one fewer. "band" is both. burst.masks makes trees, global
            tokens and blocks.
        fp8 (bool): the forward's matrix products in 8 bits (e4m3), on Hopper GPUs, with a head_dim from
            72 to 128. docs/kernels.md has the error.
        softcap (float): > 0: scores s become softcap * tanh(s / softcap), as in Gemma 2. Not with fp8.
        alibi_slopes (Tensor): [heads]: a score loses its head's slope times the distance of the tokens
            (burst.alibi_slopes makes the paper's). Not with fp8; it gets no gradient.
        dropout_p (float): the probability that a weight is dropped. Kept weights are divided by
            1 - dropout_p; lse does not change. The choice depends on the seed, the row of the batch, the
            head and the positions, not on the ranks. Not with fp8.
        dropout_seed (int, or Tensor of one element): equal on all ranks. Default: the next number of torch's
            CPU generator on rank 0 of the group (torch.manual_seed). Ranks compare their seeds in every call.
        return_max_logit (bool): also return max_logit. Not with fp8.

    Returns:
        out (Tensor): like q, with v's head_dim; or a tuple of out and the requested ones of these:
        lse (Tensor): [batch, heads, tokens], packed [heads, tokens]: the log of the softmax's
            denominator, differentiable.
        max_logit (Tensor): [batch, heads], packed [heads]: the largest score of each head over all ranks,
            after softcap and ALiBi, without sinks. Not differentiable.

    Raises:
        ValueError, TypeError: on all ranks, for arguments that are wrong or differ between ranks.
        RankLostError: a rank was lost.

    Every rank of the group makes the same calls in the same order.
    """
    return _attend(q, k, v, sinks, dropout_seed, return_lse, group,
                   (causal, softmax_scale, window, layout, strategy, ring_grad_dtype, deterministic, backward,
                    ulysses_size, ranks_per_node, seqlen, fp8, softcap, dropout_p, return_max_logit, False,
                    None, 0), (documents, cu_seqlens, spans, slices, alibi_slopes, None))


def _are_dense(*tensors):
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout is not torch.strided:
            return False
    return True


def _pad(q, k, v, scale):
    """Returns q, k and v with zeros up to head_dims that kernels take, and softmax_scale.

    Zeros in q and k do not change scores. Zeros in v become columns of out that are cut off."""
    multiple = _MULTIPLES.get(q.dtype, 1)
    more, more_of_v = -q.shape[3] % multiple, -v.shape[3] % multiple
    if more:
        scale = q.shape[3]**-0.5 if scale is None else scale
        q, k = (torch.nn.functional.pad(x, (0, more)) for x in (q, k))
    return q, k, torch.nn.functional.pad(v, (0, more_of_v)) if more_of_v else v, scale


def _attend(q, k, v, sinks, seed, return_lse, group, scalars, lists):
    """Computes attention. scalars and lists: see _arguments.SCALARS and LISTS."""
    dense = _are_dense(q, k, v)  # otherwise an error, which all ranks get
    packed = dense and q.dim() == 3
    if packed:
        q, k, v = (tensor.unsqueeze(0) if tensor.dim() == 3 else tensor for tensor in (q, k, v))
    value_dim = None
    if dense and q.dim() == k.dim() == v.dim() == 4 and q.shape[3] == k.shape[3] and v.shape[3] > 0:
        value_dim = v.shape[3]
        q, k, v, scale = _pad(q, k, v, scalars[1])
        scalars = (scalars[0], scale, *scalars[2:])
    out, lse, max_logit = _apply(q, k, v, sinks, seed, group, scalars, lists)
    if value_dim is not None and out.shape[3] != value_dim:
        out = out[..., :value_dim]
    if packed:
        out, lse = out.squeeze(0), lse.squeeze(0)
    results = (out, lse) if return_lse else (out,)
    if max_logit is not None:
        results += (max_logit.squeeze(0) if packed else max_logit,)
    return results if len(results) > 1 else out


@overload
def cross_attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ...,
                    **options: Unpack[CrossOptions]) -> Tensor: ...


@overload
def cross_attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True],
                    **options: Unpack[CrossOptions]) -> Tuple[Tensor, Tensor]: ...


@overload
def cross_attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ...,
                    **options: Unpack[CrossOptions]) -> Union[Tensor, Tuple[Tensor, ...]]: ...


def cross_attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: Optional[float] = None,
                    group: Optional[Group] = None, layout: str = "zigzag",
                    key_layout: Optional[str] = None, ring_grad_dtype: Optional[torch.dtype] = None,
                    deterministic: bool = True, return_lse: bool = False, strategy: str = "burst",
                    ulysses_size: int = 0, ranks_per_node: int = 0, backward: str = "auto",
                    sinks: Optional[Tensor] = None, seqlen: Optional[int] = None, causal: bool = False,
                    window: int = 0, cu_seqlens: Optional[Integers] = None,
                    key_cu_seqlens: Optional[Integers] = None,
                    slices: Optional[Slices] = None) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Computes attention of the queries of one sequence to the keys of another.

    Each sequence is spread over the same ranks. By default every query sees every key.

    Args:
        q (Tensor): [batch, tokens of this rank, heads, head_dim], or packed [tokens, heads, head_dim]:
            the tokens that `layout` gives the rank.
        k, v (Tensor): like q with kv_heads heads, and the keys of the other sequence (of any length) that
            `key_layout` gives the rank.
        key_layout (str): default: `layout`.
        seqlen (int): the length of the queries' sequence, and a promise as in attention().
        causal (bool): the last query is at the place of the last key, and no query sees a later key. Queries
            before the first key get out 0 and lse -inf.
        window (int): a query sees keys less than `window` places away, counted as for causal.
        cu_seqlens, key_cu_seqlens (Tensor or list of int): bounds of the documents of each sequence, as in
            attention(). Queries of a document see keys of that document only.
        slices (list of tuples): the whole mask, as in attention().
        backward (str): "auto" sends queries or keys around, whichever are fewer bytes.

    For the other arguments, the results and the errors, see attention().
    """
    return _attend(q, k, v, sinks, None, return_lse, group,
                   (causal, softmax_scale, window, layout, strategy, ring_grad_dtype, deterministic, backward,
                    ulysses_size, ranks_per_node, seqlen, False, 0.0, 0.0, False, True, key_layout, 0),
                   (None, cu_seqlens, None, slices, None, key_cu_seqlens))


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor,
                      **arguments: Any) -> Union[Tensor, Tuple[Tensor, ...]]:
    """Computes attention() by DeepSpeed Ulysses: all-to-alls exchange tokens for heads.

    The number of ranks must divide the heads. For arguments and results, see attention().
    """
    return attention(q, k, v, strategy="ulysses", **arguments)
