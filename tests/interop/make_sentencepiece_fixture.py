#!/usr/bin/env python3
"""Makes tests/train/tokenizers/sentencepiece: tiny models, and the tokens that SentencePiece gives to texts.

  pip install sentencepiece
  tests/interop/make_sentencepiece_fixture.py

- llama/tokenizer.model: BPE with a space before the text, like Llama 2's
- gemma/tokenizer.model: BPE without that space, with user-defined runs of spaces and line breaks, like Gemma's
- unigram/tokenizer.model: a unigram model, whose tokens depend on the whole text
- phrases/tokenizer.model: tokens of several words, so that a text is one piece
- expected.json: texts (as base64) and their tokens, by model
"""
import base64
import json
import os
import random
import sys

import sentencepiece

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "../train/tokenizers/sentencepiece")
TEXTS = [
    "", " ", "  ", "a", " a", "a ", "a  ", "Hello, world!", "hello hello  hello   hello\n\n\nhello",
    "\t\tint main() { return 0; }\r\n\r\n", "   leading", "trailing   ", "\n", " \n ", "\n \n\n",
    "caf\u00e9 cafe\u0301 \u1100\u1161\u11a8", "\u4f60\u597d\uff0c\u4e16\u754c \u4f60",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u05e9\u05dc\u05d5\u05dd",
    "\U0001f600\U0001f468\u200d\U0001f469 \u00a0\u2003\u3000x", "\u2581", "a\u2581b \u2581 c\u2581\u2581",
    "<s>a</s> <unk> <0x0A>", "x" * 300, " " * 300, "=" * 70 + "\n" * 5, "\x01\x7f", "the of the ring of the",
    "The ring is flat; blocks go around. Each rank holds tokens, and the tokens are shards."]
BROKEN = [b"\xff", b"a\xff\xfeb \xc3", b" \xe4\xbd x", b"\xed\xa0\x80 \xf5\x80", b"\xc0\xaf the \xe2\x96"]


def main():
    root = os.path.join(HERE, "../..")
    names = "README.md", "docs/architecture.md", "docs/glossary.md"
    text = os.path.join(OUT, "training.txt")
    os.makedirs(OUT, exist_ok=True)
    with open(text, "w") as file:
        for name in names:
            file.write(open(os.path.join(root, name)).read())
    common = dict(
        input=text, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.995, num_threads=1, minloglevel=2, model_type="bpe", vocab_size=420,
        allow_whitespace_only_pieces=True, split_digits=True)
    models = {
        "llama": {},
        "gemma": dict(add_dummy_prefix=False, user_defined_symbols=["\n\n", "  ", "   ", "<mask>"]),
        "unigram": dict(model_type="unigram"),
        "phrases": dict(split_by_whitespace=False, vocab_size=520),
    }
    rng = random.Random(1)
    alphabet = "abcthe of    \n\n\t'.,01\u00e9\u0301\u0416\u4e00\U0001f600\u2581<s>"
    texts = [t.encode() for t in TEXTS] + BROKEN
    texts += ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 60))).encode() for _ in range(60)]
    expected = {}
    for name, options in models.items():
        os.makedirs(os.path.join(OUT, name), exist_ok=True)
        prefix = os.path.join(OUT, name, "tokenizer")
        sentencepiece.SentencePieceTrainer.train(model_prefix=prefix, **{**common, **options})
        os.remove(prefix + ".vocab")
        processor = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
        expected[name] = [[base64.b64encode(t).decode(), processor.encode(t)] for t in texts]
    os.remove(text)
    with open(os.path.join(OUT, "expected.json"), "w") as file:
        file.write("{\n" + ",\n".join(
            f'"{name}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"
            for name, rows in expected.items()) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
