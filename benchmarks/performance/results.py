"""Reads the files of benchmarks/results."""

import json
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "benchmarks" / "results"


def load(name):
    """Returns the content of one file of results."""
    return json.loads((FOLDER / (name + ".json")).read_text(encoding="utf-8"))


def one(rows, **wanted):
    """Returns the only row whose fields have the wanted values."""
    found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
    if len(found) != 1:
        raise SystemExit("results: must have one row with %s; found %d" % (wanted, len(found)))
    return found[0]


def mean(value):
    """Returns the mean of a list, or the number itself."""
    return sum(value) / len(value) if isinstance(value, list) else value


def ring_rows():
    """Returns attention over a ring, newest figures: one entry for each number of GPUs, length and mask."""
    entries = []
    two = load("scaling_2_h200")["runs"]
    for mask in ("full", "causal"):
        runs = [run for run in two if run.get("commit") == "a71186d" and "--mask=" + mask in run["command"]]
        for tokens in (16384, 32768):
            rows = [one(run["rows"], seqlen=tokens) for run in runs]
            entries.append({
                "gpus": 2, "tokens": tokens, "mask": mask,
                "ms": mean([row["forward_backward_ms"] for row in rows]),
                "tflops": mean([row["forward_backward_tflops_per_rank"] for row in rows]),
                "exposed": mean([row["forward_backward_exposed_percent"] for row in rows]),
                "efficiency": mean([row["forward_backward_efficiency_percent"] for row in rows]),
            })
    for run in two:
        if run.get("experiment") != "attention" or "commit" in run or run["kv_heads"] != 32:
            continue
        if "--strategies=burst " not in run["command"] or "mpirun" in run["command"] or "--batches" in run["command"]:
            continue
        for row in run["rows"]:
            if row["seqlen"] >= 131072:
                entries.append(_of_scaling(row, run["mask"], 2))
    for run in load("scaling_4_h200")["runs"]:
        for row in run["rows"]:
            if run.get("commit") == "2d636bb" or row["seqlen"] == 1048576:
                entries.append(_of_scaling(row, run["mask"], 4))
    return sorted(entries, key=lambda e: (e["gpus"], e["mask"] != "full", e["tokens"]))


def _of_scaling(row, mask, gpus):
    def percent(key):
        return None if row[key] is None else 100 * row[key]
    return {"gpus": gpus, "tokens": row["seqlen"], "mask": mask, "ms": row["forward_backward_ms"],
            "tflops": row["forward_backward_gflops_per_rank"] / 1000,
            "exposed": percent("forward_backward_exposed"),
            "efficiency": percent("forward_backward_efficiency")}


def attention_flops(tokens, mask):
    """Returns the FLOPs of forward and backward of 32 heads of 128: 3.5 times the forward's."""
    return 3.5 * 4 * 128 * 32 * tokens * tokens / (2 if mask == "causal" else 1)


LLAMA_8B = "Llama 3.1 8B shape"


def long_steps():
    """Returns whole training steps of long sequences, shortest first within a model."""
    steps = load("train_step_h200")
    rows = []

    def add(model, tokens, mask, gpus, memory, rate, gib, peer=None):
        rows.append({"model": model, "tokens": tokens, "mask": mask, "gpus": gpus, "memory": memory,
                     "rate": rate, "GiB": gib, "peer": peer})

    one_gpu = [row for row in steps["rows"] if row["model"] == "llama_1b" and row.get("commit") == "361f55a"]
    for tokens, recompute in ((32768, None), (131072, "selective")):
        row = one(one_gpu, seqlen=tokens, recompute=recompute)
        add("1.07B Llama", tokens, "causal", 1, recompute or "none", row["tokens_per_second"], row["GiB"],
            max(row["pytorch_tokens_per_second"]))
    two = steps["two_gpus"]["rows"]
    for options, memory in (("--seqlen=131072 --zero=1", "none"),
                            ("--seqlen=131072 --zero=1 --recompute=selective", "selective")):
        row = one(two, options=options)
        add("1.07B Llama", 131072, "causal", 2, memory, row["tokens_per_second"], row["GiB"], row["peer"])
    row = one(load("training_h200")["rows"], seqlen=262144)
    add("1.07B Llama", 262144, "causal", 2, "selective", row["tokens_per_second"], row["GiB"], row["peer"])
    four = [row for row in load("long_training_4_h200")["rows"] if row["precision"] == "bf16"]
    for row in four[:3]:
        add(row["model"], row["tokens"], "causal", 4, "selective", row["tokens_per_second_a_gpu"], row["GiB"],
            row.get("peer"))
    eight = [row for row in steps["rows"] if row["model"] == "llama, 8.03B parameters"]
    row = one(eight, seqlen=8192, offload="all")
    add(LLAMA_8B, 8192, "causal", 1, "selective; 3 GiB in the host", row["tokens_per_second"], row["GiB"])
    planned = [row for row in load("plan_h200")["rows"] if row["from"] == "scaling_2_h200.json, 361f55a"][0]
    add(LLAMA_8B, 131072, "causal", 2, "selective; ZeRO-3", planned["tokens_per_second"], planned["GiB"])
    for row in load("long_steps_2_h200")["rows"][2:]:
        add(row.get("model", LLAMA_8B), row["tokens"], "causal", 2, "selective; activations in the host",
            row["tokens_per_second_a_gpu"], row.get("GiB"))
    row = one(eight, seqlen=786432)
    add(LLAMA_8B, 786432, "window 8,192", 1, "full; all in the host", row["tokens_per_second"], None)
    longest = load("long_training_2_h200")["longest"]
    add(LLAMA_8B, 2097152, "window 8,192", 2, "full; all in the host", longest["rows"][-1]["tokens_per_second_a_gpu"],
        max(longest["GiB_of_a_gpu"]))
    for tokens, mask, memory in ((262144, "causal", "selective; ZeRO-3"),
                                 (4194304, "window 8,192", "full; activations in the host")):
        row = one(four, model=LLAMA_8B, tokens=tokens)
        add(LLAMA_8B, tokens, mask, 4, memory, row["tokens_per_second_a_gpu"], row["GiB"])
    return sorted(rows, key=lambda row: (row["model"], row["tokens"]))
