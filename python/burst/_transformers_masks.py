"""Masks of transformers as arguments of attention(). burst.register has transformers' masking_utils call these
functions in place of sdpa_mask.

transformers describes a mask by a function of (row, head, query, key) that is composed of a few known
ones. They are read here, which takes O(n). Others are evaluated for all pairs of tokens, as sdpa_mask
does, up to _MOST_PAIRS."""

import inspect

import torch

from . import _intervals
from ._transformers_positions import is_compiling, require_in_graph
from .masks import Frozen

_MOST_PAIRS = 2**28  # 16,384 x 16,384; for unknown mask functions, whose values are evaluated
_SAMPLED = 16  # queries for which a mask as read is compared with its values
_ROWS = 256  # queries whose values are evaluated at a time
_NO_LIMIT = 2**40
INSTEAD = "; use attn_implementation='sdpa' for this model"
CACHE = ("past_key_values: keys of a cache (%s queries, %s keys) are not served; set use_cache=False, "
         "or use attn_implementation='sdpa' to generate")
PADDED_CROSS = ("attention_mask: cross-attention to padded keys is not served; pass sequences of one "
                "length without a mask" + INSTEAD)
TRACED = ("attention_mask: a compiled model takes no padding, packed documents or blocks; compile its "
          "layers alone (for layer in model.model.layers: layer.compile()), or nothing")


class _Unread(AttributeError, ValueError):
    """An error of both kinds: hasattr() is answered, and callers of models see a ValueError."""


class Mask:
    """A mask in the words of attention(), or why it is not served (`refusal`). Models pass it to the
    attention of each layer, some through another model, which takes it for a tensor of 4 dimensions.

    documents: rows of starts, or None. slices: rows of tuples, or None. packed, frozen: both as Frozen, which graphs
    do not keep as constants. lengths: (queries, keys). positions: position_ids that the mask was made with, where they
    are not checked yet. chunk: over a group, tokens of chunks that do not see one another; 0: none."""

    ndim = 4

    def __init__(self, lengths, causal=False, window=0, documents=None, slices=None, refusal=None,
                 positions=None, chunk=0):
        self.chunk = chunk
        self.lengths, self.causal, self.window, self.documents = lengths, causal, window, documents
        self.slices, self.refusal, self.positions = slices, refusal, positions
        self.frozen, self.packed = (None if x is None else _freeze(x) for x in (slices, documents))

    @property
    def shape(self):
        return (1, 1, *self.lengths)

    def __getattr__(self, name):
        raise _Unread("attention_mask: this model reads %r of its mask, which is not a tensor here%s" %
                      (name, INSTEAD))

    def __getitem__(self, _):
        raise ValueError("attention_mask: this model cuts its mask, which is not a tensor here" + INSTEAD)

    @classmethod
    def __torch_function__(cls, function, *_):
        raise ValueError("attention_mask: this model computes with its mask, which is not a tensor here" + INSTEAD)

    def __radd__(self, _):
        raise ValueError("attention_mask: this model adds its mask, which is not a tensor here" + INSTEAD)


_frozen = {}


def _freeze(slices):
    """Returns the slices as an object that attention() reads once. Equal slices are one object."""
    found = _frozen.pop(slices, None) or Frozen(slices)
    if len(_frozen) >= 16:
        _frozen.pop(next(iter(_frozen)))  # the oldest
    _frozen[slices] = found
    return found


_UNSERVED = "attention_mask: a mask of %s is not served: %s" + INSTEAD


def of_intervals(low, high, name):
    """Returns the Mask of rows of intervals, lists of tensors [pieces, n], one for each row of the batch. name is
    the mask's source, for errors."""
    n = low[0].shape[1]
    if all(len(row) == 1 for row in low):
        found = _intervals.simple(torch.cat(low), torch.cat(high))
        if found is not None:
            causal, window, documents = found
            return Mask((n, n), causal, window, _one_row(documents))
    try:
        return Mask((n, n), slices=_one_row(tuple(map(_intervals.slices, low, high))))
    except ValueError as error:
        return Mask((n, n), refusal=_UNSERVED % (name, error))


def of_padding(causal, window, documents, kept):
    """Returns the Mask of documents, rows of starts or None, in which a key is seen only where `kept`, [rows, n], is
    true."""
    rows, n = kept.shape
    at, back = torch.arange(n, device="cpu"), window - 1 if window else n
    ahead = 0 if causal else back
    found = []
    for row in range(rows):
        starts = () if documents is None else documents[row % len(documents)]
        bounds = torch.tensor(sorted({0, *starts, n}), device="cpu")
        of = torch.bucketize(at, bounds, right=True)
        low, high = torch.maximum(bounds[of - 1], at - back), torch.minimum(bounds[of], at + 1 + ahead)
        found.append(_intervals.keep_keys(low, high, kept[row]))
    return of_intervals([low for low, _ in found], [high for _, high in found], "padding")


def _one_row(rows):
    return rows[:1] if rows is not None and len(set(rows)) == 1 else rows


def of_tensor(mask, queries, keys):
    """Returns the Mask of a tensor that a user or a model has made. Raises ValueError for one that is not served.

    mask: [batch or 1, heads or 1, queries or 1, keys], bool, or numbers to add that are zero or tiny."""
    name = "attention_mask: a tensor of the shape %s" % (list(mask.shape),)
    if mask.dim() != 4 or mask.shape[3] != keys or mask.shape[2] not in (1, queries):
        raise ValueError("%s is not [batch, 1, %d, %d]%s" % (name, queries, keys, INSTEAD))
    if queries != keys:
        raise ValueError(name + " of a cross-attention or a cache of keys is not served" + INSTEAD)
    if mask.is_floating_point():
        shown = mask == 0
        if bool((~shown & ~(mask < torch.finfo(mask.dtype).min / 4)).any()):
            raise ValueError(name + " adds to logits, which is not served" + INSTEAD)
    elif mask.dtype == torch.bool:
        shown = mask
    else:
        raise ValueError("%s must be bool or floating-point numbers to add; got %s" % (name, mask.dtype))
    if bool((shown != shown[:, :1]).any()):
        raise ValueError(name + " differs between heads, which is not served" + INSTEAD)
    found = [_intervals.of_values(row) for row in shown[:, 0].expand(-1, queries, -1)]
    return of_intervals([low for low, _ in found], [high for _, high in found], "a tensor")


def _part(function):
    """Returns the name of one of masking_utils' functions and its arguments, or (None, {})."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != "transformers.masking_utils":
        return None, {}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__qualname__.split(".")[0], dict(zip(code.co_freevars, cells))


def _limits(function):
    """Returns the numbers of keys (before, after) itself that a token sees, or None for another function."""
    name, made = _part(function)
    if name == "causal_mask_function":
        return _NO_LIMIT, 0
    if name == "bidirectional_mask_function":
        return _NO_LIMIT, _NO_LIMIT
    window = made.get("sliding_window", -1)
    if name == "sliding_window_overlay" and window > 0:
        return window - 1, _NO_LIMIT
    if name == "sliding_window_bidirectional_overlay" and window >= 0:
        return window, window
    if name == "and_masks":
        found = [_limits(part) for part in made["mask_functions"]]
        if None not in found:
            return min(back for back, _ in found), min(ahead for _, ahead in found)
    return None


def plain(function):
    """Returns (causal, window) of a mask function that has nothing else, or None."""
    back, ahead = _limits(function) or (0, 1)
    if ahead == 0 or ahead == back:
        return ahead == 0, back + 1 if back < _NO_LIMIT else 0
    return None


class _Unknown(Exception):
    """The mask function is not composed of those that are known here."""


def _labels(tensor, rows, n):
    if tensor.dim() != 2 or tensor.shape[0] not in (1, rows) or tensor.shape[1] < n:
        raise _Unknown
    return tensor.to("cpu")[:, :n].expand(rows, n)


def _runs(labels):
    try:
        return _intervals.runs(labels)
    except ValueError as error:
        raise _Unknown from error


def _read(function, rows, n, documents=None, at=None):
    """Returns (low, high), [rows, n], not yet cut to the existing keys.

    documents: labels [rows, n] of packed documents that the mask keeps apart. at: the positions [rows, n]
    with which the function is called in place of the tokens' numbers."""
    tokens = torch.arange(n, device="cpu").expand(rows, n)
    limits = _limits(function)
    if limits is not None:
        return tokens - limits[0], tokens + limits[1] + 1
    name, made = _part(function)
    if name == "and_masks":
        for part in made["mask_functions"]:
            if _part(part)[0] == "packed_sequence_mask_function":
                documents = _labels(_part(part)[1]["packed_sequence_mask"], rows, n)
        low, high = tokens - _NO_LIMIT, tokens + _NO_LIMIT
        for part in made["mask_functions"]:
            lows, highs = _read(part, rows, n, documents, at)
            low, high = torch.maximum(low, lows), torch.minimum(high, highs)
        return low, high
    if name == "or_masks":
        found = tokens, tokens
        for part in made["mask_functions"]:
            try:
                found = _intervals.union(found, _read(part, rows, n, documents, at))
            except ValueError as error:
                raise _Unknown from error
        return found
    if name == "remap_positions_for_packed_sequence" and documents is not None:
        at = _labels(made["position_ids"], rows, n)
        moved = tokens - at
        if bool(((moved[:, 1:] != moved[:, :-1]) & (documents[:, 1:] == documents[:, :-1])).any()):
            raise _Unknown
        return _read(made["mask_function"], rows, n, documents, at)
    if name == "chunked_overlay":
        begin = made["left_padding"].to("cpu").reshape(-1, 1)
        moved = 0 if at is None else tokens - at
        low = (tokens - moved - begin) // made["chunk_size"] * made["chunk_size"] + begin + moved
        return low, low + made["chunk_size"]
    if at is None and name == "packed_sequence_mask_function":
        return _runs(_labels(made["packed_sequence_mask"], rows, n))
    if at is None and name == "blockwise_overlay":
        labels = _labels(made["block_sequence_ids"], rows, n)
        alone = -1 - tokens  # labels of tokens that are in no block
        low, high = _runs(torch.where(labels < 0, alone, labels))
        return low, torch.where(labels < 0, low, high)
    raise _Unknown


def _parts_of(function):
    """Returns the names of the functions of which a mask function is composed, in order."""
    name, made = _part(function)
    if name is None:
        return [getattr(function, "__qualname__", repr(function))]
    inner = [*made.get("mask_functions", ())] + [made[key] for key in ("mask_function",) if key in made]
    return [name] * (not inner) + [found for part in inner for found in _parts_of(part)]


def without_positions(function):
    """Returns (function, position_ids or None) for ranks, whose position_ids leap without being packed."""
    name, made = _part(function)
    if name == "and_masks" and len(made["mask_functions"]) == 2:
        first, second = made["mask_functions"]
        if _part(second)[0] == "packed_sequence_mask_function":
            remap, of_remap = _part(first)
            if remap == "remap_positions_for_packed_sequence":
                return of_remap["mask_function"], of_remap["position_ids"]
            return first, None  # before transformers 5
    return function, None


def _evaluate(values, rows, n):
    """Returns (lows, highs), lists of [pieces, n] by row, of values(first query, queries): bool [rows, queries, n]."""
    pieces = [[] for _ in range(rows)]
    for first in range(0, n, _ROWS):
        shown = values(first, min(_ROWS, n - first))
        for row in range(rows):
            pieces[row].append(_intervals.of_values(shown[row]))
    most = [max(len(low) for low, _ in parts) for parts in pieces]
    grow = lambda part, length: torch.nn.functional.pad(part, (0, 0, 0, length - len(part)))
    return tuple([torch.cat([grow(part[side], length) for part in parts], 1)
                  for parts, length in zip(pieces, most)] for side in (0, 1))


_trusted = set()  # compositions of mask functions that were read as transformers evaluates them


def _is_trusted(function, low, high, values):
    """Returns whether the mask as read agrees with transformers' values, for some queries of the first such mask."""
    names, (_, n) = tuple(_parts_of(function)), low.shape
    if names in _trusted:
        return True
    keys = torch.arange(n, device="cpu")
    for first in {0, n // 2, max(0, n - _SAMPLED)}:
        queries = slice(first, min(n, first + _SAMPLED))
        read = (keys >= low[:, queries, None]) & (keys < high[:, queries, None])
        if not torch.equal(read, values(first, queries.stop - first).to("cpu")):
            return False
    _trusted.add(names)
    return True


def of_function(function, rows, n, padding, values):
    """Returns the Mask of a mask function for whole sequences on one rank.

    padding: bool [rows, n], false where keys are padding, or None. values(first, count, padded): what
    transformers makes of `count` queries from `first` on, bool [rows, count, n]."""
    found = plain(function)
    if found is not None and padding is None and tuple(_parts_of(function)) in _trusted:
        return Mask((n, n), *found)
    try:
        low, high = _read(function, rows, n)
        low, high = low.clamp(min=0), high.clamp(max=n)
        if not _is_trusted(function, low, high, lambda *queries: values(*queries, False)):
            raise _Unknown
        if found is not None and padding is None:
            return Mask((n, n), *found)
        pieces = [(low[row:row + 1], high[row:row + 1]) if padding is None else
                  _intervals.keep_keys(low[row], high[row], padding[row].to("cpu")) for row in range(rows)]
        lows, highs = [low for low, _ in pieces], [high for _, high in pieces]
    except (_Unknown, KeyError):  # a KeyError: another version's function of a known name
        if rows * n * n > _MOST_PAIRS:
            return Mask((n, n), refusal="attention_mask: a mask of %s is known from its values only, which are "
                        "evaluated for at most %d pairs of tokens; got %d x %d x %d%s" % (
                            " and ".join(_parts_of(function)), _MOST_PAIRS, rows, n, n, INSTEAD))
        try:
            lows, highs = _evaluate(lambda *queries: values(*queries, True), rows, n)
        except ValueError as error:
            return Mask((n, n), refusal=_UNSERVED % (" and ".join(_parts_of(function)), error))
    return of_intervals(lows, highs, " and ".join(_parts_of(function)))


def _without_chunks(function):
    """Returns (function, tokens of a chunk or 0) for a causal mask of chunks without padding."""
    name, made = _part(function)
    if name == "and_masks" and len(made["mask_functions"]) == 2:
        (first, of_first), (second, _) = map(_part, made["mask_functions"])
        if first == "chunked_overlay" and second == "causal_mask_function":
            if not bool(torch.as_tensor(of_first.get("left_padding", 0)).any()):
                return made["mask_functions"][1], of_first["chunk_size"]
    return function, 0


def chunks_restart():
    """Returns whether this transformers counts chunks from the start of each packed document."""
    from transformers import masking_utils
    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def of_ranks(function, n, padding):
    """Returns the Mask of a mask function that gets one rank's part of the sequences."""
    if padding is not None:
        return Mask((n, n), refusal="attention_mask: padding over a group of ranks is not served; pack the sequences "
                            "and pass burst.register(group, documents=...)")
    function, positions = without_positions(function)
    function, chunk = _without_chunks(function)
    found = plain(function)
    if found is None:
        return Mask((n, n), refusal="attention_mask: a mask of %s is not served over a group of ranks; use a group of "
                            "one, or attn_implementation='sdpa'" % " and ".join(_parts_of(function)))
    return Mask((n, n), *found, positions=positions, chunk=chunk)


def _values_of(sdpa_mask, function, rows, n, padding, use_vmap, device):
    """Returns of_function's values(): the rows of queries of transformers' own mask."""
    by_positions = "cache_position" in inspect.signature(sdpa_mask).parameters  # before transformers 5

    def values(first, count, padded):
        where = (dict(cache_position=torch.arange(first, first + count, device=device), allow_torch_fix=False)
                 if by_positions else dict(q_length=count, q_offset=first, use_vmap=use_vmap, device=device))
        return sdpa_mask(batch_size=rows, kv_length=n, kv_offset=0, mask_function=function,
                         attention_mask=padding if padded else None, allow_is_causal_skip=False, **where)[:, 0]

    return values


def _of_trace(function, rows, n, padding, ranks, window, bidirectional, device):
    """Returns the Mask under torch.compile, where values are unknown: causal or bidirectional, with a window.
    The graph checks that when it runs."""
    ok = torch.ones((), dtype=torch.bool, device=device) if padding is None else padding.all()
    back = window + bidirectional if window else n
    if ranks == 1:
        row, query = torch.arange(rows, device=device)[:, None], torch.arange(n, device=device)[None]

        def sees(distance):
            key = query + distance
            shown = function(row, torch.zeros_like(row), query, key.clamp(0, n - 1))
            return shown, (key >= 0) & (key < n)

        furthest = function(row, torch.zeros_like(row), query, (query - back + 1).clamp(min=0))
        ok = ok & furthest.all() & sees(0)[0].all()
        for distance, wanted in ((-back, False), (1, bidirectional and back > 1), (back, False)):
            shown, exists = sees(distance)
            ok = ok & ((shown if wanted else ~shown) | ~exists).all()  # == of bool fails in torch 2.11's Inductor
        if bidirectional:
            ok = ok & function(row, torch.zeros_like(row), query, (query + back - 1).clamp(max=n - 1)).all()
    require_in_graph(ok, TRACED)
    return Mask((n, n), not bidirectional, back if window else 0)


def mask_function(size_of_group):
    """Returns a function that makes a Mask, for AttentionMaskInterface. size_of_group() returns the ranks."""
    from transformers import masking_utils

    def make_mask(batch_size, kv_length, mask_function=masking_utils.causal_mask_function,
                  attention_mask=None, q_length=None, q_offset=0, kv_offset=0, cache_position=None,
                  allow_is_bidirectional_skip=None, local_size=None, use_vmap=False, device=None,
                  config=None, **_):
        if isinstance(attention_mask, Mask):  # made by the model that holds this one
            return attention_mask
        if cache_position is not None:  # before transformers 5
            q_length, q_offset, device = len(cache_position), cache_position[0], cache_position.device
        tracing, ranks, lengths = is_compiling(), size_of_group(), (q_length, kv_length)
        padding = attention_mask
        if padding is not None and not tracing and bool(padding.all()):
            padding = None
        crosses = (plain(mask_function) == (False, 0) if not tracing else
                   allow_is_bidirectional_skip is not None and local_size is None)
        if q_length != kv_length and crosses:
            return Mask(lengths, refusal=None if padding is None else PADDED_CROSS)
        if q_length != kv_length or int(q_offset) != 0 or int(kv_offset) != 0:
            return Mask(lengths, refusal=CACHE % lengths)
        if padding is not None and padding.shape[1] != kv_length:
            return Mask(lengths, refusal="attention_mask: its shape must be [batch, %d]; got %s" %
                        (kv_length, list(padding.shape)))
        if tracing:
            chunk = getattr(config, "attention_chunk_size", None)
            if use_vmap or (chunk is not None and chunk == local_size and ranks > 1):
                return Mask(lengths, refusal=TRACED)
            return _of_trace(mask_function, batch_size, kv_length, padding, ranks, local_size,
                             allow_is_bidirectional_skip is not None, device)
        if ranks > 1:
            return of_ranks(mask_function, kv_length, padding)
        values = _values_of(masking_utils.sdpa_mask, mask_function, batch_size, kv_length, padding,
                            use_vmap, device)
        return of_function(mask_function, batch_size, kv_length, padding, values)

    return make_mask
