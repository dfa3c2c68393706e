"""A call of attention(), without autograd: what its ranks agree on, the library's arguments and schedules.

Ranks of a group tell each other before a call whether their arguments are right and equal."""

import ctypes
import hashlib
import json
import struct

import torch

from . import _library, _ranks
from ._arguments import ALIGNED, DTYPES, OF_16_BITS, check_sinks, check_tensors
from ._library import check, create, library
from .masks import KINDS
from .scores import check_seed

_DIAGONALS = {(False, False): "full", (True, False): "causal", (False, True): "inverse_causal", (True, True): "band"}
_BYTES_A_TOKEN = 32  # about the bytes of a schedule: its positions and masks

# What a call gives the library: burst_call, burst_result and burst_gradients. Each has its size, maybe fields, and
# burst_tensors of 11 numbers: data, dtype, dims, four of shape, four of strides.
_TENSOR = "Qii4q4q"
_CALL = struct.Struct("=QQQi4x" + 4 * _TENSOR)
_RESULT = struct.Struct("=Q" + 3 * _TENSOR)
_GRADIENTS = struct.Struct("=Q" + 6 * _TENSOR)
_LEFT_OUT = (0,) * 11  # in the place of a tensor

# A rank's message has 1 for an error, the tokens of q and of k, the seed it drew, and a digest of the rest.
_MESSAGE = struct.Struct("<qqqQ32s")
_KINDS = {"TypeError": TypeError, "ValueError": ValueError}


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
               ("head_dim", q.shape[3]), ("head_dim of v", v.shape[3]), ("dtype", str(q.dtype)),
               ("requires_grad", needs_grad), ("sinks", sinks is not None),
               ("dropout_seed", "drawn" if drawn else seed)]
    lengths, seed = _compare(ranks, call, own, error, (q, k), seed if drawn else None, seed)
    if known is not None:
        ranks.agreed.put(known, lengths, call.weight)
    return lengths, seed


def refuse(group, device, promised, error):
    """Raises an error that was found before a call, here and in the other ranks' next call.

    promised: with seqlen= the other ranks may not ask. Then they learn that this rank gave up. While a graph is traced,
    the error is raised here only."""
    if _ranks.is_compiling():
        raise error
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


def _attention_of(ranks, call, used=True):
    """Returns the library's attention object of a call's options. Making one is collective. So only forwards count
    as uses, because all ranks make the same ones."""
    found = ranks.attentions.get(call.options) if used else ranks.attentions.peek(call.options)
    if found is not None:
        return found
    strategy = call.strategy
    if strategy == "burst" and call.ulysses_size > 1:
        strategy = "burst+ulysses"
    slopes = call.alibi_slopes or ()
    given = _library.AttentionOptions(
        struct_bytes=ctypes.sizeof(_library.AttentionOptions), strategy=strategy.encode(),
        layout=call.layout.encode(), backward=call.backward.encode(),
        ring_grad_dtype=call.ring_grad_dtype.encode(), softmax_scale=call.softmax_scale or 0,
        deterministic=call.deterministic,
        group_size=call.ulysses_size, ranks_per_node=call.ranks_per_node, fp8_forward=call.fp8,
        softcap=call.softcap, alibi_heads=len(slopes),
        alibi_slopes=(ctypes.c_float * len(slopes))(*slopes) if slopes else None, dropout=call.dropout_p)
    made = create("attention", ranks.device.handle.value, ranks.comm and ranks.comm.value,
                  ctypes.byref(given), keeps=ranks.device.handle)
    return ranks.attentions.put(call.options, made)


def _check_lengths(ranks, name, layout, lengths):
    for rank, length in enumerate(lengths):
        share = _library.local_length(layout, sum(lengths), rank, ranks.size)
        if length != share:
            raise ValueError("%s has %d tokens on rank %d; the layout %s gives it %d of %d" %
                             (name, length, rank, layout, share, sum(lengths)))


def _tokens_of_documents(call, size):
    """Returns (lengths, tokens) of every rank, as the library takes them, where each document is cut separately.

    A rank has one part of each document, in a zigzag two."""
    starts = torch.tensor(call.documents[0], dtype=torch.int64, device="cpu")
    ends = torch.tensor(call.documents[0][1:] + (call.tokens,), dtype=torch.int64, device="cpu")[:len(starts)]
    parts = 2 * size if call.layout == "zigzag" else size
    lengths = (ends - starts) // parts
    tokens = []
    for rank in range(size):
        chunks = (rank, parts - 1 - rank) if call.layout == "zigzag" else (rank,)
        begins = torch.stack([starts + chunk * lengths for chunk in chunks], 1).flatten()
        repeats = lengths.repeat_interleave(len(chunks))
        before = repeats.cumsum(0) - repeats
        count = int(repeats.sum())
        tokens.append(torch.arange(count, dtype=torch.int64, device="cpu") +
                      (begins - before).repeat_interleave(repeats))
    counts = _library.int64s([len(own) for own in tokens])
    everything = torch.cat(tokens).to(torch.int32)
    values = (ctypes.c_int32 * max(1, len(everything)))()
    ctypes.memmove(values, everything.data_ptr(), 4 * len(everything))
    return counts, values


def _check_seqlen(call, seqlen):
    if call.tokens is None or call.tokens == seqlen:
        return
    if call.promised:
        raise ValueError("seqlen is %d, the ranks have %d tokens together" % (call.tokens, seqlen))
    raise ValueError("cu_seqlens ends with %d, the ranks have %d tokens together; padding can be a "
                     "document of its own" % (call.tokens, seqlen))


def _schedule_of(ranks, call, attention, lengths):
    lengths, keys = lengths[:ranks.size], lengths[ranks.size:]
    seqlen = sum(lengths)
    _check_seqlen(call, seqlen)
    sequences = _library.Sequences(struct_bytes=ctypes.sizeof(_library.Sequences), seqlen=seqlen)
    if call.per_document:
        sequences.lengths, sequences.positions = _tokens_of_documents(call, ranks.size)
    else:
        _check_lengths(ranks, "q", call.layout, lengths)
    if call.cross:
        key_layout = call.key_layout or call.layout
        _check_lengths(ranks, "k", key_layout, keys)
        sequences.is_cross, sequences.key_seqlen = True, sum(keys)
        sequences.key_layout = key_layout.encode()
        mask = _mask_across(call, seqlen, sum(keys))
    else:
        mask = _library.mask(call.causal, call.window, call.documents, call.spans, call.slices)
    return create("schedule", attention.value, ctypes.byref(sequences), ctypes.byref(mask),
                  keeps=ranks.device.handle)


def _mask_across(call, queries, keys):
    """Returns the mask of a sequence of queries and another one of keys, whose last tokens are at one place."""
    if call.pairs is not None and call.pairs[1][-1] != keys:
        raise ValueError("key_cu_seqlens ends with %d, the ranks have %d keys together" % (call.pairs[1][-1], keys))
    if not (call.causal or call.window or call.pairs):
        return _library.mask(False, 0, None, None, call.slices)
    if call.slices is not None:
        raise ValueError("slices: must be left out with causal, window or cu_seqlens, because they are the whole mask")
    of_queries, of_keys = call.pairs or ((0, queries), (0, keys))
    row = []
    for begin, end, first, last in zip(of_queries, of_queries[1:], of_keys, of_keys[1:]):
        row += _slices_across(begin, end, first, last, call.causal, call.window)
    return _library.mask(False, 0, None, None, (row,))


def _slices_across(begin, end, first, last, causal, window):
    """Returns the slices in which queries [begin, end) see keys [first, last), with a window and causal or not.

    Positions are counted from the last query and the last key, as in flash-attn's masks."""
    far = end - begin + last - first
    ahead = 0 if causal else min(window - 1, far) if window else far
    back = min(window - 1, far) if window else far
    moved = last - end  # query i is at the place of key i + moved
    reaches_first, reaches_last = first - moved + back + 1, last - moved - ahead - 1  # the queries before and from
    cuts = sorted({begin, end, *(cut for cut in (reaches_first, reaches_last) if begin < cut < end)})
    found = []
    for q_begin, q_end in zip(cuts, cuts[1:]):
        low, high = q_begin >= reaches_first, q_end <= reaches_last  # whether a diagonal bounds the keys
        k_begin = q_begin + moved - back if low else first
        k_end = q_end + moved + ahead if high else last
        if k_begin < k_end:
            found.append((q_begin, q_end, k_begin, k_end, KINDS.index(_DIAGONALS[high, low])))
    return found


def _ready(tensor):
    """Returns the tensor, or a copy whose strides the kernels take, without a pending change of sign."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_contiguous() and tensor.shape[3] % ALIGNED == 0 and tensor.data_ptr() % 16 == 0:
        return tensor
    if tensor.stride(3) != 1 and tensor.shape[3] > 1:
        return tensor.contiguous()
    if tensor.dtype in OF_16_BITS:  # rows must also differ
        odd = tensor.data_ptr() % 16 != 0
        for size, stride in zip(tensor.shape[:3], tensor.stride()[:3]):
            odd = odd or (size > 1 and (stride % ALIGNED != 0 or stride == 0))
        if odd:
            return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _view(tensor):
    """Returns the numbers of a burst_tensor; None is left out."""
    if tensor is None:
        return _LEFT_OUT
    shape = tensor.shape
    if len(shape) == 4:
        return (tensor.data_ptr(), DTYPES[tensor.dtype], 4, *shape, *tensor.stride())
    rest = (0,) * (4 - len(shape))
    return (tensor.data_ptr(), DTYPES[tensor.dtype], len(shape), *shape, *rest, *tensor.stride(), *rest)


def _packed(form, *fields, tensors):
    """Returns the bytes of a struct of the library."""
    numbers = [form.size, *fields]
    for tensor in tensors:
        numbers += _view(tensor)
    return form.pack(*numbers)


def _cut(tensor, columns):
    """Returns the first columns, contiguous: what is left of a result without v's padding."""
    return tensor if tensor.shape[3] == columns else tensor[..., :columns].contiguous()


def _widen(tensor, columns):
    """Returns the tensor with columns of zeros."""
    return tensor if tensor.shape[3] == columns else torch.nn.functional.pad(tensor, (0, columns - tensor.shape[3]))


def _empty_like(tensor):
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class State:
    """What a call's backward needs, without tensors and dropout's seed."""

    __slots__ = ("ranks", "attention", "schedule", "wants_largest")

    def __init__(self, ranks, attention, schedule, wants_largest):
        self.ranks, self.attention, self.schedule = ranks, attention, schedule
        self.wants_largest = wants_largest

    def packed_call(self, q, k, v, sinks, seed):
        return _packed(_CALL, self.schedule.value, seed or 0, self.wants_largest, tensors=(q, k, v, sinks))

    def value_dim(self, q, k, v, sinks):
        """Returns the head_dim of the v that the kernels take: its own or, for kernels of one width only, q's."""
        if v.shape[3] >= q.shape[3]:
            return v.shape[3]
        refused = library().burst_check(self.attention.value, self.packed_call(q, k, v, sinks, None))
        return q.shape[3] if refused else v.shape[3]


def _state(ranks, call, lengths, used=True):
    attention = _attention_of(ranks, call, used)
    key = (call.of_schedule(), *lengths)
    schedule = ranks.schedules.get(key)
    if schedule is None:
        schedule = _schedule_of(ranks, call, attention, lengths)
        rows = max(1, len(call.documents or ()), len(call.spans or ()), len(call.slices or ()))
        ranks.schedules.put(key, schedule, call.weight + _BYTES_A_TOKEN * rows * sum(lengths))
    return State(ranks, attention, schedule, call.return_max_logit)


def state_of(group, call, tensor, lengths):
    """Returns the State of a backward that has not kept one."""
    ranks = _ranks.ranks_of(group, tensor.device)
    with ranks.device.lock:
        ranks.device.enter()
        return _state(ranks, call, lengths, used=False)


def device_of(*tensors):
    """Returns the first tensor's device, or None."""
    return next((tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)), None)


def _fail_unless_alike(ranks, error):
    """Tells the other ranks of an error that only this rank has, because they go on and would wait. What the
    library refuses, it refuses on all of them."""
    refused = isinstance(error, (ValueError, _library.BurstError))
    if not refused or isinstance(error, _library.OutOfMemoryError):
        ranks.fail(error)


def forward(q, k, v, group, call, needs_grad, sinks=None, seed=None, drawn=False):
    """Returns out, lse, the largest score of each head or None, the tokens of every rank and the seed (as agree),
    and the State. Collective. seed is an integer if weights are dropped, else None."""
    if getattr(q, "is_cuda", False):
        _ranks.refuse_capture()
    ranks = _ranks.ranks_of(group, q.device if type(q) is torch.Tensor else device_of(q, k, v))
    with ranks.device.lock:
        ranks.device.enter()
        lengths, seed = agree(ranks, call, q, k, v, sinks, needs_grad, seed, drawn)
        try:
            state = _state(ranks, call, lengths)
            q, k, v, sinks = _ready(q), _ready(k), _ready(v), _ready_sinks(sinks, q)
            value_dim = v.shape[3]
            v = _widen(v, state.value_dim(q, k, v, sinks))
            out, lse, largest = q.new_empty(out_shape(q, v)), q.new_empty(lse_shape(q), dtype=lse_dtype(q)), None
            if call.return_max_logit:
                largest = torch.empty(max_logit_shape(q), dtype=torch.float32, device="cpu")
            given = state.packed_call(q, k, v, sinks, seed)
            result = _packed(_RESULT, tensors=(out, lse, largest))
        except BaseException as error:
            _fail_unless_alike(ranks, error)
            raise
        check(library().burst_forward(state.attention.value, given, result))
    return _cut(out, value_dim), lse, largest, lengths, seed, state


def backward(q, k, v, sinks, out, lse, dout, dlse, state, seed=None):
    """Returns dq, dk, dv and dsinks. Collective. dlse may be None. Without sinks, which may be None, dsinks is
    None. seed is the one that forward returned."""
    if q.is_cuda:
        _ranks.refuse_capture()
    state.ranks.check_not_forked()
    device = state.ranks.device
    with device.lock:
        device.enter()
        try:
            q, k, v, out, dout = map(_ready, (q, k, v, out, dout))
            lse, dlse = _dense(lse), None if dlse is None else _dense(dlse)
            logits = _ready_sinks(sinks, q)
            value_dim, taken = v.shape[3], state.value_dim(q, k, v, logits)
            v, out, dout = _widen(v, taken), _widen(out, taken), _widen(dout, taken)
            dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
            dsinks = None if sinks is None else _empty_like(logits)
            given = state.packed_call(q, k, v, logits, seed)
            result = _packed(_RESULT, tensors=(out, lse, None))
            gradients = _packed(_GRADIENTS, tensors=(dout, dlse, dq, dk, dv, dsinks))
        except BaseException as error:
            _fail_unless_alike(state.ranks, error)
            raise
        check(library().burst_backward(state.attention.value, given, result, gradients))
    return dq, dk, _cut(dv, value_dim), None if sinks is None else dsinks.to(sinks.dtype)


def _dense(tensor):
    return tensor.resolve_neg().contiguous()


def _ready_sinks(sinks, q):
    return None if sinks is None else _dense(sinks.to(lse_dtype(q)))


def out_shape(q, v):
    return (*q.shape[:3], v.shape[3])


def lse_shape(q):
    return (q.shape[0], q.shape[2], q.shape[1])


def max_logit_shape(q):
    return (q.shape[0], q.shape[2])


def lse_dtype(q):
    return torch.float32 if q.dtype in OF_16_BITS else q.dtype
