#!/usr/bin/env python3
"""Measures perplexity by position, before and after a model was continued at a longer sequence.

    context_quality.py VAL_SHARD OUT LENGTH BEFORE AFTER   Hugging Face directories, read by transformers, on a GPU

//train:tokenize makes VAL_SHARD. The script reads the first LENGTH tokens of every document that has as many, and
writes OUT.json and OUT.svg. The tokens are also predicted from the last 1,024 tokens alone. Documents may become
easier or harder with position, so only the distance of these two curves is due to the context.
"""

import json
import math
import os
import struct
import sys

import torch
import transformers

SHORT = 1024  # the tokens of the shorter context
END_OF_TEXT = 50256  # in GPT-2's vocabulary


def documents(path, length):
    """Returns the first `length` tokens of each document that has as many."""
    with open(path, "rb") as file:
        header = struct.unpack("<256i", file.read(1024))
        tokens = torch.frombuffer(bytearray(file.read(2 * header[2])), dtype=torch.uint16).long()
    starts = torch.nonzero(tokens == END_OF_TEXT).flatten().tolist() + [len(tokens)]
    return [tokens[a:a + length] for a, b in zip(starts, starts[1:]) if b - a >= length]


@torch.no_grad()
def losses(model, tokens):
    """Returns the losses [batch, tokens - 1] of each token but the first."""
    found = []
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.model(tokens).last_hidden_state[:, :-1]
    for part, targets in zip(hidden.split(2048, 1), tokens[:, 1:].split(2048, 1)):
        with torch.autocast("cuda", torch.bfloat16):
            logits = model.lm_head(part)
        logits = logits.float()
        found.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none"))
    return torch.cat(found, 1)


def curves(directory, texts, length):
    """Returns sums of the losses by position: from the whole context, and from the last SHORT / 2 to SHORT tokens."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).cuda().eval()
    whole, short = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    for text in texts:
        text = text.cuda()
        whole[1:] += losses(model, text[None])[0].double().cpu()
        pieces = text.unfold(0, SHORT, SHORT // 2)
        of_pieces = torch.cat([losses(model, some) for some in pieces.split(16)]).double().cpu()
        short[1:SHORT] += of_pieces[0]
        for i in range(1, len(pieces)):
            begin = i * SHORT // 2 + SHORT // 2
            short[begin:begin + SHORT // 2] += of_pieces[i, SHORT // 2 - 1:]
    return whole / len(texts), short / len(texts)


def by_range(loss, ranges):
    return [math.exp(loss[max(a, 1):b].mean().item()) for a, b in ranges]


def plot(path, ranges, series):
    """Plots perplexity over position, both logarithmic."""
    width, height, left, bottom = 720, 420, 60, 50
    values = [v for _, _, points in series for v in points]
    low, high = math.log(min(values)) - 0.05, math.log(min(max(values), 20 * min(values))) + 0.05
    x0, x1 = math.log2(ranges[0][1]) - 1, math.log2(ranges[-1][1])
    def x(i):
        a, b = ranges[i]
        return left + (math.log2(max(a, b / 2)) + 0.5 - x0) / (x1 - x0) * (width - left - 20)
    def y(v):
        return 20 + (high - min(high, math.log(v))) / (high - low) * (height - 20 - bottom)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
             'font-size="13"><rect width="100%%" height="100%%" fill="white"/>' % (width, height)]
    for i, (a, b) in enumerate(ranges):
        parts.append('<text x="%.0f" y="%d" text-anchor="middle" font-size="11">%d–%d</text>' %
                     (x(i), height - bottom + 20, a, b))
    parts.append('<text x="%d" y="%d" text-anchor="middle">position in the document (tokens)</text>' %
                 (width // 2, height - 8))
    value = math.exp(low)
    for step in range(6):
        value = math.exp(low + (high - low) * step / 5)
        parts.append('<line x1="%d" x2="%d" y1="%.1f" y2="%.1f" stroke="#ddd"/><text x="%d" y="%.1f" '
                     'text-anchor="end">%.2f</text>' % (left, width - 20, y(value), y(value), left - 6, y(value) + 4,
                                                       value))
    for n, (name, color, points) in enumerate(series):
        parts.append('<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>' %
                     (color, " ".join("%.1f,%.1f" % (x(i), y(v)) for i, v in enumerate(points))))
        parts.append('<rect x="%d" y="%d" width="14" height="4" fill="%s"/><text x="%d" y="%d">%s</text>' %
                     (left + 30, 30 + 18 * n, color, left + 50, 36 + 18 * n, name))
    with open(path, "w") as file:
        file.write("\n".join(parts) + "\n</svg>\n")


def main():
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    shard, out, length, before, after = sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:]
    texts = documents(shard, length)
    if not texts:
        sys.exit("%s has no document of %d tokens" % (shard, length))
    ranges = [(0, 128)] + [(1 << i, 1 << i + 1) for i in range(7, int(math.log2(length)))]
    _, base = curves(before, texts, length)
    whole, short = curves(after, texts, length)
    series = [("before, last %d tokens" % SHORT, "#999", by_range(base, ranges)),
              ("after, last %d tokens" % SHORT, "#c60", by_range(short, ranges)),
              ("after, all tokens before", "#06c", by_range(whole, ranges))]
    print("%d documents; perplexity at positions" % len(texts))
    for i, (a, b) in enumerate(ranges):
        print("%6d to %6d  " % (a, b) + "  ".join("%s %.3f" % (name, points[i]) for name, _, points in series))
    plot(out + ".svg", ranges, series)
    with open(out + ".json", "w") as file:
        json.dump({"gpu": torch.cuda.get_device_name(), "documents": len(texts), "ranges": ranges,
                   "perplexity": {name: points for name, _, points in series}}, file, indent=1)


if __name__ == "__main__":
    main()
