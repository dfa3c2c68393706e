"""Sides in turns, medians of GPU times, and the JSON of the results, for the benchmarks of GPUs.

A comparison is a dict of functions (sides) by name. In every round each side has its turn, so a change of the GPU's
clock meets all sides. A figure is the median of a side's rounds.
"""

import datetime
import functools
import json
import re
import statistics
import subprocess
import time

import torch
from torch.nn.attention import sdpa_kernel

AHEAD = 20_000_000  # cycles (some 10 ms) in which the host gets ahead of the GPU
PAUSE = 0.05  # seconds of rest, after which a GPU is not at its power limit
FLUSHED = 256 << 20  # bytes, some five L2 caches


def turns(sides, rounds, timed, warm=1, order=None):
    """Returns by name the results of timed(side) in each round, after `warm` rounds that do not count.

    order: a function that changes the order of the sides before each round."""
    names, found = list(sides), {name: [] for name in sides}
    for number in range(warm + rounds):
        if order:
            order(names)
        for name in names:
            value = timed(sides[name])
            if number >= warm:
                found[name].append(value)
    return found


def medians(found):
    return {name: statistics.median(values) for name, values in found.items() if values}


def between_events(function, calls=1):
    """Returns two events, recorded before and after `calls` calls in a row."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(calls):
        function()
    events[1].record()
    return events


def call_ms(function, calls=1, ahead=False):
    """Returns the GPU's milliseconds for one of `calls` calls in a row. ahead: the host first gets ahead of the GPU."""
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(AHEAD)
    begin, end = between_events(function, calls)
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def rested_ms(function):
    """Returns the GPU's milliseconds for one call after a pause. Zeros fill the L2 cache before the call."""
    torch.cuda.synchronize()
    time.sleep(PAUSE)
    torch.cuda._sleep(AHEAD)
    torch.empty(FLUSHED, dtype=torch.int8, device="cuda").zero_()
    begin, end = between_events(function)
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def slowest_rank_ms(function, calls=1):
    """Returns call_ms of the slowest rank. All ranks begin together."""
    torch.distributed.barrier()
    slowest = torch.tensor([call_ms(function, calls, ahead=True)], device="cuda")
    torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
    return slowest.item()


def queued_ms(sides, rounds):
    """Returns by name the median of the GPU's milliseconds. All rounds are queued at once, so the GPU does not rest
    between them."""
    turns(sides, 3, lambda function: function(), warm=0)
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    events = turns(sides, rounds, between_events, warm=0)
    torch.cuda.synchronize()
    return medians({name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()})


def sdpa(backend, q, k, v, **arguments):
    """Computes PyTorch's attention of [batch, tokens, heads, head_dim] by a backend. The result is transposed."""
    with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            enable_gqa=q.shape[2] != k.shape[2], **arguments)


def normals(*shapes):
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


def document_lengths(tokens):
    """Returns lengths of packed documents, whose logarithms are equally spread from 512 to 16,384."""
    lengths, generator = [], torch.Generator().manual_seed(1)
    while sum(lengths) < tokens:
        longest = tokens - sum(lengths)
        lengths.append(min(longest, int(512 * 32 ** torch.rand((), generator=generator).item())))
    return lengths


class Words:
    """Reads the command line: words such as quick, only=REGEX and FILE.json."""

    def __init__(self, words):
        values = dict(word.split("=", 1) for word in words if "=" in word)
        self.words, self.pattern = words, values.get("only", "")
        self.path = next((word for word in words if word.endswith(".json")), None)

    def __contains__(self, word):
        return word in self.words

    def wants(self, label):
        return re.search(self.pattern, label) is not None


@functools.lru_cache
def driver():
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0]


def write(path, rows, **more):
    """Writes the results, the machine and the versions as JSON. Without a path it writes nothing."""
    if not path:
        return
    with open(path, "w") as file:
        json.dump({"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(),
                   "driver": driver(), "torch": torch.__version__, **more, "rows": rows}, file, indent=1)
