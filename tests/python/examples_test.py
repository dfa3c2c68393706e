"""Runs the programs of examples/pytorch: over two ranks they have the losses of one rank."""

import os
import re
import sys
import tempfile
import unittest

import torch
from harness import main, run_program, run_ranks

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/pytorch")


def has(module):
    try:
        __import__(module)
        return True
    except ImportError:
        return False


def titan(rank, group):
    """torchtitan's models take the example's attention, which over two ranks is torchtitan's on one."""
    sys.path.insert(0, FOLDER)
    import titan
    titan.install()
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import cp_shard
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import parallelize
    assert parallelize.apply_cp_to_forward is titan.use
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    module = ScaledDotProductAttention(ScaledDotProductAttention.Config())
    whole = [torch.randn(2, 24, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    out = module(*whole, enable_gqa=True, scale=0.3)
    want = [out, *torch.autograd.grad(out.sin().sum(), whole)]
    cut = lambda tensors: cp_shard(mesh, tuple(x.detach().clone() for x in tensors), None, "headtail")[0]
    titan.use([module], mesh)
    local = [x.requires_grad_() for x in cut(whole)]
    out = module(*local, enable_gqa=True, scale=0.3)
    for have, wanted in zip([out, *torch.autograd.grad(out.sin().sum(), local)], cut(want)):
        torch.testing.assert_close(have, wanted, atol=1e-11, rtol=0)
    try:
        module(*local, attention_masks=1)
    except ValueError as error:
        assert "attention_masks: must be None" in str(error), error
    else:
        raise AssertionError("a mask was dropped")


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

    def test_one_device(self):
        self.assertRegex(self.run_example("one_device.py", 1), "out is off by [0-9.]+e-0[67]")

    @unittest.skipUnless(hasattr(torch.library, "custom_op"), "FSDP2 needs torch 2.4")
    def test_fsdp(self):
        self.check_losses("fsdp.py", r"loss ([\d.]+)", 1e-3)

    @unittest.skipUnless(hasattr(torch.library, "custom_op") and has("transformers"), "needs transformers")
    def test_packed(self):
        self.check_losses("packed.py", r"loss ([\d.]+)", 1e-3)

    @unittest.skipUnless(hasattr(torch.library, "custom_op") and has("accelerate"), "needs accelerate")
    def test_trainer(self):
        self.check_losses("trainer.py", r"'loss': '?([\d.]+)", 2e-3)

    @unittest.skipUnless(has("torchtitan"), "needs torchtitan")
    def test_titan(self):
        run_ranks(2, titan)


if __name__ == "__main__":
    main()
