"""Masks of any shape, for attention(..., causal=False, slices=...): lists of (q_begin, q_end, k_begin,
k_end, kind) of positions in the whole sequence."""

import copy
import json

from . import _library

KINDS = ("full", "causal", "inverse_causal", "band")  # burst_slice_kind


class Frozen:
    """Slices that do not change, for attention(slices=...), which looks at them once. A list it reads in
    every call: of thousands, as sparse blocks have, that takes longer than the kernels."""

    __slots__ = ("slices", "text")

    def __init__(self, slices):
        self.slices = copy.deepcopy(slices)
        self.text = json.dumps(self.slices, default=_listed)  # the one constant of a compiled graph


def _listed(value):
    return value.tolist() if hasattr(value, "tolist") else repr(value)


def tree(prompt, answers):
    """Causal answers to one causal prompt, one after another: each sees the prompt and itself. In
    tokens."""
    return _named("tree", prompt, [answer for answer in answers])


def window_with_global_tokens(seqlen, window, global_tokens=(), causal=False):
    """A token sees those less than `window` positions away. All see the global tokens, which see all
    (Longformer). With `causal` nobody sees what is after it."""
    return _named("window_with_global_tokens", seqlen, min(window, seqlen),
                  [token for token in global_tokens], causal)


def blocks(seqlen, size, key_blocks, causal=False):
    """Sparse blocks of `size` x `size` tokens: key_blocks[i] are the numbers of those that the queries
    of block i see; with `causal` only the keys up to the query in its own block."""
    return _named("blocks", seqlen, size, [[block for block in row] for row in key_blocks], causal)


def _named(name, *arguments):
    numbers = [int(number) for number in _library.slices(name, *arguments).split()]
    return [(*numbers[at:at + 4], KINDS[numbers[at + 4]]) for at in range(0, len(numbers), 5)]
