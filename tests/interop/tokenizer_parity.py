#!/usr/bin/env python3
"""Compares //train:tokenize with tiktoken, tokenizers and SentencePiece, token by token.

  bazel build -c opt //train:tokenize
  pip install tiktoken tokenizers sentencepiece numpy
  tests/interop/tokenizer_parity.py --tokenizer=FOLDER [--megabytes=110] [TEXT_OR_CODE ...]

FOLDER holds tokenizer.model, tokenizer.json, or GPT-2's encoder.json and vocab.bpe. The data has several parts:
text and code from the named files (of a folder, all files), and random characters of all of Unicode. Then come
random words, spaces, digits, contractions and marks in many scripts, and bytes that are not UTF-8. Each part is a
file, which several threads read in pieces.

A text with bytes that are not UTF-8 has, in order, the tokens of its runs: UTF-8 by itself, and each run of
other bytes. Decoding must give the bytes again (in normal form C, if the tokenizer asks for that). SentencePiece
gets the whole of each part, and decodes it itself. The exit code is 1 at the first difference.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

import numpy as np
import sentencepiece
import tiktoken
import tokenizers

GPT2_PATTERN = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_characters():
    """Returns GPT-2's characters for bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + i) for i, b in enumerate(others)}}


CHARACTERS = byte_characters()
BYTES = {c: b for b, c in CHARACTERS.items()}


def valid_runs(data):
    """Returns (is UTF-8, bytes) of each run of a text."""
    runs, at = [], 0
    while at < len(data):
        try:
            data[at:].decode()
            bad, end = len(data), len(data)
        except UnicodeDecodeError as error:
            bad, end = at + error.start, at + error.end
        for is_valid, part in ((True, data[at:bad]), (False, data[bad:end])):
            if not part:
                continue
            if runs and runs[-1][0] == is_valid:
                runs[-1] = (is_valid, runs[-1][1] + part)
            else:
                runs.append((is_valid, part))
        at = end
    return runs


class Tiktoken:
    def __init__(self, folder):
        encoder = json.load(open(os.path.join(folder, "encoder.json")))
        ranks = {
            bytes(BYTES[c] for c in token): rank
            for token, rank in encoder.items() if token != "<|endoftext|>"
        }
        self.encoding = tiktoken.Encoding("gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                                          special_tokens={"<|endoftext|>": 50256})
        self.nfc = False

    def encode(self, texts):
        return self.encoding.encode_ordinary_batch(texts, num_threads=2)

    def piece(self, data):
        return self.encoding._encode_single_piece(data)

    def decode(self, tokens):
        return self.encoding.decode_bytes(tokens)


class Tokenizers:
    def __init__(self, folder):
        self.tokenizer = tokenizers.Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
        self.tokenizer.encode_special_tokens = True
        normalizer = json.loads(self.tokenizer.to_str())["normalizer"]
        self.nfc = normalizer is not None

    def encode(self, texts):
        return [e.ids for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def piece(self, data):
        return [t.id for t in self.tokenizer.model.tokenize("".join(CHARACTERS[b] for b in data))]


class SentencePiece:
    def __init__(self, folder):
        model = os.path.join(folder, "tokenizer.model")
        self.processor = sentencepiece.SentencePieceProcessor(model_file=model)


def expected_tokens(reference, data):
    if isinstance(reference, SentencePiece):
        return reference.processor.encode(data)
    runs = valid_runs(data)
    texts = iter(reference.encode([part.decode() for is_valid, part in runs if is_valid]))
    tokens = []
    for is_valid, part in runs:
        tokens += next(texts) if is_valid else reference.piece(part)
    return tokens


def random_unicode(rng, size):
    """Returns characters of all of Unicode, also unassigned ones."""
    text, n = [], 0
    while n < size:
        c = rng.randrange(0x110000)
        if rng.random() < 0.5:
            c = rng.choice((rng.randrange(0x80), rng.randrange(0x3000), rng.randrange(0x10000)))
        if 0xD800 <= c < 0xE000:
            continue
        text.append(chr(c))
        n += 2
    return "".join(text).encode()


def random_words(rng, size):
    """Returns words of many scripts between all kinds of spaces, digits, contractions and marks."""
    scripts = [(0x61, 26), (0x41, 26), (0x3B1, 25), (0x430, 32), (0x5D0, 27), (0x627, 30), (0x905, 50),
               (0x4E00, 2000), (0x3041, 80), (0xAC00, 500), (0x1F600, 60), (0x300, 100), (0x1100, 200),
               (0x1E00, 200), (0x10D4A, 40), (0x31350, 100), (0x1D7CE, 20), (0x660, 10)]
    spaces = [" "] * 20 + ["\n", "\n\n", "\r\n", "\t", "  ", "   ", "\u00a0", "\u2003", "\u3000", "\u0085",
              "\u180e", "\u2028", "\u200b", "\x1c", "\x0b", "\x0c", "    \n", " \n ", "\n    "]
    marks = ["'s", "'S", "'ll", "'LL", "'t", "'\u017f", "n't", "'re", "'", '"', ".", ",", "...", "!?", "()", "{};",
             "<|endoftext|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_cal", "\u2019s", "_", "==",
             "\u212a", "\u0130", "\u00df", "\ufb06", "e\u0301", "\u1100\u1161\u11a8", ">\u0338", "a\u0323\u0307"]
    parts, n = [], 0
    while n < size:
        kind = rng.random()
        if kind < 0.5:
            first, count = rng.choice(scripts)
            part = "".join(chr(first + rng.randrange(count)) for _ in range(rng.randrange(1, 12)))
        elif kind < 0.8:
            part = rng.choice(spaces)
        elif kind < 0.9:
            part = rng.choice(marks)
        else:
            part = str(rng.randrange(10**rng.randrange(1, 9)))
        parts.append(part)
        n += len(part.encode())
    return "".join(parts).encode()


def broken(rng, data):
    """Returns a text with changed, dropped and repeated bytes, and some random bytes."""
    out = bytearray(data)
    for _ in range(len(data) // 40):
        at = rng.randrange(len(out))
        kind = rng.randrange(3)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1:
            del out[at:at + rng.randrange(1, 4)]
        else:
            out[at:at] = rng.randbytes(rng.randrange(1, 6))
    return bytes(out)


def parts_of(paths, megabytes, seed):
    """Returns parts (name, bytes) of about 1 MB each."""
    rng = random.Random(seed)
    size = 1 << 20
    files = []
    for path in paths:
        if os.path.isdir(path):
            for folder, _, names in sorted(os.walk(path)):
                files += [os.path.join(folder, name) for name in sorted(names)]
        else:
            files.append(path)
    real, n = [b""], 0
    budget = megabytes * 6 // 10 * size
    for file in files:
        if n > budget or not os.path.isfile(file):
            continue
        data = open(file, "rb").read(4 * size)
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        n += len(data)
        real[-1] += data
        if len(real[-1]) >= size:
            real.append(b"")
    parts = [("files", data) for data in real if data]
    while n < megabytes * size:
        for name, make in (("unicode", random_unicode), ("words", random_words)):
            data = make(rng, size)
            parts.append((name, data))
            n += len(data)
        source = parts[rng.randrange(len(parts))][1] if rng.random() < 0.8 else rng.randbytes(size)
        data = broken(rng, source[:size])
        parts.append(("broken", data))
        n += len(data)
    return parts


def tokens_of(folder):
    tokens = []
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".bin"):
            continue
        header = np.fromfile(os.path.join(folder, name), np.int32, 256)
        dtype = {20240520: np.uint16, 20240801: np.uint32}[header[0]]
        tokens.append(np.fromfile(os.path.join(folder, name), dtype, offset=1024))
    return np.concatenate(tokens).astype(np.int64), int(header[4])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenize", default="bazel-bin/train/tools/tokenize")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--megabytes", type=int, default=110)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("paths", nargs="*")
    args = parser.parse_args()

    def has(name):
        return os.path.exists(os.path.join(args.tokenizer, name))

    kind = SentencePiece if has("tokenizer.model") else Tokenizers if has("tokenizer.json") else Tiktoken
    reference = kind(args.tokenizer)
    parts = parts_of(args.paths, args.megabytes, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = os.path.join(folder, "data")
        os.mkdir(data)
        for i, (name, content) in enumerate(parts):
            open(os.path.join(data, f"{i:06}.{name}"), "wb").write(content)
        out = os.path.join(folder, "out")
        subprocess.run([args.tokenize, f"--data={data}", f"--tokenizer={args.tokenizer}", f"--out={out}"],
                       check=True)
        tokens, separator = tokens_of(out)
    starts = np.flatnonzero(tokens == separator)
    if len(starts) != len(parts):
        sys.exit(f"{len(starts)} documents instead of {len(parts)}")
    sizes, count = {}, 0
    for i, (name, content) in enumerate(parts):
        got = tokens[starts[i] + 1:starts[i + 1] if i + 1 < len(parts) else None]
        want = np.array(expected_tokens(reference, content))
        if not np.array_equal(got, want):
            n = min(len(got), len(want))
            at = int(np.argmax(got[:n] != want[:n])) if n and (got[:n] != want[:n]).any() else n
            sys.exit(f"part {i} ({name}) differs at token {at} of {len(want)}: "
                     f"{got[max(0, at - 3):at + 5]} instead of {want[max(0, at - 3):at + 5]}")
        if isinstance(reference, Tiktoken) and reference.decode(got.tolist()) != content:
            sys.exit(f"part {i} ({name}) does not decode to itself")
        sizes[name] = sizes.get(name, 0) + len(content)
        count += len(want)
    print(f"{count:,} tokens are the same; MB: " +
          ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items()))


if __name__ == "__main__":
    main()
