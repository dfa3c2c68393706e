"""What changes attention's scores and weights: softcap, ALiBi, dropout (burst/kernels/scores.h)."""

import math

import torch


def alibi_slopes(heads):
    """The slopes of ALiBi's paper (arXiv 2108.12409) for so many heads, [heads] of float32: 2^(-8 h / heads)
    for h = 1, 2, ... where that is a power of two; else those of the largest power of two below, then
    every second one of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    exponents = [8 * (h + 1) / power for h in range(power)]
    exponents += [4 * (2 * h + 1) / power for h in range(heads - power)]
    return torch.tensor([2.0**-exponent for exponent in exponents])


def scores_of(softcap, slopes, dropout_p, max_logit=False):
    """(softcap, slopes, dropout_p, max_logit) as numbers, None for attention as ever; a text for what are
    none."""
    if not softcap and slopes is None and not dropout_p and not max_logit:
        return None
    if slopes is not None:
        try:
            slopes = tuple(float(slope) for slope in
                           (slopes.tolist() if isinstance(slopes, torch.Tensor) else slopes))
        except (TypeError, ValueError):
            return "alibi_slopes: %r are no numbers, one for each head" % (slopes,)
        if not all(map(math.isfinite, slopes)):
            return "alibi_slopes: one is not finite"
    softcap, dropout_p = softcap or 0, dropout_p or 0
    if not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf:
        return "softcap: %r is no number of at least 0" % (softcap,)
    if not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        return "dropout_p: %r is not in [0, 1)" % (dropout_p,)
    return float(softcap), slopes, float(dropout_p), bool(max_logit)


def drops(scores):
    """Whether weights are dropped, by what scores_of gave."""
    return isinstance(scores, tuple) and scores[2] > 0


def draw_seed():
    """The next number of torch's generator of the CPU, [1]: recomputation (torch.utils.checkpoint) puts its
    state back, and draws it again."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device="cpu")


def check_seed(seed):
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError("dropout_seed: %r is no integer of at least 0, below 2^63" % (seed,))
