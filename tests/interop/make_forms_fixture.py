#!/usr/bin/env python3
"""Makes tests/train/tokenizers/tiny_llama2 and forms.json: how tokenizer.json forms and cuts a text.

  pip install tokenizers
  tests/interop/make_forms_fixture.py          # after make_tokenizer_fixture.py

tiny_llama2 is merged from characters, with byte_fallback. forms.json has changed fields of tiny_llama2 or tiny.
For each it has the tokens that the library tokenizers gives to texts. Special tokens are text.
"""
import json
import os
import random

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from make_tokenizer_fixture import LLAMA_3, OUT, TEXTS

MARK = "\u2581"
BYTE_LEVEL = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
REPLACE = dict(type="Replace", pattern=dict(String=" "), content=MARK)
PREPEND = dict(type="Sequence", normalizers=[dict(type="Prepend", prepend=MARK), REPLACE])
DEEPSEEK = ["\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
            "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return dict(type="Split", pattern={kind: pattern}, behavior=behavior, invert=invert)


def sequence(*parts):
    return dict(type="Sequence", pretokenizers=list(parts))


def added(*tokens):
    return [dict(id=id_, content=text, single_word=False, lstrip="l" in flags, rstrip="r" in flags,
                 normalized="n" in flags, special=False) for id_, text, flags in tokens]


def metaspace(scheme, cuts):
    return dict(type="Metaspace", replacement=MARK, prepend_scheme=scheme, split=cuts)


FORMS = {
    "deepseek": ("tiny", dict(pre_tokenizer=sequence(*map(split, DEEPSEEK), BYTE_LEVEL))),
    "digits": ("tiny", dict(pre_tokenizer=sequence(
        dict(type="Digits", individual_digits=True), {**BYTE_LEVEL, "use_regex": True}))),
    "digit_runs": ("tiny", dict(pre_tokenizer=sequence(dict(type="Digits", individual_digits=False), BYTE_LEVEL))),
    "removed": ("tiny", dict(pre_tokenizer=sequence(split(LLAMA_3, "Removed", True), BYTE_LEVEL))),
    "string": ("tiny", dict(pre_tokenizer=sequence(split("l[o.", kind="String"), split("ll", kind="String"),
                                                   BYTE_LEVEL))),
    "strips": ("tiny", dict(added_tokens=added(
        (400, "<tool_call>", "lr"), (401, "</tool_call>", "r"), (402, "ring", "l"), (403, "cafe\u0301", "n"),
        (404, "lo", "lrn")))),
    "prepend": ("tiny_llama2", dict(normalizer=PREPEND)),
    "prepend_added": ("tiny_llama2", dict(normalizer=PREPEND, added_tokens=added((430, "ring", "n")))),
    "replace": ("tiny_llama2", dict(normalizer=REPLACE, pre_tokenizer=split(" ", "MergedWithPrevious", kind="String"),
                                    added_tokens=added((430, "  ", ""), (431, "\n\n\n", "")))),
    "first": ("tiny_llama2", dict(normalizer=None, pre_tokenizer=metaspace("first", False),
                                  added_tokens=added((430, "ring", "")))),
    "always": ("tiny_llama2", dict(normalizer=None, pre_tokenizer=metaspace("always", True))),
    "never": ("tiny_llama2", dict(normalizer=None, pre_tokenizer=metaspace("never", True))),
}


def make_llama2():
    root = os.path.join(OUT, "../../..")
    training = [open(os.path.join(root, name)).read() for name in ("README.md", "docs/architecture.md")]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"] + ["<0x%02X>" % byte for byte in range(256)]
    tokenizer.train_from_iterator([text[:20000] for text in training], trainers.BpeTrainer(
        vocab_size=430, show_progress=False, special_tokens=special, limit_alphabet=70))
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = fields["added_tokens"][:3]
    fields["normalizer"], fields["pre_tokenizer"] = PREPEND, None
    fields["decoder"] = dict(type="Sequence", decoders=[
        dict(type="Replace", pattern=dict(String=MARK), content=" "), dict(type="ByteFallback"),
        dict(type="Fuse"), dict(type="Strip", content=" ", start=1, stop=0)])
    os.makedirs(os.path.join(OUT, "tiny_llama2"), exist_ok=True)
    with open(os.path.join(OUT, "tiny_llama2/tokenizer.json"), "w") as file:
        file.write(json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n")


def main():
    make_llama2()
    rng = random.Random(2)
    alphabet = "ringlo  \u2581\n\t'.,0123\u00e9\u0301\u0416\u4e00\u3042\uac00\U0001f600<|>"
    texts = TEXTS + ["a  <tool_call> \u3000 b </tool_call>\n ring caf\u00e9 cafe\u0301 lo  ll[o.", " lo\n"]
    texts += ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(20)]
    forms = {}
    for name, (base, changes) in FORMS.items():
        fields = json.load(open(os.path.join(OUT, base, "tokenizer.json")))
        fields.update(changes)
        tokenizer = Tokenizer.from_str(json.dumps(fields))
        tokenizer.encode_special_tokens = True
        rows = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
        forms[name] = dict(base=base, changes=changes, tokens=rows)
    with open(os.path.join(OUT, "forms.json"), "w") as file:
        file.write("{\n" + ",\n".join(f'"{name}": {json.dumps(form, separators=(",", ":"))}'
                                      for name, form in forms.items()) + "\n}\n")


if __name__ == "__main__":
    main()
