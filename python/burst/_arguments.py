"""attention()'s arguments: the checks of its tensors, and its options as values. Options are read and checked once,
compared by ranks, and carried by operators as a text."""

import hashlib
import json
import math
import operator

import torch
from torch.autograd import forward_ad

from ._cache import Bounded
from ._lists import list_of, nested
from .masks import KINDS, Frozen

DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}  # burst_dtype
OF_16_BITS = (torch.bfloat16, torch.float16)
ALIGNED = 8  # elements of 16 bits: kernels read 16 bytes at once, so rows begin at multiples
LAYOUTS = ("zigzag", "contiguous", "striped", "balanced")
STRATEGIES = ("burst", "ring", "ulysses", "burst+ulysses")
# The arguments of make_call, in order: single values, then values that may be long.
SCALARS = ("causal", "softmax_scale", "window", "layout", "strategy", "ring_grad_dtype", "deterministic",
           "backward", "ulysses_size", "ranks_per_node", "seqlen", "fp8", "softcap", "dropout_p",
           "return_max_logit", "cross", "key_layout", "per_document")
LISTS = ("documents", "cu_seqlens", "spans", "slices", "alibi_slopes", "key_cu_seqlens")
# The fields of a Call. `promised` says that the caller gave seqlen, so ranks compare arguments once. `tokens` is
# the length of the whole sequence, by seqlen or cu_seqlens. `pairs` are bounds of documents in two sequences.
_FIELDS = SCALARS + ("promised", "tokens", "documents", "spans", "slices", "alibi_slopes", "pairs")
_OPTIONS = ("strategy", "layout", "backward", "ring_grad_dtype", "softmax_scale",
            "deterministic", "ulysses_size", "ranks_per_node", "fp8", "softcap", "alibi_slopes",
            "dropout_p")
_NOT_OF_SCHEDULES = ("softmax_scale", "ring_grad_dtype", "deterministic", "fp8", "softcap", "dropout_p",
                     "return_max_logit", "promised", "alibi_slopes")
_CACHE_BYTES = 4 << 20  # of each cache below


_functorch = getattr(torch._C, "_functorch", None)  # torch 2
_WRAPS = [getattr(_functorch, name) for name in ("is_functorch_wrapped_tensor", "is_legacy_batchedtensor")
          if hasattr(_functorch, name)]


def transform_error(tracing, *tensors):
    """Returns the TypeError of torch.func's transforms and of forward mode, which do not see what the library computes.
    Returns None elsewhere. While a graph is traced, tangents are unknown, so any forward_ad.dual_level() is refused."""
    forward_mode = forward_ad._current_level >= 0
    if forward_mode if tracing else any(isinstance(x, torch.Tensor) and (
            any(wraps(x) for wraps in _WRAPS) or
            (forward_mode and forward_ad.unpack_dual(x).tangent is not None)) for x in tensors):
        return TypeError("attention: must not be in torch.func's transforms (grad, vjp, jvp, vmap), in forward mode or "
                         "with batched gradients; got one of their tensors; use torch.autograd.grad, and a batch in "
                         "place of vmap")
    return None


class Refusal:
    """An argument that cannot be read, with the reason. It is given in place of the argument, so that
    the error waits for the call itself, where all ranks get it."""

    def __init__(self, text):
        self.text = text


class Call:
    """An immutable value that says what to compute: attention()'s arguments but tensors and the group.

    Two calls of the same arguments are equal. The attributes are _FIELDS, as make_call normalizes them.
    There are three more: `error` is (class, text) of the first wrong argument, or None. `weight` is about the
    bytes of memory. `options` are what an attention object of the library is made from."""

    __slots__ = _FIELDS + ("error", "weight", "options", "_key", "_hash", "_digest", "_schedule")

    def __init__(self, key, error=None):
        for name, value in zip(_FIELDS, key):
            setattr(self, name, value)
        self.error = error
        self._key, self._hash, self._digest, self._schedule = key, hash((key, error)), None, None
        self.options = tuple(getattr(self, name) for name in _OPTIONS)
        numbers = sum(len(row) for row in (self.documents or ()))
        numbers += sum(3 * len(row) for row in (self.spans or ()))
        numbers += sum(6 * len(row) for row in (self.slices or ()))
        numbers += sum(map(len, self.pairs or ()))
        self.weight = 2048 + 48 * (numbers + len(self.alibi_slopes or ()))

    def __eq__(self, other):
        return self is other or (isinstance(other, Call) and self._hash == other._hash and
                                 self._key == other._key and self.error == other.error)

    def __hash__(self):
        return self._hash

    def fields(self):
        """Returns (name, value) of the fields that ranks compare."""
        return list(zip(_FIELDS, self._key))

    def of_schedule(self):
        """Returns the Call with only the fields on which its schedule depends, which leaves out a changing scale."""
        if self._schedule is None:
            self._schedule = Call(tuple(None if name in _NOT_OF_SCHEDULES else value
                                        for name, value in zip(_FIELDS, self._key)))
        return self._schedule

    def digest(self):
        """Returns 32 bytes that tell this call from others."""
        if self._digest is None:
            self._digest = hashlib.sha256(json.dumps(self._key).encode()).digest()
        return self._digest


_quick = Bounded(_CACHE_BYTES)  # calls by arguments as they are given, where none is a list
_scalars = Bounded(_CACHE_BYTES)  # normalized scalars by those that were given
_calls = Bounded(_CACHE_BYTES)  # calls by normalized arguments


def make_call(scalars, lists):
    """Returns the Call of these arguments, in the order of SCALARS and LISTS. A wrong one becomes its `error`."""
    slices = lists[LISTS.index("slices")]
    is_quick = (all(value is None for name, value in zip(LISTS, lists) if name != "slices") and
                (slices is None or type(slices) is Frozen))
    quick = scalars, tuple(map(type, scalars)), slices  # 1, 1.0 and True are equal
    if is_quick:
        found = _cached(_quick, quick)
        if found is not None:
            return found
    try:
        read = _cached(_scalars, quick[:2])
        if read is None:
            read = _read_scalars(scalars)
            _cache(_scalars, quick[:2], read, 2048)
        call = _interned(read, lists)
    except MemoryError:
        raise
    except Exception as raised:  # the other ranks must learn of any error
        kind = TypeError if isinstance(raised, TypeError) else ValueError
        text = "%s" % raised if isinstance(raised, (TypeError, ValueError)) else (
            "attention: its arguments must be readable; got %s: %s" % (type(raised).__name__, raised))
        return _refused(dict(zip(SCALARS, scalars)), (kind.__name__, text))
    if is_quick:
        _cache(_quick, quick, call, call.weight)
    return call


def _cached(cache, key):
    """Returns a cache's value for given scalars, or None for a tensor, whose value may change, and for an object
    that cannot be hashed."""
    try:
        return cache.get(key)
    except TypeError:
        return None


def _cache(cache, key, value, weight):
    try:
        if not any(isinstance(scalar, torch.Tensor) for scalar in key[0]):
            cache.put(key, value, weight)
    except TypeError:
        pass


def _refused(given, error):
    """Returns a Call that cannot be made. It says whether its ranks talk."""
    dropout = given["dropout_p"]
    known = dict(promised=given["seqlen"] is not None,
                 dropout_p=0.0 if dropout is None or (isinstance(dropout, (int, float)) and dropout == 0) else 1.0)
    return Call(tuple(map(known.get, _FIELDS)), error)


def _interned(scalars, lists):
    for value in lists:
        if isinstance(value, Refusal):
            raise ValueError(value.text)
    documents, cu_seqlens, spans, slices, slopes, key_cu_seqlens = lists
    given, size = scalars[SCALARS.index("seqlen")], scalars[SCALARS.index("per_document")]
    pairs = None
    if scalars[SCALARS.index("cross")]:
        pairs, cu_seqlens = _pairs(cu_seqlens, key_cu_seqlens, given), None
    documents, seqlen = rows_of_documents(documents, cu_seqlens, pairs[0][-1] if pairs else given, size or 1)
    if size and scalars[SCALARS.index("layout")] == "zigzag":
        _check_halves(documents[0], seqlen, 2 * size)
    slices = _slices(slices)
    spans, slopes = _spans(spans), _slopes(slopes)
    key = (*scalars, given is not None, seqlen, documents, spans, slices, slopes, pairs)
    found = _calls.get(key)
    if found is None:
        found = Call(key)
        _calls.put(key, found, found.weight)
    return found


def _read_scalars(scalars):
    """Returns the scalars as numbers and texts."""
    for value in scalars:
        if isinstance(value, Refusal):
            raise ValueError(value.text)
    return tuple(_READERS[name](name, value) for name, value in zip(SCALARS, scalars))


def _check_halves(starts, seqlen, parts):
    for begin, end in zip(starts, (*starts[1:], seqlen)):
        if (end - begin) % parts:
            raise ValueError("cu_seqlens: zigzag parts have two chunks each, and a document has an odd "
                             "number of tokens here")


def shown(value):
    """Returns a short text of a value, for an error."""
    if isinstance(value, torch.Tensor):
        return "a tensor %s of %s" % (list(value.shape), value.dtype)
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."


def _flag(name, value):
    if value is True or value is False:
        return value
    if not isinstance(value, torch.Tensor):
        try:
            if value in (0, 1):  # numpy's, too
                return bool(value)
        except (TypeError, ValueError):  # arrays, and objects that cannot be compared
            pass
    raise TypeError("%s: must be True or False; got %s" % (name, shown(value)))


def read_count(name, value):
    """Returns an integer of at least 0."""
    if isinstance(value, (bool, torch.Tensor)):
        raise TypeError("%s: must be an integer; got %s; pass int(...)" % (name, shown(value)))
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError("%s: must be an integer of at least 0; got %s" % (name, shown(value))) from None
    if not 0 <= number < 2**63:
        raise ValueError("%s: must be an integer of at least 0; got %d" % (name, number))
    return number


def _count_or_none(name, value):
    return None if value is None else read_count(name, value)


def _number(name, value):
    """Returns the float of a number, or of an array of one."""
    if not isinstance(value, (str, bytes, bool, torch.Tensor)):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise ValueError("%s: must be a number; got %s" % (name, shown(value)))


_INSTEAD = {"softmax_scale": "multiply q by it", "alibi_slopes": "detach it, or add what is learned to q and k"}


def refuse_gradient(name, tensor):
    """Raises a TypeError for a learned tensor, because attention does not give it a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError("%s: requires a gradient, which attention does not give it; %s" %
                        (name, _INSTEAD.get(name, "detach it")))


def _scale(name, value):
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        refuse_gradient(name, value)
        value = value.item() if value.numel() == 1 else value
    number = _number(name, value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError("%s: must be positive and finite; got %r" % (name, number))
    return number


def _number_or_zero(name, value):
    return 0.0 if value is None else _number(name, value)


def _probability(name, value):
    """Returns a number below 1. It is checked here because it decides whether the ranks exchange seeds."""
    number = _number_or_zero(name, value)
    if not 0 <= number < 1:
        raise ValueError("%s: must be in [0, 1); got %r" % (name, number))
    return number


def _one_of(*known):
    def read(name, value):
        if not (value is None or isinstance(value, str)) or value not in known:
            raise ValueError("%s: must be one of %s; got %s" %
                             (name, ", ".join(map(str, known)), shown(value)))
        return value
    return read


def _grad_dtype(name, value):
    names = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16", "fp32": "fp32", "bf16": "bf16"}
    try:
        return names[value]
    except (KeyError, TypeError):
        raise ValueError("%s: must be one of torch.float32, torch.bfloat16; got %s" %
                         (name, shown(value))) from None


_READERS = dict(
    causal=_flag, softmax_scale=_scale, window=read_count, layout=_one_of(*LAYOUTS),
    strategy=_one_of(*STRATEGIES), ring_grad_dtype=_grad_dtype, deterministic=_flag,
    backward=_one_of("auto", "burst", "ring"), ulysses_size=read_count, ranks_per_node=read_count,
    seqlen=_count_or_none, fp8=_flag, softcap=_number_or_zero, dropout_p=_probability, return_max_logit=_flag,
    cross=_flag, key_layout=_one_of(None, *LAYOUTS), per_document=read_count)


def integers(name, values):
    try:
        values = list_of(values)
        return [value if type(value) is int else operator.index(value) for value in values]
    except (TypeError, RuntimeError):
        raise ValueError("%s: must be integers; got %s" % (name, shown(values))) from None


def _check_bounds(name, bounds, seqlen):
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError("%s: must begin with 0 and not decrease; got %s" % (name, shown(bounds)))
    if seqlen is not None and bounds[-1] != seqlen:
        raise ValueError("%s: must end with seqlen, %d; got %d" % (name, seqlen, bounds[-1]))


def _starts_of_bounds(bounds, seqlen):
    _check_bounds("cu_seqlens", bounds, seqlen)
    return tuple(sorted(set(bounds[:-1]) - {bounds[-1]})) if bounds[-1] else ()


def _pairs(of_queries, of_keys, seqlen):
    """Returns the bounds of the documents of two sequences, (queries', keys'), or None."""
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None or of_keys is None:
        raise ValueError("cu_seqlens: must be given with key_cu_seqlens; got one of them")
    pairs = tuple(integers("cu_seqlens", of_queries)), tuple(integers("key_cu_seqlens", of_keys))
    _check_bounds("cu_seqlens", pairs[0], seqlen)
    _check_bounds("key_cu_seqlens", pairs[1], None)
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError("key_cu_seqlens: must have the length of cu_seqlens, %d; got %d" % tuple(map(len, pairs)))
    return pairs


def rows_of_documents(documents, cu_seqlens, seqlen, times=1):
    """Returns rows of document starts as nested tuples, or None, and the sequence's length. The bounds of
    cu_seqlens are multiplied by `times`."""
    if cu_seqlens is not None:
        if documents is not None:
            raise ValueError("documents: must not be given with cu_seqlens, which says the same; leave one of them out")
        bounds = [bound * times for bound in integers("cu_seqlens", cu_seqlens)]
        return (_starts_of_bounds(bounds, seqlen),), bounds[-1]
    if documents is None:
        return None, seqlen
    if isinstance(documents, Frozen):  # of a graph
        documents = documents.slices
    try:
        rows = list(list_of(documents))
    except TypeError:
        raise ValueError("documents: must be a list of positions, or of such lists; got %s" %
                         shown(documents)) from None
    if rows and not (hasattr(rows[0], "__len__") and getattr(rows[0], "shape", None) != ()):
        rows = [rows]
    return tuple(tuple(integers("documents", row)) for row in rows), seqlen


def _spans(spans):
    """Returns rows of pairs as nested tuples, or None."""
    if spans is None:
        return None
    try:
        rows = nested(spans)
        if all(_is_flat(row, 2) for row in rows):
            rows = [rows]
        rows = [[integers("spans", span) for span in row] for row in rows]
        return tuple(tuple((begin, end) for begin, end in row) for row in rows)
    except (TypeError, ValueError):
        raise ValueError("spans: must be pairs (begin, end), or a list of pairs for each row; got %s" %
                         shown(spans)) from None


def _slices(slices):
    """Returns rows of slices as nested tuples, with kinds as numbers, or None."""
    if slices is None:
        return None
    if isinstance(slices, Frozen):
        slices = slices.slices
    try:
        rows = nested(slices)
        if rows and all(_is_flat(row, 5) for row in rows):
            rows = [rows]
        return tuple(tuple(map(_slice, row)) for row in rows)
    except (TypeError, ValueError):
        raise ValueError("slices: must be tuples (q_begin, q_end, k_begin, k_end, kind) with a kind of %s, or a "
                         "list of such tuples for each row; got %s" % (", ".join(KINDS), shown(slices))) from None


def _slice(values):
    *bounds, kind = values
    bounds = tuple(integers("slices", bounds))
    if len(bounds) != 4 or any(not -2**31 <= bound < 2**31 for bound in bounds):
        raise ValueError
    return bounds + (KINDS.index(kind),)


def _is_flat(values, length):
    return len(values) == length and not any(isinstance(value, (list, tuple)) for value in values)


def _slopes(slopes):
    """Returns a tuple of floats, one for each head, or None."""
    if slopes is None:
        return None
    if isinstance(slopes, torch.Tensor):
        refuse_gradient("alibi_slopes", slopes)
    try:
        if isinstance(slopes, (str, bytes)):
            raise TypeError
        slopes = list_of(slopes)
        for slope in slopes:
            if isinstance(slope, torch.Tensor):
                refuse_gradient("alibi_slopes", slope)
        return tuple(map(float, slopes))
    except (TypeError, ValueError, RuntimeError):
        raise ValueError("alibi_slopes: must be numbers, one for each head; got %s" % shown(slopes)) from None


def check_tensors(q, k, v, cross):
    """Raises a ValueError or TypeError that names the tensor, unless attention takes these tensors."""
    try:
        if (type(q) is type(k) is type(v) is torch.Tensor and
                q.dtype == k.dtype == v.dtype and q.dtype in DTYPES and k.shape[:3] == v.shape[:3] and
                q.device == k.device == v.device and q.dim() == k.dim() == v.dim() == 4 and
                q.layout is k.layout is v.layout is torch.strided):
            (batch, tokens, heads, head_dim), (kv_batch, keys, kv_heads, kv_dim) = q.shape, k.shape
            if (kv_batch == batch and (cross or keys == tokens) and kv_dim == head_dim and v.shape[3] > 0 and
                    kv_heads > 0 and heads % kv_heads == 0):
                return
    except RuntimeError:  # a nested tensor has no shape
        pass
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor, q)
    _check_fit(q, k, v, cross)


def _check_tensor(name, tensor, q):
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
    if tensor is not q and tensor.dim() != q.dim():
        raise ValueError("%s: must have as many dimensions as q; got the shape %s" % (name, list(tensor.shape)))
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
