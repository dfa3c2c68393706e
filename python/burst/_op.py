"""The custom operators burst::forward and burst::backward (torch >= 2.4), for torch.compile, torch.export and
for selective activation checkpointing, which see operators only.

Their arguments are what a graph may keep: tensors, which are read when it runs, and one text. From the text
(arguments_text), any process can make the Call and find the group."""

import ctypes
import json
import operator
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from . import _arguments, _call, _flops, _ranks
from ._cache import Bounded
from ._graphs import constant
from .masks import Frozen
from .scores import check_seed, draw_seed, read_seed

_TEXT_BYTES = 4 << 20
_SEQLEN = _arguments.SCALARS.index("seqlen")
OPS = getattr(torch.ops, __package__)  # a second copy of the package, under another name, has its own operators


def is_wanted():
    """Returns whether torch.compile or a dispatch mode looks at operators."""
    return _ranks.is_compiling() or torch.utils._python_dispatch._get_current_dispatch_mode() is not None


class _Parsed:
    """The content of a text of arguments."""

    def __init__(self, text):
        given = json.loads(text)
        self.group_name, self.size = given["group"] if given["group"] else (None, 1)
        self._scalars, self._lists = given["scalars"], given["lists"]
        self.cross = self._scalars[_arguments.SCALARS.index("cross")]
        self.has_largest = bool(self._scalars[_arguments.SCALARS.index("return_max_logit")])

    def group(self):
        if self.group_name is None:
            return None
        found = _ranks.group_of_name(self.group_name)
        if torch.distributed.get_world_size(found) != self.size:
            raise ValueError("group: the program was made for %d ranks in the group %r, which has %d here" %
                             (self.size, self.group_name, torch.distributed.get_world_size(found)))
        return found

    def call(self, values, seqlen=None):
        """Returns the Call with the values of these tensors, and with seqlen if the text does not have it."""
        scalars, lists = ([_filled(part, values) for part in parts] for parts in (self._scalars, self._lists))
        if seqlen is not None:
            scalars[_SEQLEN] = seqlen
        elif isinstance(scalars[_SEQLEN], Frozen):
            scalars[_SEQLEN], = scalars[_SEQLEN].slices
        return _arguments.make_call(tuple(scalars), tuple(lists))


_texts, _frozen = Bounded(_TEXT_BYTES), Bounded(_TEXT_BYTES)


def _parsed(text):
    found = _texts.get(text)
    return _texts.put(text, _Parsed(text), 2048 + 20 * len(text)) if found is None else found


def _thawed(tensor):
    """Returns the Frozen of a Frozen's tensor. Equal ones are one object, which is read once."""
    text = ctypes.string_at(tensor.data_ptr(), tensor.numel())
    found = _frozen.get(text)
    return _frozen.put(text, Frozen(json.loads(text)), 2048 + 20 * len(text)) if found is None else found


def _filled(value, values):
    """Returns a part of the arguments, with tensors at the places that arguments_text left for them."""
    if isinstance(value, dict):
        if "refused" in value:
            return _arguments.Refusal(value["refused"])
        if "frozen" in value:
            return _thawed(values[value["frozen"]].cpu())
        return values[value["tensor"]]
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return [_filled(item, values) for item in value]
    return value


def _plain(name, value):
    """Returns the value for JSON. An object that cannot be an argument becomes an error, which the call raises."""
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return operator.index(value) if isinstance(value, torch.SymInt) else float(value)
    if value is None or isinstance(value, (bool, int, float, str, dict)):
        return value
    if isinstance(value, torch.dtype):
        return {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(value, str(value))
    if isinstance(value, _arguments.Refusal):
        return {"refused": value.text}
    if hasattr(value, "tolist"):
        return value.tolist()
    return {"refused": "%s: got %s" % (name, _arguments.shown(value))}


@constant
def arguments_text(group, *arguments):
    """Returns the text of an operator's scalars, lists and group, which is a constant of a graph."""
    scalars, lists = arguments[:len(_arguments.SCALARS)], arguments[len(_arguments.SCALARS):]
    try:
        group = object.__getattribute__(group, "real_obj")  # torch 2.15 traces with a stand-in
    except AttributeError:
        pass
    group = _ranks.process_group(group)
    named = None
    if group is not None:
        named = _ranks.name_of(group), torch.distributed.get_world_size(group)
    return json.dumps({
        "group": named,
        "scalars": [_plain(*pair) for pair in zip(_arguments.SCALARS, scalars)],
        "lists": [_plain(*pair) for pair in zip(_arguments.LISTS, lists)]})


def _without_tensors(value, tensors):
    """Returns the value with {"tensor": i} in the place of each tensor, which goes to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value).__module__ == "numpy" and hasattr(value, "__array__"):
        return _without_tensors(torch.as_tensor(value), tensors)
    if isinstance(value, Frozen):
        tensors.append(value.tensor)
        return {"frozen": len(tensors) - 1}
    if isinstance(value, (int, float)):
        value, = {value: None}  # as a key dynamo makes it a constant, where it was any number or comparison
        return value
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item, tensors) for item in value]
    return value


def _seed_tensor(seed):
    """Returns the given seed or the next one: [1], int64, on the CPU."""
    if seed is None:
        return draw_seed()
    if isinstance(seed, torch.Tensor):
        return seed.detach().to(device="cpu", dtype=torch.int64).reshape(1)
    return torch.tensor([read_seed(seed)], dtype=torch.int64, device="cpu")


def _drops(scalars):
    return scalars[13] is not None and scalars[13] != 0


def _check(q, k, v, sinks, seed, scalars, lists):
    """Raises a TypeError or ValueError for arguments that cannot be the operator's. It refuses others when it runs."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("%s: must be a torch.Tensor; got a %s" % (name, type(tensor).__name__))
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        _arguments.check_sinks(sinks, q)
    for name, value in (("softmax_scale", scalars[1]), ("alibi_slopes", lists[4])):
        if isinstance(value, torch.Tensor):
            _arguments.refuse_gradient(name, value)
    if _drops(scalars) and seed is not None and not (isinstance(seed, torch.Tensor) and seed.numel() == 1):
        check_seed(read_seed(seed))


def takes(*given):
    """Returns whether the operator takes the arguments of _check. If not, a call without it tells the other ranks."""
    try:
        _check(*given)
    except (TypeError, ValueError):
        return False
    return True


def apply(q, k, v, sinks, seed, group, scalars, lists):
    """Does what _attention._apply does, through the operator."""
    _check(q, k, v, sinks, seed, scalars, lists)
    tensors = []
    seqlen = scalars[_SEQLEN]
    if isinstance(seqlen, (int, torch.SymInt)) and not isinstance(seqlen, bool):  # it may be any number in a graph
        scalars = (*scalars[:_SEQLEN], None, *scalars[_SEQLEN + 1:])
    else:
        seqlen = None
    scalars = _without_tensors(scalars, tensors)
    text = arguments_text(group, *scalars, *_without_tensors(lists, tensors))
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or
                                              (sinks is not None and sinks.requires_grad))
    drops = _drops(scalars)
    drawn = drops and seed is None
    seed = _seed_tensor(seed) if drops else None
    out, lse, max_logit, _ = OPS.forward(q, k, v, sinks, text, tensors, needs_grad, seed, drawn, seqlen)
    return out, lse, max_logit if scalars[14] else None


_TAGS = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}


@torch.library.custom_op(__package__ + "::forward", mutates_args=(), **_TAGS)
def forward(q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], arguments: str, values: List[Tensor],
            needs_grad: bool, seed: Optional[Tensor], drawn: bool,
            seqlen: Optional[int]) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes attention. The last result has the tokens of every rank, then the seed."""
    parsed = _parsed(arguments)
    out, lse, max_logit, lengths, seed, _ = _call.forward(
        q, k, v, parsed.group(), parsed.call(values, seqlen), needs_grad, sinks,
        None if seed is None else seed.item(), drawn)
    if max_logit is None:
        max_logit = torch.empty((0,), dtype=torch.float32, device="cpu")
    return out, lse, max_logit, torch.tensor([*lengths, seed or 0], dtype=torch.int64, device="cpu")


@forward.register_fake
def _(q, k, v, sinks, arguments, values, needs_grad, seed, drawn, seqlen):
    parsed = _parsed(arguments)
    lse = q.new_empty(_call.lse_shape(q), dtype=_call.lse_dtype(q))
    largest = torch.empty(_call.max_logit_shape(q) if parsed.has_largest else (0,), dtype=torch.float32,
                          device="cpu")
    lengths = torch.empty(((2 if parsed.cross else 1) * parsed.size + 1,), dtype=torch.int64, device="cpu")
    return torch.empty(_call.out_shape(q, v), dtype=q.dtype, device=q.device), lse, largest, lengths


@torch.library.custom_op(__package__ + "::backward", mutates_args=(), **_TAGS)
def backward(q: Tensor, k: Tensor, v: Tensor, sinks: Optional[Tensor], out: Tensor, lse: Tensor,
             lengths: Tensor, dout: Tensor, dlse: Optional[Tensor], arguments: str, values: List[Tensor],
             drops: bool, seqlen: Optional[int]) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the gradients. The last result is the gradient of the sinks; without them it is empty."""
    parsed = _parsed(arguments)
    *tokens, seed = lengths.tolist()
    state = _call.state_of(parsed.group(), parsed.call(values, seqlen), q, tokens)
    *gradients, dsinks = _call.backward(q, k, v, sinks, out, lse, dout.to(out.dtype), dlse, state,
                                        seed if drops else None)
    return (*gradients, q.new_empty(0) if dsinks is None else dsinks)


@backward.register_fake
def _(q, k, v, sinks, out, lse, lengths, dout, dlse, arguments, values, drops, seqlen):
    gradients = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return (*gradients, q.new_empty(0) if sinks is None else torch.empty_like(sinks))


def _keep(ctx, inputs, output):
    q, k, v, sinks, ctx.arguments, values, _, seed, _, ctx.seqlen = inputs
    out, lse, _, lengths = output
    ctx.drops = seed is not None
    ctx.save_for_backward(q, k, v, sinks, out, lse, lengths, *values)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dout, dlse, *_):
    q, k, v, sinks, out, lse, lengths, *values = ctx.saved_tensors
    error = None if _ranks.is_compiling() else _arguments.transform_error(False, dout, dlse)
    if error is not None:
        raise error
    if dout is None:
        dout = torch.zeros_like(out)
    *gradients, dsinks = OPS.backward(q, k, v, sinks, out, lse, lengths, dout, dlse, ctx.arguments, values,
                                      ctx.drops, ctx.seqlen)
    return (*gradients, None if sinks is None else dsinks, None, [None] * len(values), None, None, None, None)


forward.register_autograd(_differentiate, setup_context=_keep)
_flops.register(OPS, _parsed)
