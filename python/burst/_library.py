"""libburst.so through ctypes: burst/c/burst.h in Python, with errors as exceptions."""

import array
import ctypes
import os
import threading
from ctypes import (POINTER, byref, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t,
                    c_void_p)

from ._graphs import constant

_VERSION = 1  # BURST_C_VERSION


class BurstError(RuntimeError):
    """The library, CUDA or NCCL failed, or the machine or the build lacks something."""


class RankLostError(BurstError):
    """Another rank of the group was lost, gave up, or did not come in time."""


class OutOfMemoryError(BurstError):
    """The device, or the host, has no memory left for a call."""


_EXCEPTIONS = {1: ValueError, 2: RankLostError, 3: OutOfMemoryError, 4: BurstError, 5: BurstError}


class ContextOptions(ctypes.Structure):
    ALLOCATE = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_void_p)
    RELEASE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("device", c_int32),
        ("index", c_int32),
        ("allocate", ALLOCATE),
        ("release", RELEASE),
        ("user", c_void_p),
    ]


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", c_char * 192)]


class AttentionOptions(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("strategy", c_char_p),
        ("layout", c_char_p),
        ("backward", c_char_p),
        ("ring_grad_dtype", c_char_p),
        ("softmax_scale", c_double),
        ("deterministic", c_int32),
        ("group_size", c_int32),
        ("ranks_per_node", c_int32),
        ("fp8_forward", c_int32),
        ("softcap", c_double),
        ("alibi_heads", c_int64),
        ("alibi_slopes", POINTER(c_float)),
        ("dropout", c_double),
    ]


class Slice(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("q_begin", "q_end", "k_begin", "k_end", "kind")]


class Mask(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("causal", c_int32),
        ("window", c_int64),
        ("document_rows", c_int64),
        ("document_counts", POINTER(c_int64)),
        ("document_starts", POINTER(c_int32)),
        ("span_rows", c_int64),
        ("span_counts", POINTER(c_int64)),
        ("span_bounds", POINTER(c_int32)),
        ("slice_rows", c_int64),
        ("slice_counts", POINTER(c_int64)),
        ("slices", POINTER(Slice)),
    ]


class Sequences(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", c_size_t),
        ("seqlen", c_int64),
        ("lengths", POINTER(c_int64)),
        ("positions", POINTER(c_int32)),
        ("is_cross", c_int32),
        ("key_seqlen", c_int64),
        ("key_layout", c_char_p),
    ]


_HANDLE = POINTER(c_void_p)
_FUNCTIONS = {
    "burst_context_create": [POINTER(ContextOptions), _HANDLE],
    "burst_context_set_stream": [c_void_p, c_void_p],
    "burst_context_set_threads": [c_void_p, c_int32],
    "burst_unique_id_create": [c_char_p, POINTER(UniqueId)],
    "burst_comm_create": [c_void_p, POINTER(UniqueId), c_int32, c_int32, c_double, _HANDLE],
    "burst_comm_finish": [c_void_p],
    "burst_comm_abort": [c_void_p, c_char_p],
    "burst_comm_all_gather": [c_void_p, c_void_p, c_int64, c_void_p],
    "burst_attention_create": [c_void_p, c_void_p, POINTER(AttentionOptions), _HANDLE],
    "burst_slices_tree": [c_int32, c_int64, POINTER(c_int32), POINTER(c_int64), POINTER(Slice)],
    "burst_slices_window_with_global_tokens": [
        c_int32, c_int32, c_int64, POINTER(c_int32), c_int32, POINTER(c_int64), POINTER(Slice)],
    "burst_slices_blocks": [
        c_int32, c_int32, c_int64, POINTER(c_int64), POINTER(c_int32), c_int32, POINTER(c_int64),
        POINTER(Slice)],
    "burst_alibi_slopes": [c_int64, POINTER(c_float)],
    "burst_schedule_create": [c_void_p, POINTER(Sequences), POINTER(Mask), _HANDLE],
    "burst_positions": [
        c_char_p, c_int64, c_int32, c_int32, POINTER(c_int64), POINTER(c_int32)],
    "burst_balanced_positions": [
        POINTER(Mask), c_int64, c_int32, c_int32, c_int32, POINTER(c_int64), POINTER(c_int32)],
    "burst_check": [c_void_p, c_void_p],
    "burst_forward": [c_void_p, c_void_p, c_void_p],
    "burst_backward": [c_void_p, c_void_p, c_void_p, c_void_p],
}
_DESTROYERS = ["context", "comm", "attention", "schedule"]

_lock = threading.Lock()
_library = None


def library():
    """The loaded library, a ctypes.CDLL: $BURST_LIBRARY, or the one next to this file."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
    return _library


def _load():
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.environ.get("BURST_LIBRARY") or os.path.join(here, "libburst.so")
    loaded = ctypes.CDLL(path)
    loaded.burst_last_error.restype = c_char_p
    loaded.burst_version.restype = c_char_p
    if loaded.burst_c_version() < _VERSION:
        raise ImportError("%s has version %d of the C interface, this package needs %d" %
                          (path, loaded.burst_c_version(), _VERSION))
    for name, arguments in _FUNCTIONS.items():
        getattr(loaded, name).argtypes = arguments
    for kind in _DESTROYERS:
        destroy = getattr(loaded, "burst_%s_destroy" % kind)
        destroy.argtypes, destroy.restype = [c_void_p], None
    return loaded


def check(code):
    """Raises what a function's code stands for."""
    if code != 0:
        message = library().burst_last_error().decode(errors="replace")
        raise _EXCEPTIONS.get(code, BurstError)(message)


class Handle:
    """An object of the library, destroyed with this one. `keeps`: what must live as long."""

    def __init__(self, kind, value, keeps=None):
        self.value, self._keeps = value, keeps
        self._destroy = getattr(library(), "burst_%s_destroy" % kind)

    def __del__(self):
        value, self.value = getattr(self, "value", None), None
        if value:
            self._destroy(value)


def create(kind, *arguments, keeps=None):
    """Returns the object that burst_<kind>_create makes of the arguments."""
    value = c_void_p()
    check(getattr(library(), "burst_%s_create" % kind)(*arguments, byref(value)))
    return Handle(kind, value.value, keeps)


def int64s(values):
    """Returns an array for C, which never has length 0."""
    return (c_int64 * max(1, len(values)))(*values)


def int32s(values):
    """Returns an array for C, which never has length 0. Raises ValueError for a number that does not fit."""
    try:
        return (c_int32 * max(1, len(values))).from_buffer(array.array("i", values or [0]))
    except OverflowError:
        raise ValueError("positions must be below 2^31; got %s" % max(values, key=abs)) from None


def mask(causal, window, documents, spans=None, slices=None):
    """Returns the burst_mask of rows of document starts, of (begin, end) and of five numbers, or None."""
    documents, spans = documents or (), spans or ()
    given = Mask(
        struct_bytes=ctypes.sizeof(Mask), causal=causal, window=window,
        document_rows=len(documents), document_counts=int64s([len(row) for row in documents]),
        document_starts=int32s([start for row in documents for start in row]),
        span_rows=len(spans), span_counts=int64s([len(row) for row in spans]),
        span_bounds=int32s([bound for row in spans for span in row for bound in span]))
    if slices is not None:
        numbers = int32s([number for row in slices for part in row for number in part] or [0] * 5)
        given.slice_rows, given.slice_counts = len(slices), int64s([len(row) for row in slices])
        given.slices = ctypes.cast(numbers, POINTER(Slice))
    return given


@constant
def slices(name, *arguments):
    """Returns the slices of burst_slices_<name> as a text of five numbers for each. A text is the one kind of
    result that a compiled graph takes as a constant. Lists are passed with their lengths."""
    given = []
    for argument in arguments:
        if isinstance(argument, list):
            rows = name == "blocks"
            given += [len(argument)] + ([int64s([len(row) for row in argument])] if rows else [])
            given.append(int32s([number for row in argument for number in row] if rows else argument))
        else:
            given.append(argument)
    make, count = getattr(library(), "burst_slices_" + name), c_int64()
    check(make(*given, byref(count), None))
    made = (Slice * max(1, count.value))()
    check(make(*given, byref(count), made))
    return " ".join("%d %d %d %d %d" % (part.q_begin, part.q_end, part.k_begin, part.k_end, part.kind)
                    for part in made[:count.value])


@constant
def alibi_slopes(heads):
    """Returns the slopes for this number of heads, as a text."""
    made = (c_float * max(1, heads))()
    check(library().burst_alibi_slopes(heads, made))
    return " ".join(map(repr, made))


def positions(layout, seqlen, rank, size):
    """Returns the increasing positions of a rank's tokens, a ctypes array of int32, and their number."""
    length = c_int64()
    check(library().burst_positions(layout.encode(), seqlen, rank, size, byref(length), None))
    result = (c_int32 * max(1, length.value))()
    check(library().burst_positions(layout.encode(), seqlen, rank, size, byref(length), result))
    return result, length.value


def balanced_positions(given, seqlen, rank, size, group_size):
    """Returns the positions as positions(), for the layout "balanced" and a mask()."""
    length = c_int64()
    result = (c_int32 * max(1, local_length("balanced", seqlen, rank, size)))()
    check(library().burst_balanced_positions(byref(given), seqlen, rank, size, group_size, byref(length),
                                             result))
    return result, length.value


def local_length(layout, seqlen, rank, size):
    length = c_int64()
    check(library().burst_positions(layout.encode(), seqlen, rank, size, byref(length), None))
    return length.value
