"""Tests examples/pytorch/finetune.py: over two ranks, with FSDP2 and without, it has the losses of a rank with SDPA, and
transformers reads the tuned model."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

import torch
from harness import main

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/pytorch/finetune.py")


def make_model(folder):
    """Makes a small random Llama and a tokenizer of bytes."""
    import tokenizers
    import transformers
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256, max_position_embeddings=512, initializer_range=0.2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@unittest.skipUnless(hasattr(torch.library, "custom_op"), "transformers needs torch 2.4")
class FinetuneTest(unittest.TestCase):
    def setUp(self):
        try:
            import transformers  # noqa: F401
        except ImportError:
            self.skipTest("needs transformers")
        self.folder = tempfile.TemporaryDirectory(prefix="burst-")
        make_model(self.path("model"))
        with open(self.path("text"), "w") as file:
            file.writelines("line %d of a text, café\n" % (i * 7919 % 1000) for i in range(200))

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def run_example(self, ranks, *arguments, model="model"):
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=%d" % ranks, "--standalone",
             EXAMPLE, "--model=" + self.path(model), "--text=" + self.path("text"), "--seqlen=301",
             "--steps=5", "--lr=1e-2", *arguments],
            capture_output=True, text=True, timeout=300)

    def losses(self, *arguments, **how):
        done = self.run_example(*arguments, **how)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
        self.assertEqual(len(found), 5)
        return found

    def test_losses(self):
        want = self.losses(1, "--attention=sdpa", "--out=" + self.path("one"))
        self.assertLess(want[-1], want[0] - 0.3)
        tuned = self.losses(1, "--attention=sdpa", model="one")
        for ranks, more in ((1, []), (2, []), (2, ["--fsdp"]), (3, ["--fsdp"])):
            out = self.path("out-%d-%d" % (ranks, len(more)))
            have = self.losses(ranks, "--out=" + out, *more)
            # AdamW divides by the root of small squares: roundings grow with the steps.
            for a, b in zip(have, want):
                self.assertAlmostEqual(a, b, delta=1e-4 * b)
            again = self.losses(1, "--attention=sdpa", model=os.path.basename(out))
            self.assertAlmostEqual(again[0], tuned[0], delta=1e-4 * tuned[0])

    def test_errors(self):
        done = self.run_example(2, "--attention=sdpa")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("--attention=sdpa", done.stderr)
        done = self.run_example(1, "--seqlen=100000")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("a sequence needs 100001", done.stderr)


if __name__ == "__main__":
    main()
