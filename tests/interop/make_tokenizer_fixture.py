#!/usr/bin/env python3
"""Makes tests/train/tokenizers: two tiny tokenizers, and the tokens that the library tokenizers gives to texts.

  pip install tokenizers
  tests/interop/make_tokenizer_fixture.py

  tiny/tokenizer.json          Llama 3's pattern, ignore_merges, normal form C, added tokens
  tiny_gpt2/encoder.json, vocab.bpe          GPT-2's pattern
  expected.json                texts and their tokens, by tokenizer; special tokens are text
"""
import json
import os
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = os.path.join(HERE, "../train/tokenizers")
LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
TEXTS = [
    "", " ", "a", "Hello, world!", "hello hello  hello   hello\n\n\nhello", "it's IT'S they'll THEY'LL we'\u017f",
    "12 123 1234 12345 \u0661\u0662\u0663\u0664", "\t\tint main() { return 0; }\r\n\r\n", "   leading", "trailing   ",
    "caf\u00e9 cafe\u0301 \u1100\u1161\u11a8 a\u0323\u0307 a\u0307\u0323 >\u0338", "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u0417\u0434\u0440\u0430\u0432\u0441\u0442\u0432\u0443\u0439 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627", "\U0001f600\U0001f468\u200d\U0001f469", "\u00a0\u2003\u3000\u0085x\u180ey\u2028z\u1680",
    "<|endoftext|> <tool_call>a</tool_call> <tool_cal", "x" * 300, " " * 300, "=" * 70 + "\n" * 5,
    "\U00031350\U00010d4a\U00010d40 \u0897 \U0001e5d0", "\U00011938 \U00011935\U00011930 \u0b47\u0b56\u08ca\u0301", "\x00\x01\x7f",
    "The ring is flat; blocks go around. Each rank holds tokens, and the tokens are shards of the sequence."]


def main():
    root = os.path.join(HERE, "../..")
    training = [open(os.path.join(root, name)).read() for name in ("README.md", "docs/architecture.md")]

    tiny = Tokenizer(models.BPE(ignore_merges=True))
    tiny.normalizer = normalizers.NFC()
    tiny.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tiny.decoder = decoders.ByteLevel()
    gpt2 = Tokenizer(models.BPE())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    gpt2.decoder = decoders.ByteLevel()
    for tokenizer, size in ((tiny, 400), (gpt2, 380)):
        tokenizer.train_from_iterator(training, trainers.BpeTrainer(
            vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tiny.add_special_tokens([AddedToken("<|end_of_text|>", special=True, normalized=False),
                             AddedToken("<|endoftext|>", special=True, normalized=False)])
    tiny.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])

    os.makedirs(os.path.join(OUT, "tiny"), exist_ok=True)
    os.makedirs(os.path.join(OUT, "tiny_gpt2"), exist_ok=True)
    with open(os.path.join(OUT, "tiny/tokenizer.json"), "w") as file:
        file.write(tiny.to_str() + "\n")
    model = json.loads(gpt2.to_str())["model"]
    model["vocab"]["<|endoftext|>"] = len(model["vocab"])
    with open(os.path.join(OUT, "tiny_gpt2/encoder.json"), "w") as file:
        file.write(json.dumps(model["vocab"]) + "\n")
    with open(os.path.join(OUT, "tiny_gpt2/vocab.bpe"), "w") as file:
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        file.write("#version: 0.2\n" + "\n".join(merges) + "\n")

    rng = random.Random(1)
    alphabet = "abcXYZ  \n\n\t'.,0123\u00e9\u0301\u0416\u4e00\uac00\U0001f600<|>"
    texts = TEXTS + ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 60))) for _ in range(60)]
    tiny.encode_special_tokens = True
    expected = {name: [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
                for name, tokenizer in (("tiny", tiny), ("tiny_gpt2", gpt2))}
    for name, rows in expected.items():
        tokenizer = {"tiny": tiny, "tiny_gpt2": gpt2}[name]
        for text, ids in rows:
            if tokenizer.decode(ids, skip_special_tokens=False) != (
                    tiny.normalizer.normalize_str(text) if name == "tiny" else text):
                sys.exit(f"{name} does not decode {text!r}")
    with open(os.path.join(OUT, "expected.json"), "w") as file:
        file.write("{\n" + ",\n".join(
            f'"{name}": [\n' + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"
            for name, rows in expected.items()) + "\n}\n")


if __name__ == "__main__":
    main()
