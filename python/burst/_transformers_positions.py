"""Checks that position_ids say which tokens of the sequences a rank has: for burst.register."""

import itertools
import warnings
import weakref

import torch

from . import _call, _ranks
from ._arguments import integers, rows_of_documents
from ._ranks import is_compiling
from .layout import positions


def size_of(group):
    return _ranks.size_of(group)


def refuse(group, tensor, promised, error):
    """Raises the error as _call.refuse."""
    _call.refuse(group, tensor.device, promised, error)


def bounds_of(cu_seqlens):
    return tuple(integers("cu_seqlens", cu_seqlens))


def rows_of(arguments, seqlen=None):
    """Returns rows of document starts as tuples, from the arguments documents or cu_seqlens, or None.

    seqlen: the tokens with which cu_seqlens must end; None: not known."""
    return rows_of_documents(arguments.get("documents"), arguments.get("cu_seqlens"), seqlen)[0]


class Seen:
    """Keeps results that were computed from tensors, as long as these are the same objects with the same values.

    On a CPU the values are compared, because numpy changes them unseen. On a GPU torch's count of changes is compared,
    because values would make the host wait."""

    def __init__(self):
        self._found = {}

    def of(self, compute, tensor, *more):
        key = (id(tensor), *more)
        of, values, result = self._found.get(key, (lambda: None, None, None))
        if of() is tensor and values is not None and _are_values(tensor, values):
            return result
        values, result = _values(tensor), compute(tensor, *more)
        if len(self._found) >= 8:
            self._found.clear()
        self._found[key] = weakref.ref(tensor), values, result
        return result


def _values(tensor):
    """Returns what _are_values compares with the tensor later, or None if that is not known."""
    if tensor.device.type == "cpu":
        return tensor.detach().clone()
    return None if tensor.is_inference() else tensor._version  # torch.inference_mode counts no changes


def _are_values(tensor, values):
    if isinstance(values, torch.Tensor):
        return (tensor.device, tensor.dtype) == (values.device, values.dtype) and torch.equal(tensor, values)
    return tensor._version == values


def starts_again(position_ids):
    return bool((position_ids[:, 1:] <= position_ids[:, :-1]).any())


_rising = Seen()


def check_rising(position_ids):
    """Raises ValueError for position_ids [batch, tokens] that start again."""
    if is_compiling():
        _OPS.check_rising(position_ids, _checked)
    elif _rising.of(starts_again, position_ids):
        raise ValueError("position_ids: they start again, and the mask that the model has made keeps no documents apart; "
                         "pass cu_seq_lens_q and cu_seq_lens_k or burst.register(documents=...), and no attention_mask")


_all = weakref.WeakValueDictionary()  # Positions, by their numbers in graphs
_numbers = itertools.count()


class Positions:
    """The allowed position_ids on this rank of a group: positions in the whole sequence, or in each document."""

    def __init__(self, group, layout, arguments):
        self.group, self._layout, self.arguments = group, layout, arguments
        self._seen = Seen()  # of the layers of a model, all of which are called with the same position_ids
        self._known, self._warned = {}, False  # the last right positions, by the other arguments of check
        number = next(_numbers)
        self.number, _all[number] = torch.tensor(number, device="cpu"), self  # a graph would keep an int as a constant

    def check(self, position_ids, n, documents, causal, window, first=0):
        """Raises ValueError for position_ids [batch or 1, n] that are wrong.

        documents: rows of starts. first: the position of a sequence's first token."""
        if position_ids is None or position_ids.dim() != 2:
            self._warn("this model does not tell its attention position_ids [batch, tokens]")
            return
        if is_compiling():
            _OPS.check_positions(position_ids, self.number, causal, window, first, _checked)
            return
        self._seen.of(self._check, position_ids, n, tuple(self._lengths(n)), documents, causal, window, first)

    def _check(self, position_ids, n, lengths, documents, causal, window, first):
        packed = {}
        if self._layout == "balanced" and documents is not None:
            packed = dict(dict(causal=causal, window=window, documents=documents),
                          ulysses_size=self.arguments.get("ulysses_size", 0))
            if len(lengths) != 1:
                self._warn("with layout='balanced', cu_seqlens= or seqlen= must be registered")
                return
        given = position_ids.detach().to("cpu", torch.int64) - first
        key = n, documents, causal, window, *(lengths if len(lengths) == 1 else ())
        known = [self._known[key]] if key in self._known else []
        for want in itertools.chain(known, self._candidates(n, lengths, documents, packed)):
            if given.shape[1] == n and any(torch.equal(given, rows.expand(len(given), n)) for rows in want
                                           if len(rows) in (1, len(given))):
                self._known = {key: want}
                return
        raise ValueError(
            "position_ids: they must be the positions of this rank's tokens in the whole sequence; got %s. Pass "
            "position_ids=burst.positions(seqlen, group, layout=%r)[None]; of packed documents, these or the "
            "positions in each document, and burst.register(group, documents=...)%s" %
            (_shortly((given[0] + first).tolist() if len(given) else []), self._layout,
             ". This model's positions begin at %d, so add %d" % (first, first) if first else ""))

    def own(self, n):
        """Returns the positions of this rank's n tokens by the registered length of the sequence, or None."""
        if self.arguments.get("seqlen") is None and self.arguments.get("cu_seqlens") is None:
            return None
        return next((at for seqlen in self._lengths(n) for at in [positions(seqlen, self.group, self._layout)]
                     if len(at) == n), None)

    def _warn(self, why):
        if not is_compiling() and not self._warned:
            self._warned = True
            warnings.warn("burst.register: %s, so that it is not checked whether they are burst.positions" % why)

    def _candidates(self, n, lengths, documents, packed):
        """Yields the allowed [rows, n], for lengths of the whole sequence that give this rank n tokens."""
        for seqlen in lengths:
            try:
                at = positions(seqlen, self.group, self._layout, **packed)
            except ValueError:
                continue
            if len(at) == n:
                yield [at[None]] + ([] if documents is None else [_in_documents(at, documents)])

    def _lengths(self, n):
        """Returns the possible lengths of the whole sequence if this rank has n tokens of it."""
        if self.arguments.get("seqlen") is not None:
            return [self.arguments["seqlen"]]
        if self.arguments.get("cu_seqlens") is not None:
            return [bounds_of(self.arguments["cu_seqlens"])[-1]]
        size = size_of(self.group)
        return sorted(range(max(n, (n - 4) * size), (n + 4) * size), key=lambda seqlen: abs(seqlen - n * size))


def _in_documents(at, documents):
    """Returns the positions `at` counted from the start of each document, [rows, n]."""
    rows = []
    for row in documents:
        starts = torch.tensor(sorted({0, *row}), device=at.device)
        rows.append(at - starts[torch.bucketize(at, starts, right=True) - 1])
    return torch.stack(rows)


def _shortly(values):
    return "%s" % values if len(values) <= 12 else "[%s, ...]" % ", ".join(map(str, values[:12]))


# The operators below claim to write this, because graphs keep operators that write.
_checked = torch.zeros((), dtype=torch.float32, device="cpu")
_OPS = getattr(torch.ops, __package__)

if hasattr(torch.library, "custom_op"):
    @torch.library.custom_op(__package__ + "::require", mutates_args=("checked",))
    def require(flag: torch.Tensor, text: str, checked: torch.Tensor) -> None:
        """Raises ValueError if a running graph finds a flag that is false."""
        if not bool(flag):
            raise ValueError(text)

    @torch.library.custom_op(__package__ + "::check_rising", mutates_args=("checked",))
    def check_rising_in_graph(position_ids: torch.Tensor, checked: torch.Tensor) -> None:
        """Calls check_rising when a graph runs."""
        check_rising(position_ids)

    @torch.library.custom_op(__package__ + "::check_positions", mutates_args=("checked",))
    def check_positions(position_ids: torch.Tensor, number: torch.Tensor, causal: bool, window: int, first: int,
                        checked: torch.Tensor) -> None:
        """Calls check of the Positions with this number, when a graph runs."""
        checks = _all.get(int(number))
        if checks is None:  # another one was registered since the forward, which a backward repeats
            return
        try:
            checks.check(position_ids, position_ids.shape[1], rows_of(checks.arguments), causal, window, first)
        except ValueError as error:
            refuse(checks.group, position_ids, "seqlen" in checks.arguments, error)


def require_in_graph(flag, text):
    """Raises a ValueError of this text when a graph runs in which the flag is false."""
    _OPS.require(flag, text, _checked)
