#!/usr/bin/env python3
"""Compares //train:tokenize with the library tokenizers on random added tokens.

    pip install tokenizers numpy
    bazel build //train:tokenize
    tests/interop/added_tokens_parity.py --files=1000 --seed=1

Every file has random added tokens, which overlap and take spaces, and a random normalizer or pre_tokenizer. Its texts
are random, too. Special tokens are text, or they are tokens and a part of the text counts. Tokens must be equal, and a
token counts if its offsets in tokenizers reach into a counted part.
"""

import argparse
import collections
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import numpy
from tokenizers import Tokenizer

from make_forms_fixture import BYTE_LEVEL, MARK, OUT, PREPEND, REPLACE, metaspace, split
from make_tokenizer_fixture import LLAMA_3

ROOT = pathlib.Path(__file__).resolve().parents[2]
NFC = dict(type="NFC")
CUT = dict(type="Sequence", pretokenizers=[split(LLAMA_3), BYTE_LEVEL])
FORMS = [
    ("tiny", dict(normalizer=None, pre_tokenizer=CUT)),
    ("tiny", dict(normalizer=NFC, pre_tokenizer=CUT)),
    ("tiny_llama2", dict(normalizer=PREPEND, pre_tokenizer=None)),
    ("tiny_llama2", dict(normalizer=REPLACE, pre_tokenizer=split(" ", "MergedWithPrevious", kind="String"))),
    ("tiny_llama2", dict(normalizer=dict(type="Sequence", normalizers=[NFC, *PREPEND["normalizers"]]), pre_tokenizer=None)),
]
FORMS += [
    ("tiny_llama2", dict(normalizer=normalizer, pre_tokenizer=metaspace(scheme, cuts)))
    for normalizer in (None, NFC, REPLACE, PREPEND)
    for scheme in ("first", "always", "never")
    for cuts in (False, True)
]
# Parts of texts and of added tokens: spaces, marks, and characters that NFC composes, moves or replaces.
PARTS = ["a", "b", "ab", "<", ">", " ", "  ", "\n", "\t", "\u00a0", "\u3000", MARK, "e", "\u00e9", "\u0301", "\u0323", "\u0344",
         "\u0338", "K", "\u212a", "\u1100", "\u1161", "\u11a8", "\uac00", "\u4e00", "\u0915", "\u093c", "\u0958", "\u0f71",
         "\u0f73", "\u0897", "\U0001f600", "1", "the ", " ring"]


def random_added(rng, first):
    parts = [part for part in PARTS if rng.random() < 0.4] or ["a"]
    tokens = []
    rate = rng.choice((0.1, 0.5))
    for _ in range(rng.randrange(1, 9)):
        content = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 5)))
        if all(content != token["content"] for token in tokens):
            flags = {name: rng.random() < rate for name in ("lstrip", "rstrip", "special")}
            tokens.append(dict(id=first, content=content, single_word=False, normalized=rng.random() < 0.5, **flags))
            first += 1
    return tokens


def random_text(rng, tokens):
    parts = PARTS + [token["content"] for token in tokens] * 4
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 25)))


def random_ranges(rng, text):
    ends = sorted(rng.sample(range(len(text) + 1), min(len(text) + 1, 2 * rng.randrange(1, 4))))
    return list(zip(ends[::2], ends[1::2]))


def expected(tokenizer, text, ranges):
    """Returns the tokens and whether each counts. Without ranges, special tokens are text, and all count.

    No token predicts the first one, which never counts.
    """
    tokenizer.encode_special_tokens = ranges is None
    encoding = tokenizer.encode(text, add_special_tokens=False)
    reaches = lambda begin, end: any(begin < last and first < end for first, last in ranges)
    counts = [int(ranges is None or reaches(begin, end)) for begin, end in encoding.offsets]
    return encoding.ids, [0] * len(counts[:1]) + counts[1:]


def documents(folder):
    """Returns the tokens and marks of each document in a folder of shards."""
    tokens = numpy.fromfile(folder / "train_000000.bin", numpy.uint16, offset=1024)
    packed = numpy.fromfile(folder / "train_000000.marks", numpy.uint8, offset=16)
    marks = numpy.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 1).ravel()[: len(tokens)]
    starts = [*numpy.flatnonzero(marks & 2), len(tokens)]
    return [(tokens[a:b].tolist(), (marks[a:b] & 1).tolist()) for a, b in zip(starts, starts[1:])]


def check(args, rng, folder):
    """Returns what came of one file."""
    base, changes = rng.choice(FORMS)
    fields = json.loads((pathlib.Path(OUT) / base / "tokenizer.json").read_text())
    added = random_added(rng, len(fields["model"]["vocab"]))
    for token in added:
        token["id"] = fields["model"]["vocab"].get(token["content"], token["id"])
    new = [token for token in added if token["content"] not in fields["model"]["vocab"]]
    for number, token in enumerate(new):
        token["id"] = len(fields["model"]["vocab"]) + number
    fields.update(changes, added_tokens=added)
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    texts = [random_text(rng, added) for _ in range(args.texts)]
    rows = [(text, ranges) for text in texts for ranges in (None, random_ranges(rng, text))]
    with open(folder / "data.jsonl", "w") as out:
        for text, ranges in rows:
            row = dict(text=text)
            if ranges is not None:
                row["counted"] = [[len(text[:place].encode()) for place in bounds] for bounds in ranges]
            out.write(json.dumps(row) + "\n")
    subprocess.run(["rm", "-rf", folder / "out"], check=True)
    result = subprocess.run(
        [args.tokenize, f"--data={folder}/data.jsonl", f"--tokenizer={folder}/tokenizer.json", f"--out={folder}/out",
         "--noseparators", "--threads=1"], capture_output=True, text=True)
    if result.returncode != 0:
        return "refused: " + re.sub(r'"[^"]*"', "a token", result.stderr.strip().rpartition("added_tokens: ")[2])
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    got = documents(folder / "out")
    for (text, ranges), row in zip(rows, got):
        want = expected(tokenizer, text, ranges)
        what = "tokens" if row[0] != want[0] else "marks"
        if row != tuple(want):
            print(f"{what} differ: {text!r} {ranges}\n  {row}\n  {want}\n  {changes}\n  " +
                  "\n  ".join(f"{t['id']} {t['content']!r} " + " ".join(k for k, v in t.items() if v is True) for t in added))
            return f"{what} differ"
    return "the same" if len(got) == len(rows) else "documents differ"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenize", default=str(ROOT / "bazel-bin/train/tools/tokenize"))
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.files):
            found[check(args, random.Random(f"{args.seed} {number}"), pathlib.Path(folder))] += 1
    print(*(f"{count:,} files: {what}" for what, count in found.most_common()), sep="\n")
    sys.exit(any("differ" in what for what in found))


if __name__ == "__main__":
    main()
