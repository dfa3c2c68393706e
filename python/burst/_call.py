"""A call of attention(), without autograd: its arguments, their checks, the agreement of the ranks, and
what the library is told."""

import ctypes
import hashlib
import math

import torch

from . import _library, _ranks
from ._library import check, create, library
from .masks import Frozen
from .scores import check_seed, drops

LAYOUTS = ("zigzag", "contiguous", "striped", "balanced")
STRATEGIES = ("burst", "ring", "ulysses", "burst+ulysses")
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
_OF_16_BITS = (torch.bfloat16, torch.float16)
SLICE_KINDS = ("full", "causal", "inverse_causal", "band")
_CACHED_SCHEDULES = 64


class Call:
    """What to compute and over which ranks: all of attention()'s arguments but the tensors.

    Made by make_call, which normalizes them; two equal calls are one object."""

    __slots__ = ("group", "options", "documents", "seqlen", "promised", "tokens", "spans", "slices",
                 "scores", "cross", "text", "checked")

    def __init__(self, group, options, documents, seqlen, promised, tokens, spans, slices, value_dim,
                 scores):
        self.group, self.options = group, options
        self.documents, self.seqlen, self.tokens = documents, seqlen, tokens
        self.spans, self.slices = spans, slices
        self.scores = scores  # as scores_of gives it
        self.cross = dict(options)["cross"]  # keys of another sequence
        self.promised = promised  # the caller gave seqlen: ranks compare arguments once
        self.checked = False  # whether the options are known to be good
        fields = list(options) + [("seqlen", seqlen), ("documents", _digest(documents)),
                                  ("token positions", _digest(tokens)), ("spans", _digest(spans)),
                                  ("slices", _digest(slices)), ("head_dim of v", value_dim)]
        self.text = ";".join("%s=%s" % field for field in fields)


def _digest(value):
    if value is None:
        return None
    return hashlib.sha1(repr(value).encode()).hexdigest()[:12]


_calls = {}
_numbers, _by_number = {}, []  # of calls that are arguments of operators


def make_call(group, causal, softmax_scale, window, documents, cu_seqlens, layout, strategy,
              ring_grad_dtype, deterministic, backward, ulysses_size, ranks_per_node, seqlen,
              spans=None, tokens=None, cross=False, key_layout=None, slices=None, fp8=False,
              value_dim=None, scores=None):
    """The Call of these arguments. Errors are kept in it for the call itself, where all ranks of the
    group learn of them."""
    given = None
    if (documents is None and cu_seqlens is None and tokens is None and spans is None and
            (slices is None or isinstance(slices, Frozen)) and not cross):  # the usual: look first
        given = (id(group), causal, softmax_scale, window, layout, strategy, ring_grad_dtype,
                 deterministic, backward, ulysses_size, ranks_per_node, seqlen, slices, fp8, value_dim,
                 scores)
        try:
            found = _calls.get(given)
        except TypeError:  # something that cannot be an option
            given = found = None
        if found is not None:
            return found
    options = (("causal", bool(causal)),
               ("softmax_scale", None if softmax_scale is None else float(softmax_scale)),
               ("window", window), ("layout", layout), ("strategy", strategy),
               ("ring_grad_dtype", _grad_dtype_name(ring_grad_dtype)),
               ("deterministic", bool(deterministic)), ("backward", backward),
               ("ulysses_size", ulysses_size), ("ranks_per_node", ranks_per_node), ("cross", cross),
               ("key_layout", key_layout), ("fp8", bool(fp8)),
               *zip(("softcap", "alibi_slopes", "dropout_p", "return_max_logit"),
                    scores if isinstance(scores, tuple) else (0, None, 0, False)))
    promised = seqlen is not None
    documents, seqlen = rows_of_documents(documents, cu_seqlens, seqlen)
    spans, slices = _spans(spans), _slices(slices)
    key = (id(group), options, documents, seqlen, promised, tokens, spans, slices, value_dim, scores)
    call = _calls.get(key)
    if call is None:
        if len(_calls) >= 4096:  # every batch has documents of its own
            _calls.clear()
        call = _calls[key] = Call(group, options, documents, seqlen, promised, tokens, spans,
                                  slices, value_dim, scores)
    if given is not None:
        _calls[given] = call
    return call


def number_of(call):
    """The number by which an operator is given a Call; call_of is its inverse."""
    if call not in _numbers:
        _numbers[call] = len(_by_number)
        _by_number.append(call)
    return _numbers[call]


def call_of(number):
    return _by_number[number]


def _grad_dtype_name(dtype):
    names = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}
    return names.get(dtype, dtype) if not isinstance(dtype, str) else dtype


def list_of(values):
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def rows_of_documents(documents, cu_seqlens, seqlen):
    """Rows of document starts as nested tuples, or None; and the length that cu_seqlens gives."""
    if cu_seqlens is not None:
        if documents is not None:
            return ("documents and cu_seqlens say the same; give one of them",), seqlen
        bounds = [int(bound) for bound in list_of(cu_seqlens)]
        if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in zip(bounds, bounds[1:])):
            return ("cu_seqlens must begin with 0 and not decrease",), seqlen
        if seqlen is not None and bounds[-1] != seqlen:
            return ("cu_seqlens ends with %d, seqlen is %d" % (bounds[-1], seqlen),), seqlen
        starts = sorted(set(bounds[:-1]) - {bounds[-1]}) if bounds[-1] else []
        return (tuple(starts),), bounds[-1]
    if documents is None:
        return None, seqlen
    rows = list_of(documents)
    if rows and not isinstance(rows[0], (list, tuple, torch.Tensor)):
        rows = [rows]
    return tuple(tuple(int(start) for start in list_of(row)) for row in rows), seqlen


def _spans(spans):
    """Rows of pairs as nested tuples, or None; a text for what are none."""
    if spans is None:
        return None
    try:
        rows = list_of(spans)
        if all(_is_flat(row, 2) for row in rows):
            rows = [rows]
        rows = [[list_of(span) for span in list_of(row)] for row in rows]
        return tuple(tuple((int(begin), int(end)) for begin, end in row) for row in rows)
    except (TypeError, ValueError):
        return "spans: %r are no pairs (begin, end), nor a list of them for each row" % (spans,)


def _slices(slices):
    """Rows of slices as nested tuples, the kinds as numbers, or None; a text for what are none."""
    if slices is None:
        return None
    if isinstance(slices, Frozen):
        slices = slices.slices
    try:
        rows = list_of(slices)
        if rows and all(_is_flat(row, 5) for row in rows):
            rows = [rows]
        return tuple(tuple(_slice(values) for values in list_of(row)) for row in rows)
    except (TypeError, ValueError):
        text = repr(slices)
        return ("slices: %s are no (q_begin, q_end, k_begin, k_end, kind) with a kind of %s, nor a "
                "list of them for each row" %
                (text if len(text) < 200 else text[:200] + "...", ", ".join(SLICE_KINDS)))


def _slice(values):
    *bounds, kind = list_of(values)
    bounds = tuple(int(bound) for bound in bounds)
    if len(bounds) != 4 or any(not -2**31 <= bound < 2**31 for bound in bounds):
        raise ValueError
    return bounds + (SLICE_KINDS.index(kind),)


def _is_flat(values, length):
    values = list_of(values)
    return len(values) == length and not any(isinstance(value, (list, tuple)) for value in values)


def _check_options(call):
    options = dict(call.options)
    for texts in (call.spans, call.slices, call.scores):
        if isinstance(texts, str):
            raise ValueError(texts)
    if call.slices is not None:
        for name in ("causal", "window", "documents", "spans"):
            if options.get(name) or (name in ("documents", "spans") and
                                     getattr(call, name) is not None):
                raise ValueError("slices are the whole mask: no %s beside them%s" %
                                 (name, " (causal=False)" if name == "causal" else ""))
    if call.documents is not None:
        for row in call.documents:
            if isinstance(row, str):
                raise ValueError(row)
    for name, known in (("layout", LAYOUTS), ("strategy", STRATEGIES),
                        ("key_layout", (None, *LAYOUTS)), ("ring_grad_dtype", ("fp32", "bf16")), ("backward", ("auto", "burst", "ring"))):
        if options[name] not in known:
            raise ValueError("%s: there is no %r, only %s" %
                             (name, options[name], ", ".join(map(repr, known))))
    for name in ("window", "ulysses_size", "ranks_per_node"):
        if not isinstance(options[name], int) or options[name] < 0:
            raise ValueError("%s: %r is no number of at least 0" % (name, options[name]))
    scale = options["softmax_scale"]
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError("softmax_scale: %r is not positive and finite" % scale)


def _check_tensors(q, k, v, cross):
    try:
        if (q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES and k.shape == v.shape and
                q.device == k.device == v.device and q.dim() == k.dim() == 4):
            (batch, tokens, heads, head_dim), (kv_batch, keys, kv_heads, kv_dim) = q.shape, k.shape
            if (kv_batch == batch and (cross or keys == tokens) and kv_dim == head_dim and kv_heads > 0 and
                    heads % kv_heads == 0 and (q.dtype not in _OF_16_BITS or q.is_cuda)):
                return
    except AttributeError:
        pass
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("%s is a %s, no torch.Tensor" % (name, type(tensor).__name__))
        if tensor.dim() != 4:
            raise ValueError("%s has the shape %s; expected [batch, tokens, heads, head_dim] or "
                             "[tokens, heads, head_dim]" % (name, list(tensor.shape)))
        if tensor.dtype not in _DTYPES or (tensor.dtype in _OF_16_BITS and
                                           tensor.device.type == "cpu"):
            raise ValueError("%s is %s on %s; Burst takes float32, float64 and, on GPUs, bfloat16 "
                             "and float16" % (name, tensor.dtype, tensor.device))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError("%s is %s, q is %s" % (name, tensor.dtype, q.dtype))
        if tensor.device != q.device:
            raise ValueError("%s is on %s, q is on %s" % (name, tensor.device, q.device))
        if (tensor.shape[0] != q.shape[0] or tensor.shape[3] != q.shape[3] or
                (not cross and tensor.shape[1] != q.shape[1])):
            raise ValueError("%s has the shape %s, which does not fit q's %s: %s and head_dim must be "
                             "equal" % (name, list(tensor.shape), list(q.shape),
                                        "batch" if cross else "batch, tokens"))
    if cross and k.shape[1] != v.shape[1]:
        raise ValueError("v has %d tokens, k has %d" % (v.shape[1], k.shape[1]))
    if k.shape[2] != v.shape[2]:
        raise ValueError("v has %d heads, k has %d" % (v.shape[2], k.shape[2]))
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ValueError("k has %d heads, which do not divide q's %d" % (k.shape[2], q.shape[2]))


def check_sinks(sinks, q):
    if not isinstance(sinks, torch.Tensor):
        raise TypeError("sinks is a %s, no torch.Tensor" % type(sinks).__name__)
    if sinks.shape != (q.shape[2],):
        raise ValueError("sinks has the shape %s; expected [heads], here [%d]" %
                         (list(sinks.shape), q.shape[2]))
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError("sinks is %s on %s; expected floating-point numbers on %s, where q is" %
                         (sinks.dtype, sinks.device, q.device))


def _agree(ranks, call, q, k, v, sinks, needs_grad, seed):
    """Checks this rank's arguments and compares them with the others'. Returns the tokens of each
    rank; of cross-attention those of q, then those of k. What is wrong on one rank is an error on all
    of them."""
    error = None
    try:
        if not call.checked:
            _check_options(call)
            call.checked = True
        _check_tensors(q, k, v, call.cross)
        if sinks is not None:
            check_sinks(sinks, q)
        if seed is not None:
            check_seed(seed)
    except (TypeError, ValueError) as raised:
        error = raised
    if ranks.size == 1:
        if error is not None:
            raise error
        return [q.shape[1], k.shape[1]] if call.cross else [q.shape[1]]
    if call.promised and call in ranks.agreed:
        if error is not None:  # the others do not ask
            ranks.fail(error)
            raise error
        lengths = ranks.agreed[call].get((q.shape, k.shape[1:3], q.dtype, needs_grad))
        if lengths is not None:
            return lengths
    if error is not None:
        text = "E" + str(error)
    else:
        text = "%d,%d;batch=%d;heads=%d;kv heads=%d;head_dim=%d;dtype=%s;requires_grad=%s;dropout_seed=%s;%s" % (
            q.shape[1], k.shape[1], q.shape[0], q.shape[2], k.shape[2], q.shape[3], q.dtype, needs_grad, seed, call.text)
    texts = ranks.exchange(text)
    if error is not None:
        raise error
    for rank, other in enumerate(texts):
        if other.startswith("E"):
            raise ValueError("rank %d: %s" % (rank, other[1:]))
    own = text.split(";")
    for rank, other in enumerate(texts):
        for mine, theirs in zip(own[1:], other.split(";")[1:]):
            if mine != theirs:
                raise ValueError("%s: the ranks differ: %r on rank %d, %r on rank %d" % (
                    mine.split("=")[0], mine.split("=")[1], ranks.rank, theirs.split("=")[1], rank))
    pairs = [other.split(";")[0].split(",") for other in texts]
    lengths = [int(tokens) for tokens, _ in pairs]
    if call.cross:
        lengths += [int(keys) for _, keys in pairs]
    if call.promised:
        if len(ranks.agreed) >= _CACHED_SCHEDULES:
            ranks.agreed.clear()  # on all ranks alike
        ranks.agreed.setdefault(call, {})[q.shape, k.shape[1:3], q.dtype, needs_grad] = lengths
    return lengths


def _int64s(values):
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def _int32s(values):
    return (ctypes.c_int32 * max(1, len(values)))(*values)


def _attention_of(ranks, call):
    found = ranks.attentions.get(call.options)
    if found is None:
        options = dict(call.options)
        strategy = options["strategy"]
        if strategy == "burst" and options["ulysses_size"] > 1:
            strategy = "burst+ulysses"
        softcap, slopes, dropout, max_logit = call.scores or (0, None, 0, False)
        given = _library.AttentionOptions(
            struct_bytes=ctypes.sizeof(_library.AttentionOptions), strategy=strategy.encode(),
            layout=options["layout"].encode(), backward=options["backward"].encode(),
            ring_grad_dtype=options["ring_grad_dtype"].encode(), causal=options["causal"],
            window=options["window"], softmax_scale=options["softmax_scale"] or 0,
            deterministic=options["deterministic"], group_size=options["ulysses_size"],
            ranks_per_node=options["ranks_per_node"], fp8_forward=options["fp8"],
            softcap=softcap, alibi_heads=len(slopes or ()),
            alibi_slopes=(ctypes.c_float * len(slopes))(*slopes) if slopes else None, dropout=dropout,
            max_logits=max_logit)
        found = ranks.attentions[call.options] = create(
            "attention", ranks.device.handle.value, ranks.comm and ranks.comm.value,
            ctypes.byref(given), keeps=ranks.device.handle)
    return found


def _check_lengths(ranks, name, layout, lengths):
    for rank, length in enumerate(lengths):
        share = _library.local_length(layout, sum(lengths), rank, ranks.size)
        if length != share:
            raise ValueError("%s has %d tokens on rank %d; the layout %s gives it %d of %d" %
                             (name, length, rank, layout, share, sum(lengths)))


def _schedule_of(ranks, call, lengths):
    lengths, keys = lengths[:ranks.size], lengths[ranks.size:]
    seqlen = sum(lengths)
    if call.seqlen is not None and call.seqlen != seqlen:
        raise ValueError("seqlen is %d, the ranks have %d tokens together" % (call.seqlen, seqlen))
    attention = _attention_of(ranks, call)
    rows = call.documents or ()
    documents = (len(rows), _int64s([len(row) for row in rows]),
                 _int32s([start for row in rows for start in row]))
    lengths_and_tokens = None, None
    if call.tokens is not None:
        lengths_and_tokens = (_int64s([len(own) for own in call.tokens]),
                              _int32s([token for own in call.tokens for token in own]))
    else:
        options = dict(call.options)
        _check_lengths(ranks, "q", options["layout"], lengths)
        if call.cross:
            key_layout = options["key_layout"] or options["layout"]
            _check_lengths(ranks, "k", key_layout, keys)
            return create("schedule", attention.value, seqlen, sum(keys), key_layout.encode(),
                          function="burst_schedule_create_cross", keeps=ranks.device.handle)
    if call.slices is not None:
        return create("schedule", attention.value, seqlen, *lengths_and_tokens, len(call.slices),
                      _int64s([len(row) for row in call.slices]),
                      _int32s([value for row in call.slices for part in row for value in part]),
                      function="burst_schedule_create_sliced", keeps=ranks.device.handle)
    rows = call.spans or ()
    spans = (len(rows), _int64s([len(row) for row in rows]),
             _int32s([bound for row in rows for span in row for bound in span]))
    return create("schedule", attention.value, seqlen, *lengths_and_tokens, *documents, *spans,
                  function="burst_schedule_create_with_spans", keeps=ranks.device.handle)


def _ready(tensor):
    """The tensor, or a copy whose strides the kernels take."""
    if tensor.is_contiguous() and tensor.shape[3] % 8 == 0 and tensor.data_ptr() % 16 == 0:
        return tensor
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        return tensor.contiguous()
    if tensor.dtype in _OF_16_BITS:  # rows begin at multiples of 16 bytes, and are not the same
        odd = tensor.data_ptr() % 16 != 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3]):
            odd = odd or (size > 1 and (stride % 8 != 0 or stride == 0))
        if odd:
            return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _view(tensor):
    """The numbers of a burst_tensor."""
    shape = tensor.shape
    rest = (0,) * (4 - len(shape))
    return (tensor.data_ptr(), _DTYPES[tensor.dtype], len(shape), *shape, *rest, *tensor.stride(), *rest)


def _empty_like(tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class State:
    """What the backward of a call needs besides tensors and the seed of dropout."""

    __slots__ = ("ranks", "attention", "schedule")

    def __init__(self, ranks, attention, schedule):
        self.ranks, self.attention, self.schedule = ranks, attention, schedule


def _state(ranks, call, lengths):
    key = (id(call), *lengths)  # the Call is kept
    found = ranks.states.get(key)
    if found is None:
        found = (State(ranks, _attention_of(ranks, call), _schedule_of(ranks, call, lengths)), call)
        if len(ranks.states) >= _CACHED_SCHEDULES:
            ranks.states.pop(next(iter(ranks.states)))  # the oldest
        ranks.states[key] = found
    return found[0]


def state_of(call, tensor, lengths):
    """For a backward that has kept no State."""
    ranks = _ranks.ranks_of(call.group, tensor)
    with ranks.device.lock:
        ranks.device.enter()
        return _state(ranks, call, lengths)


def _set_seed(state, seed):
    if seed is not None:
        check(library().burst_attention_set_dropout_seed(state.attention.value, seed))


def forward(q, k, v, call, needs_grad, sinks=None, seed=None):
    """out, lse, the largest score of each head (None where it is not asked for), the tokens of every rank
    (as _agree) and the State. Collective. sinks are checked, not added; seed: an integer where weights are
    dropped, else None."""
    seed = seed if drops(call.scores) else None
    ranks = _ranks.ranks_of(call.group, q)
    with ranks.device.lock:
        ranks.device.enter()
        lengths = _agree(ranks, call, q, k, v, sinks, needs_grad, seed)
        state = _state(ranks, call, lengths)
        _set_seed(state, seed)
        q, k, v = _ready(q), _ready(k), _ready(v)
        out, lse = _empty_like(q), q.new_empty(lse_shape(q), dtype=lse_dtype(q))
        tensors = ranks.device.tensors[5]
        tensors.set(*_view(q), *_view(k), *_view(v), *_view(out), *_view(lse))
        check(library().burst_forward(state.attention.value, state.schedule.value, *tensors.pointers))
        max_logit = None
        if asks_for_max_logit(call):
            max_logit = torch.empty(max_logit_shape(q), dtype=torch.float32)
            tensors = ranks.device.tensors[1]
            tensors.set(*_view(max_logit))
            check(library().burst_max_logits(state.attention.value, *tensors.pointers))
    return out, lse, max_logit, lengths, state


def backward(q, k, v, out, lse, dout, dlse, state, seed=None):
    """dq, dk and dv. Collective; dlse may be None; seed as forward had it."""
    device = state.ranks.device
    with device.lock:
        device.enter()
        _set_seed(state, seed)
        q, k, v, out, dout = map(_ready, (q, k, v, out, dout))
        lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
        dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
        sums = () if dlse is None else _view(dlse)
        tensors = device.tensors[9 if dlse is None else 10]
        tensors.set(*_view(q), *_view(k), *_view(v), *_view(out), *_view(lse), *_view(dout), *sums,
                    *_view(dq), *_view(dk), *_view(dv))
        pointers = tensors.pointers
        if dlse is None:
            pointers = (*pointers[:6], None, *pointers[6:])
        check(library().burst_backward(state.attention.value, state.schedule.value, *pointers))
    return dq, dk, dv


def lse_shape(q):
    return (q.shape[0], q.shape[2], q.shape[1])


def asks_for_max_logit(call):
    return call.scores is not None and call.scores[3]


def max_logit_shape(q):
    return (q.shape[0], q.shape[2])


def lse_dtype(q):
    return torch.float32 if q.dtype in _OF_16_BITS else q.dtype
