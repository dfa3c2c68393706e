"""Changes of attention's scores and weights: ALiBi's slopes and dropout's seed (burst/kernels/scores.h)."""

import operator
from typing import Any

import torch

from . import _library


def alibi_slopes(heads: int) -> torch.Tensor:
    """Returns the slopes of ALiBi's paper (arXiv 2108.12409) for `heads` heads: [heads], float32, on the CPU.

    Raises ValueError unless heads is positive.
    """
    slopes = [float(slope) for slope in _library.alibi_slopes(heads).split()]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def draw_seed() -> torch.Tensor:
    """Returns the next number of torch's CPU generator: [1], int64.

    Recomputation (torch.utils.checkpoint) puts the generator's state back and draws the number again.
    """
    return torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")


def read_seed(seed: Any) -> Any:
    """Returns the integer of a seed that may be a tensor or an array of one element.

    Other values are returned unchanged.
    """
    if isinstance(seed, (int, str)) and not isinstance(seed, bool):  # torch 2.11 cannot trace index() of a text
        return seed
    try:
        return operator.index(seed)
    except (TypeError, ValueError, RuntimeError):
        return seed


def check_seed(seed: Any) -> None:
    """Raises ValueError unless the seed is an integer in [0, 2^63)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError("dropout_seed: must be an integer in [0, 2^63); got %r" % (seed,))
