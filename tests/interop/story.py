#!/usr/bin/env python3
"""Lives docs/training/story.md as a new user would, with transformers at both ends.

    pip install torch transformers safetensors jinja2
    bazel build //train //train:chat //train:chats //train:tokenize //train:export
    tests/interop/story.py

The script makes a random small Qwen3 with a chat template. The commands of the page run as they are, with few steps.
Then transformers loads the last directory, which must say 32,768 tokens and YaRN. It continues the training, and its
losses must equal //train's from the same directory. Training goes on from a directory that transformers saves.
"""

import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import torch
import transformers

import hf_parity

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ["--steps=2", "--eval_every=0", "--sample=0"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>\\n' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_directory(folder):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(ROOT / "tests/train/tokenizers/tiny/tokenizer.json"), eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=4096, rope_theta=1e6, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


def make_chats(path):
    with open(path, "w") as file:
        for i in range(2500):
            talk = [dict(role="user", content="how many ranks are in ring %d?" % i),
                    dict(role="assistant", content="ring %d has %d of them" % (i, i * 7919 % 64))]
            file.write(json.dumps(dict(messages=talk)) + "\n")


def commands():
    """Yields (program, arguments) of the page."""
    text = (ROOT / "docs/training/story.md").read_text()
    for line in re.sub(r"\\\n\s*", "", re.search(r"```\n(.*?)```", text, re.S).group(1)).strip().split("\n"):
        words = shlex.split(line, comments=True)
        program = words[2].partition(":")[2]
        yield "train/tools/" + program if program else "train/train", words[4:]


def tell(folder):
    for program, arguments in commands():
        small = SMALL if program == "train/train" else ["--tokens=8"] if program.endswith("/chat") else []
        print("  " + shlex.join([program, *arguments]), flush=True)
        result = subprocess.run([ROOT / "bazel-bin" / program, *arguments, *small], cwd=folder, text=True,
                                input="how many?\n/exit\n", env=dict(os.environ, BUILD_WORKING_DIRECTORY=str(folder)),
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if result.returncode != 0 or "/chat" in program and result.stdout.count("\n") < 1:
            sys.exit(result.stdout)


def check(what, ok, failures):
    print("  %-40s %s" % (what, "ok" if ok else "DIFFERS"))
    if not ok:
        failures.append(what)


def close(a, b):
    """Losses in float32 of the same tokens and weights, after up to 20 steps, as in hf_parity.py."""
    return max(abs(x - y) / y for x, y in zip(a, b)) < 1e-4


def main():
    failures = []
    hf_parity.SEQLEN = 512
    args = argparse.Namespace(device="cpu", ranks=2, tp=1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        make_directory(folder / "DIR")
        make_chats(folder / "chats.jsonl")
        tell(folder)
        config = transformers.AutoConfig.from_pretrained(folder / "HOME")
        rope = getattr(config, "rope_parameters", None) or config.rope_scaling
        check("model, 32,768 tokens, YaRN of 8 from 4,096",
              (config.model_type, config.max_position_embeddings, rope["rope_type"], rope["factor"],
               rope["original_max_position_embeddings"]) == ("qwen3", 32768, "yarn", 8, 4096), failures)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "HOME")
        check("chat template and tokens",
              tokenizer.chat_template == TEMPLATE and tokenizer.eos_token == "<|im_end|>", failures)
        tokens = tokenizer("how many ranks are in the ring of the text? " * 100)["input_ids"]
        data = tokens[:hf_parity.SEQLEN + 1]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "HOME", dtype=torch.float32)
        there = hf_parity.losses_there(model, data)
        check("20 steps that continue it", close(hf_parity.train_here(folder / "HOME", data, folder, args), there),
              failures)
        # There and back again.
        model.save_pretrained(folder / "BACK")
        (folder / "again").mkdir()
        again = hf_parity.train_here(folder / "BACK", data, folder / "again", args)
        check("20 more from what transformers saves", close(again, hf_parity.losses_there(model, data)), failures)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
