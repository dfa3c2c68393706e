#!/usr/bin/env python3
"""Compares the Hopper attention kernels with FlashAttention-3, cuDNN and other builds of ours, in one process.

    attention_peers.py LIBRARY [fa3=LIBRARY] [NAME=LIBRARY...] [OPTION...]

LIBRARY is libburst_sm90.so. NAME=LIBRARY is another build, for example an earlier commit's. FlashAttention-3 is
called through JAX's FFI, and flash_attention3.py names its library. PyTorch calls cuDNN ("cudnn"). The option
frontend also calls it through its own frontend ("cudnn frontend"), and fa4 FlashAttention-4's kernels for Hopper.

Options:
- forward or backward (else both), quick (up to 16K tokens) or few (eleven cases), only=REGEX
- frontend: needs the package nvidia-cudnn-frontend
- fa4: needs the packages flash-attn-4 and nvidia-cutlass-dsl[cu13]
- layouts: the frontend may also lay the inputs out as [batch, heads, tokens, head_dim], before the calls
- hot (the default), rested or both: regimes
- rounds=N (9), seconds=N (after which no case begins), FILE.json (where to write)

A forward has 2 * batch * heads * (D + E) * (visible query-key pairs) FLOPs, a backward 2 * batch * heads * (3 D + 2 E) *
(pairs), where D is the head_dim of q and k and E that of v. A figure in
TFLOP/s is the median of the rounds. In a round every side has its turn, in random order, because a GPU at its power
limit is faster after a side that took less power.
- hot: a turn is calls for about 30 ms, by wall clock. The GPU is at its power limit.
- rested: a turn is a pause, zeros that fill the L2 cache, and one call, by events.

Our backward is timed in a fixed order (the default) and free, and so are the frontend's and FlashAttention-4's. The
other peers' backward passes are free. First, every side's results are compared with the first peer's. A peer that
fails is left out, and its error is printed.
"""

import itertools
import os
import random
import re
import sys
import time
import traceback

import torch

import sm90_kernels as base
from harness import document_lengths, medians, rested_ms, turns, write

BATCH_SECONDS = 0.03
LARGEST_DIFFERENCE = 0.02  # a relative difference of norms; two roundings to bfloat16 make 0.004
MOST_FLOPS = 1e15  # FLOP/s that no Hopper GPU reaches
FIXED = " fixed order"


def dims(dim, value_dim):
    return f"D{dim}" if value_dim == dim else f"D{dim}/{value_dim}"


class Case:
    def __init__(self, name, batch, tokens, heads, kv_heads, dim, mask, lengths=None, window=None, value_dim=None):
        self.name, self.batch, self.tokens, self.mask = name, batch, tokens, mask
        self.heads, self.kv_heads, self.dim, self.value_dim = heads, kv_heads, dim, value_dim or dim
        self.lengths, self.window = lengths, window
        self.scale = dim ** -0.5
        self.label = f"{name} {batch}x{tokens} {heads}/{kv_heads} {dims(dim, self.value_dim)} {mask}"

    def allocate(self):
        self.q, self.k, self.v, self.dout = base.make(self.batch, self.tokens, self.tokens, self.heads,
                                                      self.kv_heads, self.dim, 1.0, value_dim=self.value_dim)
        self.ranges = {"full": lambda: None,
                       "causal": lambda: base.causal(self.tokens, self.tokens),
                       "window": lambda: base.window(self.tokens, self.tokens, self.window),
                       "documents": lambda: base.documents(self.lengths)}[self.mask]()
        pairs = base.visible_pairs(self.q, self.k, self.ranges) * self.heads
        self.forward_flop = 2 * pairs * (self.dim + self.value_dim)
        self.backward_flop = 2 * pairs * (3 * self.dim + 2 * self.value_dim)


class Side:
    """A call, which returns its results, and a function that waits for them.

    in_order: the same call, but on the GPU it lies between the work of PyTorch's stream before it and after it."""

    def __init__(self, call, wait=None, in_order=None):
        self.call, self.wait, self.in_order = call, wait or (lambda results: None), in_order or call


def is_peer(name):
    return name.startswith(("fa3", "fa4", "cudnn"))


def our_sides(libraries, case, backward):
    sides = {}
    for name, kernels in libraries.items():
        out = torch.full_like(case.dout, float("nan"))
        lse = torch.empty((case.batch, case.heads, case.tokens), device="cuda")

        def forward(kernels=kernels, out=out, lse=lse):
            kernels.forward(case.q, case.k, case.v, case.scale, case.ranges, out, lse)
            return [out]
        if not backward:
            sides[name] = Side(forward)
            continue
        forward()
        delta = torch.empty_like(lse)
        gradients = [torch.full_like(x, float("nan")) for x in (case.q, case.k, case.v)]
        for suffix, deterministic in (("", True), (" free", False)):
            def call(kernels=kernels, out=out, lse=lse, delta=delta, gradients=gradients, deterministic=deterministic):
                kernels.backward(case.q, case.k, case.v, case.scale, case.ranges, out, lse, case.dout,
                                 *gradients, delta, deterministic=deterministic)
                return gradients
            sides[name + suffix] = Side(call)
    return sides


def pytorch_side(case, backward):
    """Returns cuDNN through PyTorch."""
    is_causal = case.mask == "causal"
    if backward:
        return Side(base.cudnn_backward(case.q, case.k, case.v, case.dout, case.scale, is_causal))
    return Side(lambda: [base.cudnn_forward(case.q, case.k, case.v, case.scale, is_causal).transpose(1, 2)])


class Peers:
    """The peers that the command line names, as sides of cases."""

    def __init__(self, fa3, fa4, frontend, layouts):
        self.fa3 = self.fa4 = self.frontend = None
        self.versions, self.failed, self.of_case = {"cudnn": torch.backends.cudnn.version()}, {}, {}
        if fa3:
            self._attempt("fa3", lambda: self._load_fa3(fa3))
        if fa4:
            self._attempt("fa4", self._load_fa4)
        if frontend:
            self._attempt("cudnn frontend", lambda: self._load_frontend(layouts))

    def _load_fa3(self, path):
        import flash_attention3
        flash_attention3.load(path)
        self.fa3 = flash_attention3

    def _load_fa4(self):
        import flash_attention4
        self.fa4 = flash_attention4
        self.versions.update(flash_attention4.versions())

    def _load_frontend(self, layouts):
        import cudnn_frontend
        self.layouts = [cudnn_frontend.tokens_first] + ([cudnn_frontend.heads_first] if layouts else [])
        self.frontend = cudnn_frontend
        self.versions.update(cudnn_frontend.versions())

    def _attempt(self, name, make):
        try:
            return make()
        except Exception as error:  # a peer's failure must not end the comparison
            self.failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{name} is left out:", flush=True)
            traceback.print_exc(limit=-4, file=sys.stdout)
            return None

    def begin(self, case):
        self.failed, self.of_case = {}, {}
        if self.fa3 and case.value_dim == case.dim:
            self.of_case["fa3"] = self._attempt("fa3", lambda: self.fa3.FlashAttention3(case))
        if self.fa4:
            self.of_case["fa4"] = self._attempt("fa4", lambda: self.fa4.FlashAttention4(case))
        if self.frontend and case.mask in ("full", "causal"):
            self.of_case["frontend"] = self._attempt(
                "cudnn frontend", lambda: self.frontend.Frontend(case, self.layouts))

    def sides(self, case, backward):
        fa3, fa4, frontend = (self.of_case.get(name) for name in ("fa3", "fa4", "frontend"))
        makers = {}
        if fa3:
            call = fa3.backward if backward else fa3.forward
            makers["fa3"] = lambda: Side(call, self.fa3.wait, lambda: fa3.in_order(call))
        if case.mask in ("full", "causal"):
            makers["cudnn"] = lambda: pytorch_side(case, backward)
        for name, peer in (("fa4", fa4), ("cudnn frontend", frontend)):
            if peer and backward:
                makers[name] = lambda peer=peer: Side(peer.backward(deterministic=False))
                makers[name + FIXED] = lambda peer=peer: Side(peer.backward(deterministic=True))
            elif peer:
                makers[name] = lambda peer=peer: Side(peer.forward())
        sides = {}
        for name, make in makers.items():
            side = self._attempt(name, make)
            if side and self._attempt(name, lambda: (tensors(side), side.in_order())):
                sides[name] = side
        return sides


def tensors(side):
    results = [torch.from_dlpack(x) for x in side.call()]
    torch.cuda.synchronize()
    return results


def hot_seconds(seconds_a_call):
    """Returns a function that times calls of a side in a row, by wall clock."""
    calls = max(1, min(20, int(BATCH_SECONDS / seconds_a_call)))

    def timed(side):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            results = side.call()
        side.wait(results)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls
    return timed


def compare(case, sides, failed):
    """Compares results with the first side's. Takes away a peer whose results differ, and notes it in `failed`.

    Returns the largest difference, and which sides compute the same bits twice."""
    first, *_ = sides
    truth = [x.clone() for x in tensors(sides[first])]
    largest, repeats = 0.0, {}
    for name in list(sides):
        results = [x.clone() for x in tensors(sides[name])]
        repeats[name] = all(torch.equal(x, y) for x, y in zip(results, tensors(sides[name])))
        difference = max(((x.reshape(t.shape).float() - t.float()).norm() / t.float().norm()).item()
                         for x, t in zip(results, truth))
        if difference <= LARGEST_DIFFERENCE:
            largest = max(largest, difference)
            continue
        text = f"{name}: results must be within {LARGEST_DIFFERENCE} of {first}'s; got a difference of {difference:.2g}"
        if not is_peer(name):
            raise RuntimeError(f"{case.label}: {text}")
        print(f"{case.label}: {text}; it is left out", flush=True)
        failed[name] = text
        del sides[name]
    return {"compared_with": first, "largest_difference": largest, "repeats": repeats}


def measure(case, libraries, peers, backward, regimes, rounds):
    """Returns a row for each regime."""
    sides = peers.sides(case, backward)
    if not sides:
        raise RuntimeError(f"{case.label}: a peer must compute the results to compare with; got none; give fa3=LIBRARY")
    plans = {name: side.call.name for name, side in sides.items() if hasattr(side.call, "name")}
    sides.update(our_sides(libraries, case, backward))
    flop = case.backward_flop if backward else case.forward_flop
    row = {"pass": "backward" if backward else "forward", "case": case.name, "batch": case.batch,
           "tokens": case.tokens, "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.dim, "value_dim": case.value_dim,
           "mask": case.mask, **compare(case, sides, peers.failed), "plans": plans, "failed": dict(peers.failed)}
    timers = {"hot": hot_seconds(flop / 6e14), "rested": lambda side: rested_ms(side.in_order) / 1e3}
    rows = []
    for regime in regimes:
        found = turns(sides, rounds, timers[regime], order=random.Random(0).shuffle)
        tflops = {name: flop / s / 1e12 for name, s in medians(found).items()}
        for name in [name for name, x in tflops.items() if x * 1e12 > MOST_FLOPS]:
            print(f"{case.label}: {name} must be timed until it ends; got {tflops.pop(name):.0f} TFLOP/s", flush=True)
        rows.append({**row, "regime": regime, "tflops": tflops})
        print(f"{row['pass']:8} {case.label:38} {regime:6} " +
              "  ".join(f"{name} {x:.0f}" for name, x in tflops.items()), flush=True)
    return rows


def table(rows, libraries):
    """Prints the best peer of each row and our ratio to it. A backward in a fixed order has peers of its own."""
    print("\n| pass | case | regime | ours | best peer | ratio | best in a fixed order | ratio |\n"
          "|---|---|---|--:|---|--:|---|--:|")
    for row, name in itertools.product(rows, libraries):
        for ours in (name, name + " free"):
            if ours not in row["tflops"]:
                continue
            text = [row["pass"], "{batch}x{tokens} {heads}/{kv_heads} {dims} {mask}".format(
                **row, dims=dims(row["head_dim"], row["value_dim"])), row["regime"],
                    f"{ours} {row['tflops'][ours]:.0f}"]
            peers = {peer: x for peer, x in row["tflops"].items() if is_peer(peer)}
            for suffix in ("", FIXED):
                best = max((peer for peer in peers if peer.endswith(suffix)), key=peers.get, default=None)
                text += [f"{best} {peers[best]:.0f}" if best else "-",
                         f"{row['tflops'][ours] / peers[best]:.3f}" if best else "-"]
            print("| " + " | ".join(text) + " |", flush=True)


def few_cases():
    yield Case("grouped", 1, 16384, 64, 8, 128, "causal")
    for mask, tokens in itertools.product(("causal", "full"), (8192, 16384)):
        yield Case("long", 1, tokens, 32, 32, 128, mask)
    yield Case("long", 1, 8192, 32, 32, 64, "causal")
    yield Case("gpt2", 64, 1024, 12, 12, 64, "causal")
    yield Case("wide", 1, 8192, 16, 16, 256, "full")
    yield Case("wide", 1, 8192, 16, 16, 192, "causal")
    yield Case("grouped", 1, 16384, 64, 8, 128, "full")
    yield latent(16384)


def latent(tokens):
    """Returns multi-head latent attention of DeepSeek-V3's heads."""
    return Case("latent", 1, tokens, 128, 128, 192, "causal", value_dim=128)


def all_cases(quick):
    lengths = (4096, 8192, 16384) if quick else (4096, 8192, 16384, 32768, 65536)
    for dim in (128, 64):
        for mask in ("full", "causal"):
            for tokens in lengths:
                yield Case("long", 1, tokens, 32, 32, dim, mask)
    for dim in (96, 192, 256):
        for mask in ("full", "causal"):
            yield Case("wide", 1, 16384, 16, 16, dim, mask)
    for tokens in lengths[1:]:
        yield latent(tokens)
    for heads, kv_heads in ((64, 8), (32, 8), (16, 8), (8, 1)):
        for tokens in (8192, 16384):
            yield Case("grouped", 1, tokens, heads, kv_heads, 128, "causal")
    yield Case("gpt2", 64, 1024, 12, 12, 64, "causal")
    for batch, tokens in ((16, 512), (16, 2048), (8, 4096)):
        for mask in ("full", "causal"):
            yield Case("short", batch, tokens, 32, 32, 128, mask)
    if quick:
        return
    yield Case("packed", 1, 65536, 32, 32, 128, "documents", lengths=document_lengths(65536))
    yield Case("window", 1, 65536, 32, 32, 128, "window", window=4096)


def main():
    paths, passes, pattern, words, path = {}, (False, True), "", set(), None
    numbers = {"rounds": 9, "seconds": 100_000}
    for argument in sys.argv[1:]:
        key, equals, value = argument.partition("=")
        if argument in ("forward", "backward"):
            passes = (argument == "backward",)
        elif argument in ("quick", "few", "frontend", "fa4", "layouts", "hot", "rested"):
            words.add(argument)
        elif argument.endswith(".json"):
            path = argument
        elif equals and key == "only":
            pattern = value
        elif equals and key in numbers and value.isdigit() and int(value) > 0:
            numbers[key] = int(value)
        elif (value if equals else argument).endswith(".so"):
            library = value if equals else argument
            if not os.path.isfile(library):
                sys.exit(f"attention_peers.py: no file {library}")
            paths[key if equals else "ours"] = os.path.abspath(library)
        else:
            sys.exit(f"attention_peers.py: no option {argument}\n\n{__doc__}")
    if "ours" not in paths:
        sys.exit(f"attention_peers.py needs LIBRARY\n\n{__doc__}")
    if "layouts" in words and "frontend" not in words:
        sys.exit("attention_peers.py: layouts: must come with frontend; got layouts alone; add frontend")
    peers = Peers(paths.pop("fa3", None), "fa4" in words, "frontend" in words, "layouts" in words)
    libraries = {name: base.Kernels(library) for name, library in paths.items()}
    regimes = [regime for regime in ("rested", "hot") if regime in words] or ["hot"]
    print(torch.cuda.get_device_name(), torch.__version__, peers.versions, flush=True)
    rows, failed, start = [], 0, time.perf_counter()
    for case in few_cases() if "few" in words else all_cases("quick" in words):
        if not re.search(pattern, case.label):
            continue
        if time.perf_counter() - start > numbers["seconds"]:
            print(f"{case.label}: left out after {numbers['seconds']} seconds", flush=True)
            continue
        try:
            case.allocate()
            peers.begin(case)
            for backward in passes:
                rows += measure(case, libraries, peers, backward, regimes, numbers["rounds"])
                write(path, rows, **peers.versions, rounds=numbers["rounds"])
        except Exception:  # the other cases must still be measured
            failed += 1
            traceback.print_exc(file=sys.stdout)
        torch.cuda.empty_cache()
    table(rows, libraries)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
