#!/usr/bin/env python3
"""Compares this library with transformers, on small random models of every family.

    pip install torch transformers safetensors
    bazel build //train //train:import //train:export //tests/interop:logits
    tests/interop/hf_parity.py [--models=llama,gpt2] [--device=cpu] [--ranks=1] [--tp=1]

The checks for each model:
- transformers saves it, in one file and in several, and the logits of both are equal to 1e-4 (float32);
- the losses of 20 training steps from it equal those of torch's AdamW;
- it is imported, exported, and loaded again by transformers, with the same bytes in every tensor;
- a trained run is exported, and transformers' loss equals that of the run's next step.
The exit code is 1 if something differs.

With --device=cuda it compares only GPU results: logits in float32 and bfloat16, and the training. A bfloat16
error is the root mean square of the difference from transformers in float64. It may be at most the error of
transformers' own bfloat16 on the same GPU. GPUs take only head_dims that are a multiple of 8, so others are not
tried.
"""

import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy
import torch
import transformers
from safetensors.torch import load_file

import hf_models

ROOT = pathlib.Path(__file__).resolve().parents[2]
SEQLEN, BATCH, STEPS = 60, 2, 20
LR, DECAY, BETAS, EPS, CLIP = 3e-3, 0.1, (0.9, 0.95), 1e-8, 1.0


def run(*command):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{result.stdout}{result.stderr}")
    return result.stdout


def program(name):
    return ROOT / "bazel-bin" / name


def logits_here(directory, tokens, folder, *dtype):
    (folder / "tokens.json").write_text(json.dumps(tokens.tolist()))
    run(program("tests/interop/logits"), directory, folder / "tokens.json", folder / "logits", *dtype)
    return load_file(folder / "logits")["logits"]


def logits_there(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def check_logits(what, here, there, failures):
    error = (here - there).abs().max().item()
    scale = there.abs().max().item()
    ok = error <= 1e-4
    print(f"  {what:28} {error:.1e} of {scale:.1f}{'' if ok else '  DIFFERS'}")
    if not ok:
        failures.append(what)


def write_shard(path, tokens):
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + numpy.asarray(tokens, dtype=numpy.uint16).tobytes())


def batch_of(data):
    """Returns the batch of every step. The data is one sequence long, so its order does not matter."""
    x, y = torch.tensor(data[:-1]), torch.tensor(data[1:])
    return x.expand(BATCH, -1), y.expand(BATCH, -1)


def loss_of(model, x, y):
    logits = model(x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.reshape(-1))


def losses_there(model, data):
    x, y = batch_of(data)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=decayed, weight_decay=DECAY), dict(params=others, weight_decay=0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_here(directory, data, folder, args):
    write_shard(folder / "data.bin", data)
    run(
        program("train/train"), f"--model={directory}", f"--data={folder / 'data.bin'}",
        f"--out={folder / 'run'}", f"--seqlen={SEQLEN}", f"--batch={BATCH}",
        f"--steps={STEPS}", f"--lr={LR}", "--schedule=constant", "--warmup=0",
        f"--weight_decay={DECAY}", f"--clip={CLIP}", f"--beta1={BETAS[0]}", f"--beta2={BETAS[1]}",
        f"--eps={EPS}", "--eval_every=0", f"--device={args.device}", "--precision=fp32",
        f"--ranks={args.ranks}", f"--tp={args.tp}", f"--data_cache={folder / 'cache'}",
        f"--val_data={folder / 'data.bin'}",
    )  # fmt: skip
    rows = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def check_gpu_logits(name, directory, tokens, folder, failures):
    exact = hf_models.make(name).double()
    with torch.no_grad():
        exact = exact(tokens).logits
    check_logits("logits, fp32", logits_here(directory, tokens, folder, "fp32").double(), exact,
                 failures)
    half = hf_models.make(name).to("cuda", torch.bfloat16)
    there = logits_there(half, tokens.cuda()).cpu().double()
    here = logits_here(directory, tokens, folder, "bf16").double()
    ours, theirs = ((logits - exact).square().mean().sqrt().item() for logits in (here, there))
    ok = ours <= theirs
    print(f"  {'logits, bf16':28} {ours:.1e}, transformers {theirs:.1e}{'' if ok else '  WORSE'}")
    if not ok:
        failures.append("logits, bf16")


def weights_of(directory):
    tensors = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def check_same(what, before, after, failures):
    same = before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])
        for name in before
    )
    print(f"  {what:28} {'the same' if same else 'DIFFERS'}")
    if not same:
        failures.append(what)


def check_files(name, model, tokens, there, folder, failures):
    """Checks logits from every form of the directory, and import and export."""
    if len(list((folder / "many").glob("*.safetensors"))) < 2:
        failures.append("the model is too small for several files")
    check_logits("logits", logits_here(folder / "one", tokens, folder), there, failures)
    check_logits(
        "logits, several files", logits_here(folder / "many", tokens, folder), there, failures
    )

    # Import, then export.
    run(program("train/tools/import"), folder / "one", f"--out={folder / 'in'}")
    check_logits("logits of the import", logits_here(folder / "in", tokens, folder), there,
                 failures)
    for file_mb, out in (5000, "out"), (1, "outs"):
        run(program("train/tools/export"), folder / "in", f"--out={folder / out}",
            f"--file_mb={file_mb}")
    before = weights_of(folder / "one")
    check_same("exported tensors", before, weights_of(folder / "out"), failures)
    one, out = (folder / d / "model.safetensors" for d in ("one", "out"))
    print(f"  {'exported file':28} {'the same' if one.read_bytes() == out.read_bytes() else 'other bytes'}")
    if not (folder / "out" / "tokenizer.json").exists():
        failures.append("the tokenizer is lost")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out", attn_implementation="eager"
    )
    check_logits("loaded by transformers", logits_there(loaded, tokens), there, failures)

    # Without the model's own files, the export makes a new config.json.
    for kept in (folder / "in" / "huggingface").glob("*"):
        kept.unlink()
    run(program("train/tools/export"), folder / "in", f"--out={folder / 'bare'}")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "bare", attn_implementation="eager"
    )
    check_logits("with a config.json of ours", logits_there(loaded, tokens), there, failures)

    # Other dtypes.
    half = hf_models.make(name).to(torch.bfloat16)
    half.save_pretrained(folder / "bf16")
    run(program("train/tools/import"), folder / "bf16", f"--out={folder / 'in16'}")
    run(program("train/tools/export"), folder / "in16", f"--out={folder / 'out16'}")
    check_same("bfloat16, there and back", weights_of(folder / "bf16"),
               weights_of(folder / "out16"), failures)
    hf_models.make(name).to(torch.float16).save_pretrained(folder / "f16")
    run(program("train/tools/import"), folder / "f16", f"--out={folder / 'inf16'}")
    run(program("train/tools/export"), folder / "inf16", f"--out={folder / 'outf16'}")
    check_same("float16, there and back", weights_of(folder / "f16"),
               weights_of(folder / "outf16"), failures)


def check_model(name, args):
    print(name)
    failures = []
    model = hf_models.make(name)
    head_dim = getattr(model.config, "head_dim", None)
    head_dim = head_dim or model.config.hidden_size // model.config.num_attention_heads
    if args.device == "cuda" and head_dim % 8 != 0:
        print(f"  left out: a head_dim of {head_dim}")
        return []
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(vocab, (2, 60), generator=generator)
    data = torch.randint(vocab, (SEQLEN + 1,), generator=generator).tolist()
    there = logits_there(model, tokens)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        model.save_pretrained(folder / "one")
        model.save_pretrained(folder / "many", max_shard_size="30KB")
        (folder / "one" / "tokenizer.json").write_text('{"of": "the model"}')
        if args.device == "cuda":
            check_gpu_logits(name, folder / "one", tokens, folder, failures)
        else:
            check_files(name, model, tokens, there, folder, failures)

        # Training.
        here = train_here(folder / "one", data, folder, args)
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        there = losses_there(model, data)
        errors = [abs(a - b) for a, b in zip(here, there)]
        ok = len(here) == STEPS and max(errors) <= 2e-4
        print(f"  {'losses of 20 steps':28} {there[0]:.4f} to {there[-1]:.4f}, "
              f"{max(errors):.1e}{'' if ok else '  DIFFERS'}")
        if not ok:
            failures.append("losses")
        run(program("train/tools/export"), folder / "run", f"--out={folder / 'trained'}")
        trained = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "trained", attn_implementation="eager"
        )
        with torch.no_grad():
            x, y = batch_of(data)
            error = abs(loss_of(trained, x, y).item() - loss_of(model.eval(), x, y).item())
        print(f"  {'loss of the trained export':28} {error:.1e}{'' if error <= 2e-4 else '  DIFFERS'}")
        if error > 2e-4:
            failures.append("loss of the trained export")
    return [f"{name}: {failure}" for failure in failures]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(hf_models.CONFIGS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    failures = [failure for name in args.models.split(",") for failure in check_model(name, args)]
    print("\n".join(failures) or "all models agree")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
