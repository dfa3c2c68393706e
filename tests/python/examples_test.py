"""Runs the programs of examples/pytorch: over two ranks they have the losses of one rank."""

import os
import re
import tempfile
import unittest

import torch
from harness import main, run_program

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/pytorch")


def has(module):
    try:
        __import__(module)
        return True
    except ImportError:
        return False


class ExamplesTest(unittest.TestCase):
    def run_example(self, name, ranks):
        with tempfile.TemporaryDirectory() as folder:
            return run_program(ranks, os.path.join(FOLDER, name), OUT=folder)[0]

    def check_losses(self, name, pattern, allowed):
        """Losses fall, and those of two ranks are one rank's. AdamW divides by small roots, so roundings grow."""
        one, two = ([float(loss) for loss in re.findall(pattern, self.run_example(name, ranks))] for ranks in (1, 2))
        self.assertEqual((len(one), len(two)), (10, 10))
        self.assertLess(one[-1], one[0] - 0.1)
        for a, b in zip(two, one):
            self.assertAlmostEqual(a, b, delta=allowed)

    def test_ring(self):
        self.assertRegex(self.run_example("ring.py", 3), "1,024 tokens over 3 ranks: out is off by .*e-1[0-9]")

    @unittest.skipUnless(hasattr(torch.nn.functional, "scaled_dot_product_attention"), "it needs torch 2")
    def test_one_device(self):
        self.assertRegex(self.run_example("one_device.py", 1), "out is off by [0-9.]+e-0[67]")

    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "FSDP2 needs torch 2.4")
    def test_fsdp(self):
        self.check_losses("fsdp.py", r"loss ([\d.]+)", 1e-3)

    @unittest.skipUnless(hasattr(torch.library, "custom_op") and has("transformers"), "there is no transformers")
    def test_packed(self):
        self.check_losses("packed.py", r"loss ([\d.]+)", 1e-3)

    @unittest.skipUnless(hasattr(torch.library, "custom_op") and has("accelerate"), "there is no accelerate")
    def test_trainer(self):
        self.check_losses("trainer.py", r"'loss': '?([\d.]+)", 2e-3)


if __name__ == "__main__":
    main()
