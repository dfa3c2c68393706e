"""Ranks as processes for tests of the Python package, and naive attention to compare with.

The runner prints GoogleTest's closing lines, which .ci/run counts."""

import faulthandler
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import unittest

import torch
import torch.distributed as dist

PATIENCE = 100  # seconds for a group of ranks


def run_ranks(size, body, expect=None):
    """Runs body(rank, group) in `size` new processes, which are connected by gloo. Fails with the first error
    that a process raises. expect: exit codes by rank; default: all 0."""
    folder = tempfile.TemporaryDirectory(prefix="burst-")
    store = os.path.join(folder.name, "store")
    children = []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _child(rank, size, body, store, writing)
        os.close(writing)
        children.append((pid, reading))
    failures = []
    for rank, (pid, reading) in enumerate(children):
        with os.fdopen(reading, errors="replace") as pipe:
            text = pipe.read()
        status = os.waitpid(pid, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        if code != (expect or {}).get(rank, 0):
            failures.append("rank %d of %d ended with %d\n%s" % (rank, size, code, text))
    if failures:
        raise AssertionError("\n".join(failures))


def run_program(ranks, *arguments, **environment):
    """Returns what each rank of a Python program prints. Fails unless all exit with 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # These are torchrun's variables. torch 1.13's torchrun does not work with Python 3.11.
    started = [subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                 MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **environment)) for rank in range(ranks)]
    said = [process.communicate(timeout=PATIENCE) for process in started]
    if any(process.returncode for process in started):
        raise AssertionError("\n".join(out + error[-4000:] for out, error in said))
    return [out for out, _ in said]


def _child(rank, size, body, store, writing):
    code = 1
    try:
        signal.alarm(PATIENCE)
        faulthandler.enable(file=sys.stderr)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
        body(rank, dist.group.WORLD)
        import burst
        burst.disconnect()
        code = 0
    except BaseException:
        os.write(writing, traceback.format_exc().encode()[-60000:])
    finally:
        os._exit(code)


def naive(q, k, v, *, causal=True, softmax_scale=None, window=0, starts=None, sinks=None, spans=(),
          slices=(), softcap=0, alibi_slopes=None, kept=None):
    """Returns (out, lse) of [batch, tokens, heads, head_dim] by the definition.

    - starts: rows of documents; spans: rows of pairs
    - slices: rows of slices
    - sinks: one more column of scores, [heads]
    - alibi_slopes: [heads]
    - kept: [batch, heads, tokens, keys], factors of the weights
    """
    n, keys, heads = q.shape[1], k.shape[1], q.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[2], 2) for x in (k, v))
    scale = softmax_scale or 1 / math.sqrt(q.shape[3])
    at = torch.arange(n)
    distance = at[:, None] - torch.arange(keys)[None, :]
    hidden = torch.zeros(q.shape[0], n, keys, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window:
        hidden |= distance.abs() >= window
    for row in range(q.shape[0] if starts else 0):
        of = torch.bucketize(at, torch.tensor(sorted(set(starts[row % len(starts)]) - {0})), right=True)
        hidden[row] |= of[:, None] != of[None, :]
    for row in range(q.shape[0] if spans else 0):
        for begin, end in spans[row % len(spans)]:
            hidden[row, begin:end, begin:end] = False
    for row in range(q.shape[0] if slices else 0):
        shown = torch.zeros(n, keys, dtype=torch.bool)
        for q_begin, q_end, k_begin, k_end, kind in slices[row % len(slices)]:
            at, to = torch.arange(n)[:, None], torch.arange(keys)[None, :]
            part = (q_begin <= at) & (at < q_end) & (k_begin <= to) & (to < k_end)
            if kind in ("causal", "band"):
                part &= to - k_end <= at - q_end
            if kind in ("inverse_causal", "band"):
                part &= to - k_begin >= at - q_begin
            shown |= part
        hidden[row] |= ~shown
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - torch.tensor(alibi_slopes, dtype=scores.dtype)[:, None, None] * distance.abs()
    scores = scores.masked_fill(hidden[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    weights = scores.softmax(-1)[..., :keys]
    if kept is not None:
        weights = weights * kept
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), scores.logsumexp(-1)


def normal(name, *shape):
    """Returns standard normal numbers in double, which depend on the name only."""
    generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


class _Result(unittest.TextTestResult):
    passed = 0

    def addSuccess(self, test):
        self.passed += 1
        super().addSuccess(test)


def main():
    program = unittest.main(
        exit=False, verbosity=2,
        testRunner=unittest.TextTestRunner(stream=sys.stdout, resultclass=_Result, verbosity=2))
    failed = len(program.result.failures) + len(program.result.errors)
    print("[  PASSED  ] %d tests." % program.result.passed)
    if failed:
        print(" %d FAILED TEST%s" % (failed, "" if failed == 1 else "S"))
    sys.exit(failed > 0 or program.result.passed + len(program.result.skipped) == 0)
