#!/usr/bin/env python3
"""Writes tests/train/testdata/masks.json, the losses that //tests/train:masks_test expects.

    pip install torch transformers numpy
    tests/interop/make_mask_fixture.py

The file has a stream of tokens with documents and marks, and losses of AdamW steps. The losses are transformers', in
float64, with the label -100 where a token does not count. The model is the Llama of fixtures.py. The test checks that
the trainer takes its sequences from STARTS.
"""

import json
import pathlib

import fixtures
import torch
import transformers

OUT = pathlib.Path(__file__).resolve().parents[1] / "train" / "testdata" / "masks.json"
SEQLEN, BATCH, ACCUMULATE, STEPS, LR = 16, 2, 2, 4, 0.01
DOCUMENTS = [9, 3, 14, 1, 7, 20, 5, 12, 2, 11, 6, 15, 4, 10, 8, 13, 18]  # tokens of each
STARTS = [37, 101, 53, 21, 117, 133, 69, 85, 109, 29, 61, 45, 93, 141, 125, 77]  # of the run with seed 1


def stream():
    """Returns the tokens, whether each counts, and the places where documents begin."""
    random = fixtures.numbers(7, 2 * sum(DOCUMENTS))
    tokens = [int((value + 1) / 2 * 10) for value in random[: sum(DOCUMENTS)]]
    counts = [bool(value > 0.2) for value in random[sum(DOCUMENTS) :]]
    begins, at = [], 0
    for length in DOCUMENTS:
        begins.append(at)
        counts[at] = False
        at += length
    return tokens, counts, begins


def loss_of(model, tokens, labels, begins, packed):
    """Returns the sum of the losses of a sequence, and how many labels count."""
    cuts = [0] + [at for at in begins if 0 < at < SEQLEN] + [SEQLEN] if packed else [0, SEQLEN]
    total, count = 0, 0
    for begin, end in zip(cuts, cuts[1:]):
        logits = model(torch.tensor([tokens[begin:end]])).logits[0]
        part = torch.tensor(labels[begin:end])
        total = total + torch.nn.functional.cross_entropy(logits, part, ignore_index=-100, reduction="sum")
        count += int((part != -100).sum())
    return total, count


def train(packed):
    """Returns the losses of the steps, each the mean over all labels that count."""
    tokens, counts, begins = stream()
    model = transformers.LlamaForCausalLM(fixtures.CONFIGS["llama"]).double().eval()
    state = model.state_dict()
    for number, name in enumerate(sorted(state)):
        state[name].copy_(torch.from_numpy(fixtures.numbers(number, state[name].numel())).view(state[name].shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses = []
    for step in range(STEPS):
        sums, labels = 0, 0
        for start in STARTS[step * BATCH * ACCUMULATE : (step + 1) * BATCH * ACCUMULATE]:
            row = tokens[start : start + SEQLEN + 1]
            targets = [t if counts[start + 1 + i] else -100 for i, t in enumerate(row[1:])]
            part, count = loss_of(model, row, targets, [at - start for at in begins], packed)
            sums, labels = sums + part, labels + count
        optimizer.zero_grad()
        (sums / labels).backward()
        optimizer.step()
        losses.append(float((sums / labels).detach()))
    return losses


def main():
    tokens, counts, begins = stream()
    result = {
        "seqlen": SEQLEN, "batch": BATCH, "accumulate": ACCUMULATE, "lr": LR, "starts": STARTS, "tokens": tokens,
        "counts": [int(value) for value in counts], "begins": begins,
        "losses": {"packed": train(True), "whole": train(False)},
    }
    OUT.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
