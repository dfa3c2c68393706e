"""Tests that masks of values become documents, windows and slices of exactly the same mask."""

import random
import unittest

import torch

from burst import _intervals
from harness import main


def painted(n, causal=False, window=0, starts=(0,)):
    """Returns bool [n, n]: the keys that attention() shows to each query."""
    at = torch.arange(n)
    distance = at[:, None] - at[None]
    of = torch.tensor([sum(start <= token for start in starts) for token in range(n)])
    shown = of[:, None] == of[None]
    if causal:
        shown &= distance >= 0
    if window:
        shown &= distance.abs() < window
    return shown


def painted_slices(n, slices):
    shown = torch.zeros(n, n, dtype=torch.bool)
    query, key = torch.arange(n)[:, None], torch.arange(n)[None]
    for q_begin, q_end, k_begin, k_end, kind in slices:
        part = (q_begin <= query) & (query < q_end) & (k_begin <= key) & (key < k_end)
        if kind in ("causal", "band"):
            part &= key - k_end <= query - q_end
        if kind in ("inverse_causal", "band"):
            part &= key - k_begin >= query - q_begin
        shown |= part
    return shown


class IntervalsTest(unittest.TestCase):
    def check(self, shown):
        """Checks that both forms reproduce the mask. Returns what _intervals.simple returns."""
        n = len(shown)
        low, high = _intervals.of_values(shown)
        self.assertTrue(torch.equal(painted_slices(n, _intervals.slices(low, high)), shown), shown)
        found = _intervals.simple(low, high) if len(low) == 1 else None
        if found is not None:
            causal, window, documents = found
            starts = documents[0] if documents else (0,)
            self.assertTrue(torch.equal(painted(n, causal, window, starts), shown), (shown, found))
        return found

    def test_values(self):
        """Masks without structure, and masks with padding and blocks."""
        draw = random.Random(1)
        torch.manual_seed(1)
        for _ in range(400):
            n = draw.randint(1, 12)
            self.check(torch.rand(n, n) < draw.random())
            shown = painted(n, draw.random() < 0.5, draw.randint(0, n + 1), (0, draw.randrange(n)))
            begin, end = sorted((draw.randrange(n), draw.randrange(n)))
            block = shown.clone()
            block[begin:end, begin:end] = True
            self.check(block)
            shown[:, begin:end] = False
            self.check(shown)

    def test_simple(self):
        """Any causal, window and documents are found again."""
        draw = random.Random(2)
        for _ in range(400):
            n = draw.randint(1, 12)
            starts = {0} | {draw.randrange(n) for _ in range(draw.randint(0, 3))}
            shown = painted(n, draw.random() < 0.5, draw.randint(0, n + 1), starts)
            self.assertIsNotNone(self.check(shown), shown)

    def test_few_slices(self):
        """A mask takes one slice for each straight piece of its bounds."""
        at = torch.arange(1000)
        for shown, count in ((painted(1000, True) & (at >= 300), 1),  # padding on the left
                             (painted(1000, True) & (at < 300), 2),  # on the right
                             ((at[None] < 200) | painted(1000, True), 2),  # a prefix
                             (painted(1000, True, 100) & (at >= 300), 2)):
            self.assertEqual(len(_intervals.slices(*_intervals.of_values(shown))), count)

    def test_runs(self):
        begin, end = _intervals.runs(torch.tensor([[3, 3, 1, 4, 4], [0, 0, 0, 0, 0]]))
        self.assertEqual(begin.tolist(), [[0, 0, 2, 3, 3], [0] * 5])
        self.assertEqual(end.tolist(), [[2, 2, 3, 5, 5], [5] * 5])
        with self.assertRaises(ValueError):
            _intervals.runs(torch.tensor([[0, 1, 0]]))


if __name__ == "__main__":
    main()
