#!/usr/bin/env python3
"""Checks that transformers loads the tokenizers of exported runs, and gives the tokens of the run.

    pip install torch transformers sentencepiece protobuf
    bazel build //train //train:export
    tests/interop/own_tokenizers.py

A run of one step on a text, with tokens of bytes, of characters, and of each file in tests/train/tokenizers, is
exported. AutoTokenizer must load the export, and its tokens of the text must be those of the run's data.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "train" / "tokenizers"
TEXT = "In the beginning was the ring;\n\n  a block of 1234 keys, caf\u00e9 and \u4f60\u597d.\n" * 40


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")


def own_tokens(folder, tokenizer, text):
    if tokenizer == "byte":
        return list(text.encode())
    if tokenizer == "char":
        characters = sorted(set(text))
        return [characters.index(c) for c in text]
    run(ROOT / "bazel-bin/train/tools/tokenize", f"--data={folder / 'text.txt'}", f"--tokenizer={tokenizer}",
        f"--out={folder / 'shards'}")
    shard = next((folder / "shards").glob("*.bin"))
    return numpy.fromfile(shard, numpy.uint16, offset=1024).tolist()[1:]


def check(tokenizer):
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        (folder / "text.txt").write_text(TEXT)
        run(ROOT / "bazel-bin/train/train", f"--data={folder / 'text.txt'}", f"--tokenizer={tokenizer}",
            "--steps=1", "--seqlen=32", "--batch=1", "--eval_every=0", "--sample=0", "--ranks=1",
            f"--out={folder / 'run'}", f"--data_cache={folder / 'cache'}")
        run(ROOT / "bazel-bin/train/tools/export", folder / "run", f"--out={folder / 'export'}")
        there = transformers.AutoTokenizer.from_pretrained(folder / "export")
        got = there(TEXT, add_special_tokens=False)["input_ids"]
        same = got == own_tokens(folder, tokenizer, TEXT)
        config = json.loads((folder / "export" / "config.json").read_text())
        ends = config["eos_token_id"] == there.eos_token_id
        text = there.decode(got)
        print(f"{pathlib.Path(tokenizer).name:12} {len(got)} tokens", "the same" if same else "DIFFER",
              "" if ends else f"eos {config['eos_token_id']} and {there.eos_token_id} DIFFER",
              "" if text.strip() == TEXT.strip() else "text DIFFERS")
        return same and ends and text.strip() == TEXT.strip()


def main():
    tokenizers = ["byte", "char", FILES / "tiny", FILES / "tiny_llama2", FILES / "sentencepiece" / "llama"]
    sys.exit(0 if all([check(str(tokenizer)) for tokenizer in tokenizers]) else 1)


if __name__ == "__main__":
    main()
