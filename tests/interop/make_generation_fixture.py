#!/usr/bin/env python3
"""Writes tests/train/testdata/generation.json, the results that //tests/train:prompt_test expects.

    pip install torch transformers numpy sentencepiece protobuf
    tests/interop/make_generation_fixture.py

Each case is a directory with a small Llama model, a tokenizer of tests/train/tokenizers, and the files that say
which tokens begin a prompt and end a text. The fixture has the prompts' tokens by that tokenizer, and the tokens
that transformers generates greedily, without and with these ends. The weights come from fixtures.py.
"""

import json
import os
import pathlib
import shutil
import tempfile

import torch
import transformers
from fixtures import numbers

ROOT = pathlib.Path(__file__).resolve().parents[1] / "train"
PROMPTS = ["the ring", "", "a</s>b", "<s>the", "<s> the", " of", "<unk>x", "x<|end_of_text|>y", "\nq</s>\n"]
NEW = 24


def template(*ids):
    """Returns a post_processor that puts these tokens before the text."""
    names = {f"t{i}": dict(id=f"t{i}", ids=[i], tokens=[f"t{i}"]) for i in ids}
    parts = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair = text + [{"Sequence": {"id": "B", "type_id": 1}}]
    return dict(type="TemplateProcessing", single=parts + text, pair=pair, special_tokens=names)


BYTES = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
LLAMA = dict(tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
BPE = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>")
# Name, tokenizer, post_processor, tokenizer_config.json.
CASES = [
    ("bpe", "tiny", None, BPE),
    ("bpe_bytes", "tiny", BYTES, BPE),
    ("bpe_template", "tiny", template(400), BPE),
    ("bpe_two", "tiny", template(400, 403), BPE),
    ("bpe_sequence", "tiny", dict(type="Sequence", processors=[BYTES, template(401)]), BPE),
    ("bpe_ignored", "tiny", template(400), dict(BPE, add_bos_token=False)),
    ("llama", "sentencepiece/llama", None, LLAMA),
    ("llama_bos", "sentencepiece/llama", None, dict(LLAMA, add_bos_token=True)),
    ("llama_legacy", "sentencepiece/llama", None, dict(LLAMA, add_bos_token=True, legacy=True)),
    ("gemma", "sentencepiece/gemma", None, dict(LLAMA, tokenizer_class="GemmaTokenizer", add_bos_token=True)),
]


def make(folder, tokenizer, processor, settings, config):
    source = ROOT / "tokenizers" / tokenizer
    files = {"tokenizer_config.json": settings}
    if tokenizer == "tiny":
        made = json.loads((source / "tokenizer.json").read_text())
        made["post_processor"] = processor
        (folder / "tokenizer.json").write_text(json.dumps(made))
    else:
        shutil.copy(source / "tokenizer.model", folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return dict(tokenizer=tokenizer, processor=processor, files=files)


def generate(model, ids, ends, vocab):
    """Returns the generated tokens after the prompt, with the end token."""
    out = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=0,
        suppress_tokens=list(range(vocab, model.config.vocab_size)),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
    )
    return out[0, len(ids):].tolist()


def main():
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=424, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    tensors = dict(sorted(model.state_dict().items()))
    with torch.no_grad():
        for number, value in enumerate(tensors.values()):
            value.copy_(torch.from_numpy(numbers(number, value.numel())).view(value.shape))
    config.architectures = ["LlamaForCausalLM"]
    fields = {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version"}
    cases = {}
    for name, tokenizer, processor, settings in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            case = make(folder, tokenizer, processor, settings, fields)
            read = transformers.AutoTokenizer.from_pretrained(folder)
            case["prompts"] = []
            for prompt in PROMPTS:
                ids = read(prompt)["input_ids"]
                row = dict(text=prompt, tokens=ids)
                if ids:
                    end = read.convert_tokens_to_ids(settings["eos_token"])
                    row["generated"] = generate(model, ids, [end], len(read))
                    row["ends"] = [row["generated"][-3], row["generated"][-2]]
                    row["ended"] = generate(model, ids, [end, *row["ends"]], len(read))
                case["prompts"].append(row)
        cases[name] = case
    text = json.dumps(dict(
        transformers=transformers.__version__,
        model=dict(config=fields, tensors=[[n, list(v.shape)] for n, v in tensors.items()]),
        cases=cases,
    ))
    for key in ['"cases"', '"tokenizer"', '"text"', '"tensors"']:
        text = text.replace(f"{key}: ", f"\n{key}: ")
    (ROOT / "testdata" / "generation.json").write_text(text + "\n")


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
