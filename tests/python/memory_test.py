"""Tests calls on the CPU that run out of memory, on one to four threads.

Under a limit of addresses a call gives burst.OutOfMemoryError or a result; the process never ends. Once the
limit is gone, the next call works."""

import os
import resource
import signal
import sys
import unittest

import torch

import burst
from harness import main

LENGTH, HEADS = 64, 2
COMPUTED, RAN_OUT = 10, 11


def inputs(head_dim):
    return [torch.ones(1, LENGTH, HEADS, head_dim).requires_grad_() for _ in range(3)]


def limit(extra=None):
    """Allows `extra` more bytes of addresses than now; None: no limit."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (hard if extra is None else used + extra, hard))


def use_stack():
    """Grows the stack before there is a limit, because the kernel ends a process whose stack cannot grow."""
    def deeper(levels):
        return 0 if levels == 0 else 1 + deeper(levels - 1)
    return deeper(400)


def run_under(kib, threads):
    torch.set_num_threads(threads)
    small, large = inputs(16), inputs(6000)
    burst.attention(*small).sum().backward()
    use_stack()
    code = COMPUTED
    limit(kib << 10)
    try:
        out = burst.attention(*large)  # torch may lack memory, too, for out, dq, dk and dv
        out.sum().backward()
    except (burst.OutOfMemoryError, MemoryError, RuntimeError) as error:
        limit()
        # torch's allocator on the CPU raises RuntimeError, of which BurstError is a kind.
        if isinstance(error, burst.BurstError) and not isinstance(error, burst.OutOfMemoryError):
            raise
        if isinstance(error, burst.OutOfMemoryError):
            assert "memory" in str(error) and "check failed" not in str(error), error
        elif isinstance(error, RuntimeError):
            assert "memory" in str(error) or "resource" in str(error).lower(), error
        code = RAN_OUT
    limit()
    out = burst.attention(*small)
    assert torch.allclose(out, small[2])
    out.sum().backward()
    return code


class Memory(unittest.TestCase):
    def test_a_limit_is_an_error_and_the_next_call_works(self):
        counts = {COMPUTED: 0, RAN_OUT: 0}
        for threads in (1, 2, 3, 4):
            kib = 16
            while kib < 600000:
                pid = os.fork()
                if pid == 0:
                    code = 1
                    try:
                        signal.alarm(60)  # a call that hangs
                        code = run_under(kib, threads)
                    except BaseException as error:
                        limit()
                        sys.stderr.write("%s: %s\n" % (type(error).__name__, error))
                    finally:
                        os._exit(code)
                status = os.waitpid(pid, 0)[1]
                with self.subTest(threads=threads, kib=kib):
                    self.assertFalse(os.WIFSIGNALED(status), "ended by a signal: %d" % status)
                    self.assertIn(os.WEXITSTATUS(status), counts)
                    counts[os.WEXITSTATUS(status)] += 1
                kib = kib * 8 // 5
        self.assertGreater(counts[COMPUTED], 0)
        self.assertGreater(counts[RAN_OUT], 0)


if __name__ == "__main__":
    main()
