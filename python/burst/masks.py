"""Masks of any shape, for attention(..., causal=False, slices=...): lists of (q_begin, q_end, k_begin,
k_end, kind) of positions in the whole sequence."""

import copy
import json


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
    slices = [(0, prompt, 0, prompt, "causal")] if prompt else []
    begin = prompt
    for answer in answers:
        end = begin + answer
        if answer and prompt:
            slices.append((begin, end, 0, prompt, "full"))
        if answer:
            slices.append((begin, end, begin, end, "causal"))
        begin = end
    return slices


def window_with_global_tokens(seqlen, window, global_tokens=(), causal=False):
    """A token sees those less than `window` positions away. All see the global tokens, which see all
    (Longformer). With `causal` nobody sees what is after it."""
    window = min(window, seqlen)  # no two tokens are farther apart
    after = 0 if causal else window - 1
    slices = [(0, seqlen, 1 - window, seqlen + after, "band")]
    for begin, end in _runs(global_tokens):
        if not causal:
            slices += [(0, seqlen, begin, end, "full"), (begin, end, 0, seqlen, "full")]
            continue
        slices.append((begin, end, begin, end, "causal"))
        if end < seqlen:
            slices.append((end, seqlen, begin, end, "full"))
        if begin:
            slices.append((begin, end, 0, begin, "full"))
    return slices


def blocks(seqlen, size, key_blocks, causal=False):
    """Sparse blocks of `size` x `size` tokens: key_blocks[i] are the numbers of those that the queries
    of block i see; with `causal` only the keys up to the query in its own block."""
    return [(i * size, min(seqlen, (i + 1) * size), block * size, min(seqlen, (block + 1) * size),
             "causal" if causal and block == i else "full")
            for i, numbers in enumerate(key_blocks) for block in numbers]


def _runs(positions):
    runs = []
    for position in sorted(set(positions)):
        if runs and runs[-1][1] == position:
            runs[-1][1] = position + 1
        else:
            runs.append([position, position + 1])
    return runs
