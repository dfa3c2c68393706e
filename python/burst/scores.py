"""What changes attention's scores and weights: softcap, ALiBi, dropout (burst/kernels/scores.h)."""

import operator

import torch

from . import _library


def alibi_slopes(heads):
    """Returns the slopes of ALiBi's paper (arXiv 2108.12409) for `heads` heads: [heads], float32."""
    slopes = [float(slope) for slope in _library.alibi_slopes(heads).split()]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def draw_seed():
    """The next number of torch's generator of the CPU, [1]: recomputation (torch.utils.checkpoint) puts its
    state back, and draws it again."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")


def read_seed(seed):
    """Returns the integer of a seed that may be a tensor or an array of one element.

    Other values are returned unchanged.
    """
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed
    try:
        return operator.index(seed)
    except (TypeError, ValueError, RuntimeError):
        return seed


def check_seed(seed):
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError("dropout_seed: %r is no integer of at least 0, below 2^63" % (seed,))
