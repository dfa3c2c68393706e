"""Ranks of a group tell each other before a call whether their arguments are right and equal."""

import hashlib
import json
import struct

import torch

from . import _ranks
from .scores import check_seed

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # burst_dtype
OF_16_BITS = (torch.bfloat16, torch.float16)
ALIGNED = 8  # elements of 16 bits: kernels read 16 bytes at once, so rows begin at multiples
# A rank's message has 1 for an error, the tokens of q and of k, the seed it drew, and a digest of the rest.
_MESSAGE = struct.Struct("<qqqQ32s")
_KINDS = {"TypeError": TypeError, "ValueError": ValueError}


def check_tensors(q, k, v, cross):
    """Raises a ValueError or TypeError that names the tensor, unless attention takes these tensors."""
    try:
        if (type(q) is type(k) is type(v) is torch.Tensor and
                q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and k.shape[:3] == v.shape[:3] and
                q.device == k.device == v.device and q.dim() == k.dim() == v.dim() == 4 and
                q.layout is k.layout is v.layout is torch.strided):
            (batch, tokens, heads, head_dim), (kv_batch, keys, kv_heads, kv_dim) = q.shape, k.shape
            if (kv_batch == batch and (cross or keys == tokens) and kv_dim == head_dim and v.shape[3] > 0 and kv_heads > 0 and
                    heads % kv_heads == 0):
                return
    except RuntimeError:  # a nested tensor has no shape
        pass
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
    _check_fit(q, k, v, cross)


def _check_tensor(name, tensor):
    if not isinstance(tensor, torch.Tensor):
        raise TypeError("%s: must be a torch.Tensor; got a %s" % (name, type(tensor).__name__))
    if tensor.is_nested:
        raise TypeError("%s: must not be a nested tensor; pass its values, [tokens, heads, head_dim], with "
                        "cu_seqlens" % name)
    if tensor.layout is not torch.strided:
        raise TypeError("%s: must be a dense tensor; got one of %s" % (name, tensor.layout))
    if hasattr(tensor, "to_local"):
        raise TypeError("%s: must be this rank's own part; got a %s; pass %s.to_local()" %
                        (name, type(tensor).__name__, name))
    if tensor.dim() != 4:
        raise ValueError("%s: must be [batch, tokens, heads, head_dim] or [tokens, heads, head_dim]; got the "
                         "shape %s" % (name, list(tensor.shape)))
    if tensor.dtype not in DTYPES:
        raise ValueError("%s: must be float32, float64, bfloat16 or float16; got %s" % (name, tensor.dtype))


def _check_fit(q, k, v, cross):
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError("%s: must have q's dtype, %s; got %s" % (name, q.dtype, tensor.dtype))
        if tensor.device != q.device:
            raise ValueError("%s: must be on q's device, %s; got %s" % (name, q.device, tensor.device))
        if (tensor.shape[0] != q.shape[0] or (tensor is k and k.shape[3] != q.shape[3]) or
                (not cross and tensor.shape[1] != q.shape[1])):
            same = "batch" if cross else "batch, tokens" if tensor is k else "batch and tokens"
            same += " and head_dim" if tensor is k else ""
            raise ValueError("%s: must have the %s of q, whose shape is %s; got the shape %s%s" %
                             (name, same, list(q.shape), list(tensor.shape),
                              "" if cross or tensor.shape[1] == q.shape[1] else
                              "; burst.cross_attention takes another number of keys"))
    if cross and k.shape[1] != v.shape[1]:
        raise ValueError("v: must have the %d tokens of k; got %d" % (k.shape[1], v.shape[1]))
    if v.shape[3] == 0:
        raise ValueError("v: must have a head_dim of at least 1; got the shape %s" % list(v.shape))
    if k.shape[2] != v.shape[2]:
        raise ValueError("v: must have the %d heads of k; got %d" % (k.shape[2], v.shape[2]))
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError("k: must have a number of heads that divides q's %d; got %d" % (q.shape[2], k.shape[2]))


def check_sinks(sinks, q):
    if not isinstance(sinks, torch.Tensor):
        raise TypeError("sinks: must be a torch.Tensor; got a %s" % type(sinks).__name__)
    if sinks.shape != (q.shape[2],):
        raise ValueError("sinks: must be [heads], here [%d]; got the shape %s" %
                         (q.shape[2], list(sinks.shape)))
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError("sinks: must be floating-point numbers on q's device, %s; got %s on %s" %
                         (q.device, sinks.dtype, sinks.device))


def _error_of(call, q, k, v, sinks, seed):
    """Returns (class, text) of this rank's error, or None."""
    if call.error is not None:
        return call.error
    try:
        check_tensors(q, k, v, call.cross)
        if sinks is not None:
            check_sinks(sinks, q)
        if seed is not None:
            check_seed(seed)
    except (TypeError, ValueError) as raised:
        return "TypeError" if isinstance(raised, TypeError) else "ValueError", str(raised)
    return None


def agree(ranks, call, q, k, v, sinks, needs_grad, seed, drawn):
    """Checks this rank's arguments and compares them with the others'. An error of one rank is raised on
    all of them.

    Returns the number of tokens of each rank, and the seed of dropout. Cross-attention has the tokens of q,
    then those of k. If the ranks have drawn their seeds (`drawn`), it is rank 0's."""
    error = _error_of(call, q, k, v, sinks, seed)
    if ranks.size == 1:
        if error is not None:
            raise _KINDS[error[0]](error[1])
        return ([q.shape[1], k.shape[1]] if call.cross else [q.shape[1]]), seed
    known = None
    if call.promised and not call.dropout_p:  # seeds are compared in every call
        if error is None:
            known = (call, q.shape, k.shape[1:3], v.shape[3], q.dtype, needs_grad, sinks is None)
            lengths = ranks.agreed.get(known)
            if lengths is not None:
                return lengths, seed
        elif len(ranks.agreed) > 0:  # the others do not ask
            ranks.fail(error[1])
            raise _KINDS[error[0]](error[1])
    own = None
    if error is None:
        own = [("batch", q.shape[0]), ("heads", q.shape[2]), ("kv heads", k.shape[2]),
               ("head_dim", q.shape[3]), ("head_dim of v", v.shape[3]), ("dtype", str(q.dtype)), ("requires_grad", needs_grad), ("sinks", sinks is not None),
               ("dropout_seed", "drawn" if drawn else seed)]
    lengths, seed = _compare(ranks, call, own, error, (q, k), seed if drawn else None, seed)
    if known is not None:
        ranks.agreed.put(known, lengths, call.weight)
    return lengths, seed


def refuse(group, device, promised, error):
    """Raises an error that was found before a call, here and in the other ranks' next call.

    promised: with seqlen= the other ranks may not ask. Then they learn that this rank gave up."""
    ranks = _ranks.ranks_of(_ranks.process_group(group), device)
    if ranks.size > 1:
        with ranks.device.lock:
            ranks.device.enter()
            if promised and len(ranks.agreed) > 0:
                ranks.fail(error)
            else:
                _compare(ranks, None, None, (type(error).__name__, str(error)), None, None, None)
    raise error


def _compare(ranks, call, own, error, tensors, drawn, seed):
    """Returns the lengths and the seed, as agree(). Collective."""
    if error is None:
        digest = hashlib.sha256(repr(own).encode() + call.digest()).digest()
        mine = _MESSAGE.pack(0, tensors[0].shape[1], tensors[1].shape[1], drawn or 0, digest)
    else:
        mine = _MESSAGE.pack(1, 0, 0, 0, b"")
    messages = [_MESSAGE.unpack(message) for message in ranks.exchange(mine)]
    if any(message[0] for message in messages) or len({message[4] for message in messages}) > 1:
        _explain(ranks, dict(error=error, fields=None if error else own + call.fields()))
    lengths = [message[1] for message in messages]
    if call.cross:
        lengths += [message[2] for message in messages]
    return lengths, seed if drawn is None else messages[0][3]


def _explain(ranks, mine):
    """Raises the error on all ranks. Collective. Texts have any length, and none is cut."""
    text = json.dumps(mine).encode()
    lengths = [int.from_bytes(length, "little")
               for length in ranks.exchange(len(text).to_bytes(8, "little"))]
    texts = ranks.exchange(text.ljust(max(lengths), b" "))
    if mine["error"] is not None:
        raise _KINDS[mine["error"][0]](mine["error"][1])
    others = [json.loads(other) for other in texts]
    for rank, other in enumerate(others):
        if other["error"] is not None:
            raise _KINDS[other["error"][0]]("rank %d: %s" % (rank, other["error"][1]))
    own = others[ranks.rank]["fields"]
    for rank, other in enumerate(others):
        for (name, ours), (_, theirs) in zip(own, other["fields"]):
            if ours != theirs:
                where, ours, theirs = _first_difference(ours, theirs)
                raise ValueError("%s: the ranks differ%s: %r on rank %d, %r on rank %d" % (
                    name, where, ours, ranks.rank, theirs, rank))
    raise ValueError("the ranks differ: another version of the package on one of them")


def _first_difference(ours, theirs, where=""):
    """Returns the first place where two nested lists differ, in words, and both values there."""
    if not (isinstance(ours, list) and isinstance(theirs, list)):
        return where, ours, theirs
    if len(ours) != len(theirs):
        return where + " in length", len(ours), len(theirs)
    at = next(i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
    return _first_difference(ours[at], theirs[at], (where + " at " if not where else where + ", ") + str(at))
