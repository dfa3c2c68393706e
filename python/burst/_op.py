"""The custom operators burst::forward and burst::backward (torch >= 2.4), for torch.compile and for
selective activation checkpointing, which see operators only."""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _call


def _number(seed):
    """Of dropout: [1], on the CPU, or None."""
    return None if seed is None else seed.item()


@torch.library.custom_op("burst::forward", mutates_args=())
def forward(q: Tensor, k: Tensor, v: Tensor, call: int, ranks: int,
            needs_grad: bool, seed: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, max_logit, lengths, _ = _call.forward(q, k, v, _call.call_of(call), needs_grad, seed=_number(seed))
    if max_logit is None:
        max_logit = torch.empty((0,))
    return out, lse, max_logit, torch.tensor(lengths, dtype=torch.int64)


@forward.register_fake
def _(q, k, v, call, ranks, needs_grad, seed):
    lse = q.new_empty(_call.lse_shape(q), dtype=_call.lse_dtype(q))
    lengths = torch.empty((ranks,), dtype=torch.int64, device="cpu")
    asked = _call.asks_for_max_logit(_call.call_of(call))
    max_logit = torch.empty(_call.max_logit_shape(q) if asked else (0,), device="cpu")
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse, max_logit, lengths


@torch.library.custom_op("burst::backward", mutates_args=())
def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lengths: Tensor, dout: Tensor,
             dlse: Optional[Tensor], call: int,
             seed: Optional[Tensor]) -> Tuple[Tensor, Tensor, Tensor]:
    state = _call.state_of(_call.call_of(call), q, lengths.tolist())
    dq, dk, dv = _call.backward(q, k, v, out, lse, dout.to(out.dtype), dlse, state, _number(seed))
    return dq, dk, dv


@backward.register_fake
def _(q, k, v, out, lse, lengths, dout, dlse, call, seed):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))


def _keep(ctx, inputs, output):
    q, k, v, ctx.call, _, _, seed = inputs
    out, lse, _, lengths = output
    ctx.save_for_backward(q, k, v, out, lse, lengths, seed)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, *_):
    q, k, v, out, lse, lengths, seed = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    gradients = torch.ops.burst.backward(q, k, v, out, lse, lengths, dout, dlse, ctx.call, seed)
    return (*gradients, None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_keep)


def is_wanted():
    """Whether somebody looks at operators: torch.compile, or a dispatch mode."""
    if torch.compiler.is_compiling():
        return True
    return torch.utils._python_dispatch._get_current_dispatch_mode() is not None


def apply(q, k, v, call, ranks, needs_grad, seed):
    out, lse, max_logit, _ = torch.ops.burst.forward(q, k, v, call, ranks, needs_grad, seed)
    return out, lse, max_logit if max_logit.dim() == 2 else None
