#!/usr/bin/env python3
"""Makes tests/train/tokenizers/tiny_llama2, forms.json and masks.json: how tokenizer.json forms and cuts a text.

  pip install tokenizers
  tests/interop/make_forms_fixture.py          # after make_tokenizer_fixture.py

tiny_llama2 is merged from characters, with byte_fallback. forms.json has changed fields of tiny_llama2 or tiny.
For each it has the tokens that the library tokenizers gives to texts. Special tokens are text. masks.json has chats,
where special tokens are tokens. A token counts if its offsets in tokenizers reach into a counted part.
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
                 normalized="n" in flags, special="s" in flags) for id_, text, flags in tokens]


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
    # Raw tokens come first, and are not found in the normalized text. Special tokens hide what begins in them.
    "raw": ("tiny", dict(added_tokens=added(
        (400, "caf\u00e9", ""), (401, "l[o", ""), (402, "  l", "n"), (403, "K\u0301", "n"), (404, "<|end", "s"),
        (405, "end", "")))),
    "raw_marks": ("tiny_llama2", dict(normalizer=REPLACE, added_tokens=added(
        (430, MARK * 2, ""), (431, "ring", "r"), (432, " lo", "n")))),
    "always_added": ("tiny_llama2", dict(normalizer=None, pre_tokenizer=metaspace("always", True), added_tokens=added(
        (430, "ring", ""), (431, "lo", "n")))),
    "both": ("tiny_llama2", dict(normalizer=PREPEND, pre_tokenizer=metaspace("always", False), added_tokens=added(
        (430, "ring", ""), (431, "lo", "n")))),
}

# Forms of chats, and chats of parts that are counted or are not, in turn; the first part is not counted.
MASK_FORMS = {
    "prepend": FORMS["prepend"],
    "replace": ("tiny_llama2", dict(normalizer=REPLACE)),
    "always": FORMS["always"],
    "first": ("tiny_llama2", dict(normalizer=None, pre_tokenizer=metaspace("first", False))),
    "nfc": ("tiny", {}),
    "strips": ("tiny", dict(added_tokens=FORMS["strips"][1]["added_tokens"] + added((405, "</s>", "")))),
}
MASK_CHATS = [
    ["<s>[INST] hi [/INST]", " ok</s>", "[INST] yo [/INST]", " fine</s>", "[INST] q [/INST]", " end</s>",
     "[INST] r [/INST]", " bye</s>"],
    ["<s><|user|>\nhi</s>\n<|assistant|>\n", "ok</s>", "\n<|user|>\nyo</s>\n<|assistant|>\n", "fine</s>",
     "\n<|user|>\nthe ring</s>\n<|assistant|>\n", "end</s>", "\n"],
    ["<s>", "a ring</s>", "lo", "</s>", "\u2581ring</s>", "  two  rings", "</s>", "three</s>a", "b</s>", "last"],
    ["", "ring</s>", "<s>lo</s>", "\u00e9\u4e00</s><s>", "\u4e00</s>", "a  <tool_call> ", " b ", "ring", " lo ",
     "</tool_call> lo", "\n"],
    ["e\u0301", "e", "\u0301 e\u0323", "\u0302e\u0323\u0302", "\u0323\u4e00\u0301e", "\u0301\u0301",
     "o\u0301 </s>e\u0301", "e\u0301", "</s>"],
    ["a\u0344", "\u0323", "\u0323\u0344", "\u0f71\u0f73", "\u0323 \u1100", "\u1161", "\u11a8\u0958", "\u093c"],
]


def make_masks():
    masks = {}
    for name, (base, changes) in MASK_FORMS.items():
        fields = json.load(open(os.path.join(OUT, base, "tokenizer.json")))
        fields.update(changes)
        tokenizer = Tokenizer.from_str(json.dumps(fields))
        rows = []
        for parts in MASK_CHATS:
            encoding = tokenizer.encode("".join(parts), add_special_tokens=False)
            starts = [len("".join(parts[:i])) for i in range(len(parts) + 1)]
            counted = list(zip(starts[1::2], starts[2::2]))
            mask = [int(any(begin < last and first < end for first, last in counted)) for begin, end in encoding.offsets]
            mask[0] = 0  # no token predicts it
            starts = [len("".join(parts[:i]).encode()) for i in range(len(parts) + 1)]
            rows.append(dict(text="".join(parts), counted=list(zip(starts[1::2], starts[2::2])),
                             tokens=encoding.ids, mask=mask))
        masks[name] = dict(base=base, changes=changes, chats=rows)
    write("masks.json", masks)


def write(name, forms):
    with open(os.path.join(OUT, name), "w") as file:
        file.write("{\n" + ",\n".join(f'"{name}": {json.dumps(form, separators=(",", ":"))}'
                                      for name, form in forms.items()) + "\n}\n")


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
    texts = TEXTS + ["cafe\u0301 \u212a\u0301 ll[o  l[o <|end<|endoftext ring  ring\u2581\u2581lo  lo"]
    texts += ["a  <tool_call> \u3000 b </tool_call>\n ring caf\u00e9 cafe\u0301 lo  ll[o.", " lo\n"]
    texts += ["".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40))) for _ in range(20)]
    forms = {}
    for name, (base, changes) in FORMS.items():
        fields = json.load(open(os.path.join(OUT, base, "tokenizer.json")))
        fields.update(changes)
        tokenizer = Tokenizer.from_str(json.dumps(fields))
        tokenizer.encode_special_tokens = True
        rows = [[text, tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
        forms[name] = dict(base=base, changes=changes, tokens=rows)
    write("forms.json", forms)
    make_masks()


if __name__ == "__main__":
    main()
