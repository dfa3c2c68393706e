"""python -m burst: prints versions and devices, and tests attention over the ranks that it is started with:

  python -m burst
  torchrun --nproc_per_node=4 -m burst       # GPUs if there are enough, else CPUs

The test compares out and gradients with attention by the definition in double precision. The exit code is 1 if they
differ, or if a rank is lost.
"""

import os
import platform
import sys

import torch

import burst
from burst import _library

_SEQLEN, _HEADS, _KV_HEADS, _HEAD_DIM = 509, 4, 2, 64
_MASKS = (dict(causal=True), dict(causal=False), dict(window=100), dict(documents=[0, 77, 150]))
_LAYOUTS = ("zigzag", "contiguous", "striped")
# The error allowed relative to the norm: five roundings to bfloat16, and 100 to 5,000 of the sums in the others.
_ALLOWED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _versions():
    """Returns lines of names and versions."""
    library = _library.library()
    lines = [("burst", "%s, %s" % (burst.__version__, os.path.dirname(burst.__file__))),
             ("library", "%s, %s" % (library.burst_version().decode(), getattr(library, "_name", ""))),
             ("python", "%s on %s" % (platform.python_version(), platform.machine())), ("torch", torch.__version__)]
    try:
        from importlib import metadata
        lines.append(("transformers", metadata.version("transformers")))
    except ImportError:
        pass
    gpus = torch.cuda.device_count()
    lines += [("GPU %d" % i, "%s, compute capability %d.%d" % (
        torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))) for i in range(gpus)]
    if gpus:
        built = library.burst_cuda_device_count()
        lines += [("CUDA", "%s in torch; the library sees %d GPUs" % (torch.version.cuda, built)),
                  ("NCCL", ".".join(map(str, torch.cuda.nccl.version())))]
    return lines + [("CPU", "%d threads" % torch.get_num_threads())]


def _by_definition(q, k, v, causal=True, window=0, documents=(0,)):
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    at = torch.arange(q.shape[1], device=q.device)
    ahead = at[None] - at[:, None]
    of = torch.bucketize(at, torch.tensor(documents[1:], device=q.device), right=True)
    hidden = (of[:, None] != of[None]) | ((ahead > 0) if causal else (ahead.abs() < 0))
    if window:
        hidden |= ahead.abs() >= window
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3]**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -float("inf")).softmax(-1), v)


def _errors(device, dtype, group):
    """Returns the largest error of out and of the gradients, relative to the norms, and the number of cases."""
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, _SEQLEN, heads, _HEAD_DIM, generator=generator, dtype=torch.float64).to(device, dtype)
             for heads in (_HEADS, _KV_HEADS, _KV_HEADS)]
    worst, cases = 0.0, 0
    for mask in _MASKS:
        exact = [x.double().requires_grad_() for x in whole]
        want = _by_definition(*exact, **mask)
        wanted = [want.detach(), *torch.autograd.grad(want.sin().sum(), exact)]
        for layout in _LAYOUTS:
            own = [burst.shard(x, 1, group, layout).requires_grad_() for x in whole]
            out = burst.attention(*own, group=group, layout=layout, **mask)
            # The gradient is the definition's, so that its errors do not add to attention's.
            slope = burst.shard(want.detach().cos(), 1, group, layout).to(dtype)
            for a, b in zip([out.detach(), *torch.autograd.grad(out, own, slope)], wanted):
                b = burst.shard(b, 1, group, layout)
                worst = max(worst, ((a.double() - b).norm() / b.norm().clamp(min=1e-30)).item())
            cases += 1
    return worst, cases


def _start():
    """Returns (device, group or None) of this process, which torchrun may have started."""
    if "RANK" not in os.environ:
        return torch.device("cuda", 0) if torch.cuda.device_count() else torch.device("cpu"), None
    local = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    return device, torch.distributed.group.WORLD


def main() -> int:
    """Prints versions and the result of the test; returns the exit code."""
    device, group = _start()
    dist = torch.distributed
    rank, ranks = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    say = print if rank == 0 else lambda *_, **__: None
    for name, value in _versions():
        say("%-13s %s" % (name, value))
    failed = False
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        worst, cases = _errors(device, dtype, group)
        if group is not None:
            every = torch.tensor([worst], dtype=torch.float64, device=device)
            dist.all_reduce(every, op=dist.ReduceOp.MAX)
            worst = every.item()
        right = worst <= _ALLOWED[dtype]
        failed = failed or not right
        say("%-13s %s: %d cases on %s over %d rank%s, off by %.1e, allowed %.0e" % (
            "self-test", "right" if right else "WRONG", cases, str(dtype)[6:] + " " + device.type, ranks,
            "" if ranks == 1 else "s", worst, _ALLOWED[dtype]), flush=True)
    if group is not None:
        burst.disconnect()
        dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
