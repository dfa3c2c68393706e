"""Masks of any shape, for attention(..., causal=False, slices=...): lists of (q_begin, q_end, k_begin,
k_end, kind) of positions in the whole sequence."""

import copy
import json
import operator
from typing import List, Sequence

import torch

from . import _library
from ._lists import nested
from ._types import Slice, Slices

KINDS = ("full", "causal", "inverse_causal", "band")  # burst_slice_kind


class Frozen:
    """Slices that do not change, for attention(slices=...), which reads them once.

    A list is read in every call, which takes longer than the kernels for thousands of slices.
    """

    __slots__ = ("slices", "tensor")

    def __init__(self, slices: Slices) -> None:
        self.slices = copy.deepcopy(nested(slices))
        text = bytearray(json.dumps(self.slices, default=repr).encode())
        self.tensor = torch.frombuffer(text, dtype=torch.uint8)  # graphs read it when they run


def tree(prompt: int, answers: Sequence[int]) -> List[Slice]:
    """Returns the slices of causal answers to one causal prompt, one after another.

    Each answer sees the prompt and itself.

    Args:
        prompt (int): tokens of the prompt.
        answers (list of int): tokens of each answer.

    Raises:
        ValueError: a number of tokens is negative, or the sequence has 2^31 tokens or more.
    """
    return _named("tree", _count("prompt", prompt), [_count("answers", answer) for answer in answers])


def window_with_global_tokens(seqlen: int, window: int, global_tokens: Sequence[int] = (),
                              causal: bool = False) -> List[Slice]:
    """Returns the slices of a window with global tokens (Longformer).

    Args:
        seqlen (int): tokens of the sequence.
        window (int): a token sees tokens less than `window` positions away, at least itself.
        global_tokens (list of int): positions of tokens that see all tokens and are seen by all.
        causal (bool): no token sees a later one.

    Raises:
        ValueError: a number is negative, 0 as a window, or beyond the sequence's tokens, of which there must be fewer
            than 2^31.
    """
    seqlen, window = _count("seqlen", seqlen), _count("window", window, 1, None)
    return _named("window_with_global_tokens", seqlen, min(window, seqlen),
                  [_count("global_tokens", token, 0, seqlen) for token in global_tokens], causal)


def blocks(seqlen: int, size: int, key_blocks: Sequence[Sequence[int]], causal: bool = False) -> List[Slice]:
    """Returns the slices of a mask of blocks of `size` x `size` tokens.

    Args:
        seqlen (int): tokens of the sequence.
        size (int): tokens of a block.
        key_blocks (list of lists of int): for each block of queries, the numbers of the blocks of keys
            that it sees.
        causal (bool): in its own block, a query sees no later key.

    Raises:
        ValueError: a number is not that of a block, or there is not one row for each block of queries.
    """
    seqlen, size = _count("seqlen", seqlen), _count("size", size, 1)
    number = -(-seqlen // size)
    rows = [[_count("key_blocks", block, 0, number) for block in row] for row in key_blocks]
    if len(rows) != number:
        raise ValueError("key_blocks: must have a row for each of the %d blocks of queries; got %d" % (number, len(rows)))
    return _named("blocks", seqlen, size, rows, causal)


def _count(name, value, least=0, end=2**31):
    """Returns a whole number from `least` to below `end` (None: no limit)."""
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError("%s: must be a whole number; got %r" % (name, value)) from None
    if value < least or (end is not None and value >= end):
        raise ValueError("%s: must be at least %d%s; got %d" %
                         (name, least, "" if end is None else " and less than %d" % end, value))
    return value


def _named(name, *arguments):
    numbers = [int(number) for number in _library.slices(name, *arguments).split()]
    return [(*numbers[at:at + 4], KINDS[numbers[at + 4]]) for at in range(0, len(numbers), 5)]
