#!/usr/bin/env python3
"""Writes tests/train/testdata/evaluation.json, the values that //tests/train:evaluate_test expects.

    pip install torch transformers numpy
    tests/interop/make_evaluation_fixture.py

The model is generation.json's, in double precision, with the tokenizer of tests/train/tokenizers/tiny. The fixture has
the losses of choices and last words, whose tokens are found as by lm-evaluation-harness. It also has greedy tokens, and
perplexities by position of a text, from all tokens before and from the last ones alone.
"""

import json
import math
import pathlib

import torch
import transformers
from fixtures import numbers

ROOT = pathlib.Path(__file__).resolve().parents[1] / "train"
QUESTIONS = [
    dict(context="the ring of", choices=[" ranks", " the end", " of it all"], answer=1),
    dict(context="Question: what goes around? Answer:", choices=[" A block", " a rank é", "b"], answer=0),
    dict(context="one ", choices=["two", "three words more"], answer=1),
    dict(context="the", choices=[" and of", " ring", " and", " token"], answer=2),
]
WORDS = ["the ring goes around the ranks", "a text with\na last word", "it is of the end"]
TEXT = "the ring of ranks goes around and the tokens of it are in blocks. " * 14
SEQLEN, LAST = 256, 64
FIRST_RANGE = 128


def model_of_generation():
    model = json.loads((ROOT / "testdata" / "generation.json").read_text())["model"]
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model["config"])).double().eval()
    state = llama.state_dict()
    with torch.no_grad():
        for number, (name, _) in enumerate(model["tensors"]):
            state[name].copy_(torch.from_numpy(numbers(number, state[name].numel())).view(state[name].shape))
    return llama


@torch.no_grad()
def losses(model, tokens):
    """Returns the loss of each token but the first."""
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none").tolist()


def choice_loss(model, encode, context, choice):
    spaces = len(context) - len(context.rstrip(" "))
    whole = encode(context + choice)
    before = encode(context[:len(context) - spaces])
    return sum(losses(model, whole)[len(before) - 1:])


def by_range(loss_of):
    """Returns perplexities for numbers of tokens before, [1, 128], [129, 256], ..."""
    found, begin = [], 0
    while begin < SEQLEN:
        end = min(SEQLEN, max(FIRST_RANGE, 2 * begin))
        found.append(math.exp(sum(loss_of(before) for before in range(begin + 1, end + 1)) / (end - begin)))
        begin = end
    return found


def main():
    model = model_of_generation()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(ROOT / "tokenizers/tiny/tokenizer.json"))

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for question in QUESTIONS:
        question["losses"] = [choice_loss(model, encode, question["context"], c) for c in question["choices"]]
    words = []
    for text in WORDS:
        cut = max(text.rfind(" "), text.rfind("\n"))
        words.append(dict(text=text, loss=choice_loss(model, encode, text[:cut], text[cut:])))
    prompt = encode("the ring")
    generated = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20, eos_token_id=None)
    tokens = encode(TEXT)[:SEQLEN + 1]
    assert len(tokens) == SEQLEN + 1
    whole = losses(model, tokens)

    def from_last(before):
        """Returns the loss of the token from the tokens of its piece; pieces begin at multiples of LAST / 2."""
        begin = 0 if before <= LAST else (before - LAST // 2 - 1) // (LAST // 2) * (LAST // 2)
        assert before <= LAST or LAST // 2 < before - begin <= LAST
        return losses(model, tokens[begin:before + 1])[-1]

    (ROOT / "testdata" / "evaluation.json").write_text(json.dumps(dict(
        transformers=transformers.__version__, questions=QUESTIONS, words=words,
        greedy=dict(prompt=len(prompt), tokens=generated[0].tolist()),
        text=TEXT, seqlen=SEQLEN, last=LAST, loss=sum(whole) / SEQLEN,
        by_range=by_range(lambda before: whole[before - 1]), by_range_of_last=by_range(from_last),
    )).replace(', "', ',\n"') + "\n")


if __name__ == "__main__":
    main()
