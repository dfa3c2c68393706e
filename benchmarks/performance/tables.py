"""The tables of the figures: each function returns headers and rows.

The pages of render.py show some of the tables; render.py --show prints any of them, with its docstring."""

from cells import NONE, number, ratio
from kernel_tables import (PEERS, ampere, few_queries, float16, fp8, fp8_errors, kernels, backward_heads,
                           peers_h100, peers_h200, regimes, masks, sinks, two_widths)
from results import LLAMA_8B, load, long_steps, one, ring_rows


def training():
    steps = load("train_step_h200")["rows"]
    rows = []
    for model, name, size in (("d12", "GPT-2 124M", "64 x 1,024"), ("llama_1b", "1.07B Llama", "1 x 16,384")):
        ours = one(steps, model=model, commit="c716204", deterministic=True)
        free = one(steps, model=model, commit="c716204", deterministic=False)
        rows.append([name, size, "H200", number(ours["tokens_per_second"]), number(free["tokens_per_second"]),
                     number(ours["pytorch_tokens_per_second"]),
                     ratio(ours["tokens_per_second"], ours["pytorch_tokens_per_second"])])
    h100 = load("attention_tiles_h100")["train_step"]
    rows.append(["1.07B Llama", "1 x 16,384", "H100", number(h100["tokens_per_second"]),
                 number(h100["nondeterministic"]), number(h100["pytorch"]),
                 ratio(h100["tokens_per_second"], h100["pytorch"])])
    return ["model", "batch", "GPU", "tokens/s", "free, tokens/s", "PyTorch, tokens/s", "ratio to PyTorch"], rows


FLOAT8 = "train_step_float8_h100"


def float8_steps():
    names = {"llama_8b_layers": "four layers of Llama 3.1 8B's shape", "llama_1b": "1.07B Llama"}
    rows = [[names[row["model"]], "%d x %s" % (row["batch"], number(row["seqlen"])), number(row["fp8"]),
             number(row["bf16"]), number(row["torchao"]), number(row["pytorch_bf16"]),
             ratio(row["fp8"], max(row["torchao"], row["pytorch_bf16"]))]
            for row in load(FLOAT8)["steps"]]
    return ["model", "batch", "fp8, tokens/s", "bf16, tokens/s", "torchao, tokens/s", "PyTorch bf16, tokens/s",
            "fp8 to the best of PyTorch"], rows


def float8_layers():
    """Linear layers of Llama 3.1 8B's shape in float8: forward and backward over 16,384 tokens, one H100.

    The times include the conversions. The peer is torchao's tensorwise recipe, compiled."""
    rows = [[row["layer"], number(row["fp8"], 2), number(row["bf16"], 2), number(row["torchao"], 2),
             ratio(row["torchao"], row["fp8"])] for row in load(FLOAT8)["layers"]]
    return ["layer", "fp8, ms", "bf16, ms", "torchao, ms", "speed to torchao"], rows


def float8_losses():
    """Validation losses in float8 and bf16. The second bf16 run has another epsilon, to show the noise of a run."""
    rows = []
    for row in load(FLOAT8)["losses"]:
        mean = (row["bf16"] + row["bf16_again"]) / 2
        rows.append([row["model"], number(row["seed"]), number(row["bf16"], 4), number(row["bf16_again"], 4),
                     number(row["fp8"], 4), number(100 * abs(row["bf16"] - row["bf16_again"]) / mean, 2),
                     "%+.2f" % (100 * (row["fp8"] / mean - 1))])
    return ["model", "seed", "bf16", "bf16 again", "fp8", "bf16 to bf16, %", "fp8 to bf16, %"], rows


def float8_recipes():
    rows = [[row["recipe"], number(row["llama_8b_layers"]), number(row["llama_1b"]), number(row["GiB"], 1),
             number(row["dx"], 3), number(row["dw"], 3), number(row["dw_outlier"], 3), number(row["loss"], 3)]
            for row in load(FLOAT8)["recipes"]]
    return ["recipe", "8B layers, tokens/s", "1.07B Llama, tokens/s", "8B layers, GiB", "error of dx", "of dW",
            "with an outlier", "loss"], rows


def float8_long():
    """Steps in float8 at long sequences, tokens/s a GPU, H200."""
    rows = [["1.07B Llama", number(row["seqlen"]), number(row["gpus"]), number(row["fp8"]), number(row["bf16"]),
             number(row["torchao"]), number(row["pytorch_bf16"]),
             ratio(row["fp8"], max(row["torchao"], row["pytorch_bf16"]))] for row in load(FLOAT8)["long"]]
    four = load("long_training_4_h200")["rows"]
    for float8 in [row for row in four if row["precision"] == "fp8"]:
        other = one(four, model=float8["model"], tokens=float8["tokens"], precision="bf16")
        rows.append([float8["model"], number(float8["tokens"]), "4", number(float8["tokens_per_second_a_gpu"]),
                     number(other["tokens_per_second_a_gpu"]), number(float8.get("peer")), number(other.get("peer")),
                     ratio(float8["tokens_per_second_a_gpu"], float8.get("peer"))])
    return ["model", "tokens", "H200", "fp8", "bf16", "torchao", "PyTorch bf16", "fp8 to the best of PyTorch"], rows


def long_training():
    rows = [[row["model"], number(row["tokens"]), row["mask"], number(row["gpus"]), row["memory"],
             number(row["rate"]), number(row["GiB"]), number(row["peer"]), ratio(row["rate"], row["peer"])]
            for row in long_steps()
            if row["tokens"] > 8192 and (row["gpus"] != 2 or row["memory"] != "selective")]
    return ["model", "tokens", "mask", "H200", "recomputed; moved", "tokens/s a GPU", "GiB a GPU",
            "peer, tokens/s a GPU", "ratio"], rows


def published():
    rows = [[row["who"], row["model"], row.get("printed", number(row["tokens"])), row["gpus"],
             row["settings"] + (" (computed)" if row.get("arithmetic") else ""), number(row["tokens_per_second"]),
             row["source"]]
            for row in load("published")["rows"]
            if row.get("tokens_per_second") and (row["who"] != "NeMo" or row["tokens"] in (262144, 524288))
            and (row["who"] != "torchtitan" or row["tokens"] == 131072)]
    return ["who", "model", "tokens", "GPUs", "settings", "tokens/s a GPU", "source"], rows


def ring():
    """Attention over a ring, by the mask: the shortest lengths that fill GPUs, and the longest."""
    shown = {2: (32768, 524288), 4: (65536, 262144, 1048576)}
    rows = [[number(row["gpus"]), row["mask"], number(row["tokens"]), number(row["ms"], 1), number(row["tflops"]),
             number(row["exposed"], 1), number(row["efficiency"])] for row in ring_rows()
            if row["tokens"] in shown[row["gpus"]] and (row["mask"] == "causal" or row["tokens"] <= 65536)]
    return ["GPUs", "mask", "tokens", "forward and backward, ms", "TFLOP/s a GPU", "exposed, %", "efficiency, %"], rows


def strategies():
    """Strategies over two H200: 32 heads of 128, 32,768 tokens, causal."""
    run = [run for run in load("scaling_2_h200")["runs"]
           if run["command"].startswith("scaling --heads=32 --head_dim=128 --mask=causal --ranks=2 --strategies=burst,")]
    rows = []
    for strategy in ("burst", "ring", "ulysses", "tp", "tp+sp"):
        row = one(run[0]["rows"], strategy=strategy, seqlen=32768)
        rows.append([strategy, number(row["forward_backward_ms"], 1),
                     number(row["forward_backward_gflops_per_rank"] / 1000), number(row["peak_mib_per_rank"]),
                     number(row["forward_bytes_per_rank"] / 1e6), number(row["backward_bytes_per_rank"] / 1e6),
                     number(100 * row["forward_backward_exposed"], 1),
                     number(100 * row["forward_backward_efficiency"])])
    return ["strategy", "forward and backward, ms", "TFLOP/s a GPU", "peak, MiB", "sent forward, MB",
            "sent backward, MB", "exposed, %", "efficiency, %"], rows


def documents():
    """Packed documents from PyTorch on H200, 64 heads on 8 of 128: TFLOP/s of visible pairs a GPU.

    Document lengths are log-normal with median 512. "One GPU" has the whole sequence."""
    rows = []
    for row in load("masks_ring_2_h200")["rows"] + load("masks_ring_4_h200")["rows"]:
        if row["case"] != "documents":
            continue
        def rate(name):
            return number(row[name]["TFLOP/s a GPU"])
        rows.append([number(row["ranks"]), number(row["tokens a GPU"]), number(row["longest"]),
                     rate("forward, balanced"), rate("forward, Ulysses"), rate("forward, one GPU, whole sequence"),
                     rate("backward, balanced"), rate("backward, Ulysses"),
                     rate("backward, one GPU, whole sequence")])
    return ["GPUs", "tokens a GPU", "longest document", "forward", "Ulysses", "one GPU", "backward", "Ulysses",
            "one GPU"], rows


def balance():
    """How the layouts deal packed documents to ranks, counted from the schedules.

    "Work" is the busiest rank's work divided by the mean. "Sent" is the number of tokens whose K and V all
    ranks send, divided by the length of the sequence."""
    rows = []
    for row in load("balance")["rows"]:
        if row["longest_document"] * 4 != row["tokens"]:
            continue
        cells = [number(row["tokens"]), number(row["ranks"])]
        for field in ("busiest_of_mean", "tokens_sent_of_sequence"):
            cells += [number(row[layout][field], 2) for layout in ("balanced", "zigzag", "contiguous")]
        rows.append(cells)
    return ["tokens", "ranks", "work: balanced", "zigzag", "contiguous", "sent: balanced", "zigzag", "contiguous"], rows


def exact():
    steps = {step["name"].split("/")[1]: step for step in load("exact_train_step_h200")["steps"]}
    rows = []
    for name, base, exact_step, chunk in (
            ("1.07B Llama, 1 x 16,384", "cuda_llama_1b", "cuda_llama_1b_exact_8192", 8192),
            ("1.07B Llama, 1 x 16,384", "cuda_llama_1b", "cuda_llama_1b_exact_4096", 4096),
            ("GPT-2 124M, 64 x 1,024", "cuda_d12", "cuda_d12_exact_16384", 16384)):
        before, after = steps[base]["step_ms"], steps[exact_step]["step_ms"]
        rows.append([name, number(chunk), number(before, 1), number(after, 1),
                     number(100 * (after / before - 1), 1), number(steps[exact_step]["GiB"], 1)])
    return ["model", "tokens in a chunk", "default, ms", "`--exact`, ms", "cost, %", "GiB"], rows


def generation():
    """Generation by the shape of Llama 3.1 8B in bf16, after a prompt."""
    rows = []
    run = [run for run in load("scaling_2_h200")["runs"] if run.get("experiment") == "generation"]
    for row in run[0]["rows"]:
        rows.append(["%d H200" % row["ranks"], "1", "131,072", number(row["first_ms"] / 1000, 1), number(row["token_ms"], 1),
                     number(row["cache_mib_per_rank"] / 1024), number(row["gb_per_second_per_rank"] / 1000, 2)])
    for gpus, file in (("2 H100", "generation_2_h100"), ("4 H200", "generation_4_h200")):
        row = load(file)["rows"][0]
        rows.append([gpus, number(row["batch"]), number(row["tokens"]), number(row["first_token_ms"] / 1000, 1),
                     number(row["token_ms"], 1), number(row["cache_mib_a_gpu"] / 1024),
                     number(row["gb_per_second_a_gpu"] / 1000, 2)])
    return ["GPUs", "sequences", "prompt, tokens", "first token, s", "a later token, ms", "K and V, GiB a GPU", "read, TB/s a GPU"], rows


def cpu():
    """Two cores of an AMD EPYC with AVX-512, fp32. The limit is Eigen's sgemm of 1024 x 1024 matrices on them."""
    results = load("cpu_epyc_2_cores")["rows"]
    rows = []
    for name, case in (("GPT-2 124M, 4 x 256, whole step", "TrainStep/gpt2_124M"),
                       ("GPT-2 124M over a ring of 2 ranks", "TrainStep/gpt2_124M_ring_of_2"),
                       ("nanoGPT's CPU model, 12 x 64", "TrainStep/nanogpt_cpu"),
                       ("the default model over a ring of 2 ranks", "TrainStep/llama_tiny_ring_of_2")):
        row = one(results, case=case)
        rows.append([name, number(row["tokens/s"]), number(row["GFLOP/s"]), number(100 * row["vs_peak"])])
    for name, case in (("attention, 8,192 tokens, D=64, causal", "BM_ForwardBackward/tokens:8192/d:64/causal:1"),
                       ("attention, 8,192 tokens, D=128, causal", "BM_ForwardBackward/tokens:8192/d:128/causal:1")):
        row = one(results, case=case)
        rows.append([name, NONE, number(row["GFLOP_s"]), number(100 * row["vs_sgemm"])])
    return ["work", "tokens/s", "GFLOP/s", "of sgemm, %"], rows


def ops():
    """Operations that memory limits, one H200, compared with a device-to-device copy."""
    rows = [[row["case"], number(row["us"], 1), number(row["GB_s"]), number(row["of_copy"], 2)]
            for row in load("ops_h200")["rows"]]
    return ["operation/shape", "time, us", "GB/s", "to a copy"], rows


def dense():
    """Linear layers of GPT-2 124M (d12) and a 1.07B Llama, forward and backward, one H200, against cuBLAS alone.

    A "layer" includes bias, GELU and residual."""
    rows = [[row["case"], number(row["us"]), number(row["TFLOP_s"]), number(row["of_cublas"], 2)]
            for row in load("dense_h200")["rows"]]
    return ["part/shape", "time, us", "TFLOP/s", "to cuBLAS"], rows


def nccl():
    """NCCL between four H200 of one host, and the communicator on top of it."""
    rows = [[number(row["MiB"]), number(row["hop"], 1), number(row["hop_nccl"], 1), number(row["sum"], 1),
             number(row["sum_nccl"], 1)] for row in load("nccl_4_h200")["rows"]]
    return ["MiB", "transfer, GB/s", "NCCL alone, GB/s", "all-reduce, GB/s", "NCCL alone, GB/s"], rows


def memory_options():
    """Activations in the host, and ZeRO: one sequence a step, H200."""
    rows = [[row["model"], number(row["seqlen"]), number(row["gpus"]), "`%s`" % row["options"],
             number(row["tokens_per_second"]), number(row["GiB"], 1)]
            for row in load("training_h200")["rows"] if row["seqlen"] != 262144]
    return ["model", "tokens", "GPUs", "options", "tokens/s a GPU", "GiB a GPU"], rows


def saves():
    """The pauses that saves of a run over two GPUs make."""
    found = load("long_training_2_h200")["saves"]
    rows = [[number(row["step"]), number(row["pause_ms"]), number(row["check_ms"]), number(row["copy_ms"]),
             number(row["written_s"], 1)] for row in found["rows"]]
    return ["after step", "pause, ms", "of it the check, ms", "of it the copy, ms", "written after, s"], rows


def context():
    """Perplexity by position of a 124M model, before and after it was continued at 16,384 tokens."""
    found = load("context_quality_h200")
    columns = [found["perplexity"][name] for name in
               ("before, last 1024 tokens", "after, last 1024 tokens", "after, all tokens before")]
    rows = [["%s to %s" % (number(low), number(high))] + [number(column[i], 2) for column in columns]
            for i, (low, high) in enumerate(found["ranges"])]
    return ["positions", "before, last 1,024 tokens", "after, last 1,024 tokens", "after, all tokens"], rows


def recompute():
    """Recomputation in a 1B Llama, one sequence of 65,536 tokens. The losses have equal bits."""
    rows = []
    for row in load("plan_h200")["rows"]:
        options = row["options"]
        if "--model=llama_1b" in options and "--seqlen=65536" in options:
            kind = [o.split("=")[1] for o in options if o.startswith("--recompute=")] or ["none"]
            gpus = [o.split("=")[1] for o in options if o.startswith("--gpus=")][0].split("x")[0]
            rows.append([gpus, kind[0], number(row["tokens_per_second"]), number(row["GiB"])])
    return ["H200", "recomputed", "tokens/s a GPU", "GiB a GPU"], rows


def data_parallel():
    """GPT-2 124M, data parallel over four H200."""
    row = one(load("train_step_h200")["rows"], data_parallel=4)
    rows = [[number(run), number(rate), number(100 * part, 1)] for run, (rate, part) in
            enumerate(zip(row["tokens_per_second"], row["of_four_alone_at_once"]), 1)]
    return ["run", "tokens/s, all GPUs", "of four alone at once, %"], rows


def convergence():
    """Best validation loss in nanoGPT's settings.

    On the CPU, most of the difference is another initialization (SmallInit)."""
    found = [row["best_val_loss"] for row in load("train_step_h200")["nanogpt_gpu"]["rows"] if row["init_std"] == 0.02]
    cpu_loss = [row["val_loss"] for row in load("cpu_epyc_2_cores")["rows"] if row["benchmark"] == "convergence"]
    rows = [["GPU setting, nanoGPT's initialization", number(len(found)), number(sum(found) / len(found), 3),
             number(min(found), 3), number(max(found), 3), "1.4697"],
            ["CPU setting", number(len(cpu_loss)), number(sum(cpu_loss) / len(cpu_loss), 3), number(min(cpu_loss), 3),
             number(max(cpu_loss), 3), "1.88"]]
    return ["setting", "seeds", "mean", "lowest", "highest", "nanoGPT, published"], rows


def cpu_pytorch():
    """Whole steps of GPT-2 124M on AMD EPYC processors next to PyTorch, milliseconds of a step by the clock."""
    rows = [[row["machine"], row["instructions"], row["shape"], row["dtype"], number(row["threads"])] +
            [number(row[side]["step_ms"]) for side in ("burst", "eager", "compiled")] + [number(row["ratio"], 2)]
            for row in load("cpu_pytorch_2_cores")["rows"]]
    return ["machine", "instructions", "batch x tokens", "dtype", "threads", "ms", "eager PyTorch, ms", "compiled, ms",
            "ratio to the faster"], rows


def cpu_attention():
    """Attention on one core of an AMD EPYC, GFLOP/s, and ratios to PyTorch's. The core's peak in fp32 is 116.7."""
    rows = []
    for row in load("cpu_attention_epyc")["rows"]:
        figures = [number(part[key], places) for part in (row["forward"], row["backward"])
                   for key, places in (("burst", 1), ("pytorch", 1), ("ratio", 2))]
        rows.append([row["instructions"], row["dtype"], number(row["head_dim"]), number(row["tokens"]),
                     "causal" if row["causal"] else "full"] + figures)
    return ["instructions", "dtype", "head_dim", "tokens", "mask", "forward", "PyTorch", "ratio", "backward", "PyTorch",
            "ratio"], rows


def losses():
    """Losses of 20 steps at 131,072 tokens: the largest relative difference of losses and norms from one GPU."""
    rows = [["`%s`" % row["options"], number(row["ms_a_step"]), "%.1e" % row["loss_difference_from_one_gpu"],
             "%.1e" % row["norm_difference_from_one_gpu"],
             "`%s`" % row["same_bits_as"] if "same_bits_as" in row else NONE]
            for row in load("long_training_2_h200")["losses"]["rows"]]
    return ["options", "ms a step", "losses", "norms", "equal in every bit to"], rows


def cpu_ring():
    """Attention over two ranks, one core a rank, 4 heads of 64, full mask, forward and backward."""
    run = load("scaling_cpu_2_cores")["runs"][0]
    rows = []
    for row in run["rows"]:
        exposed, efficiency = row["forward_backward_exposed"], row["forward_backward_efficiency"]
        rows.append([number(row["seqlen"]), row["strategy"], number(row["ranks"]), number(row["forward_backward_ms"], 1),
                     number(row["forward_backward_gflops_per_rank"]), number(row["peak_mib_per_rank"], 1),
                     number((row["forward_bytes_per_rank"] + row["backward_bytes_per_rank"]) / 1e6, 1),
                     number(None if exposed is None else 100 * exposed, 1),
                     number(None if efficiency is None else 100 * efficiency)])
    return ["tokens", "strategy", "ranks", "ms", "GFLOP/s a rank", "peak, MiB", "sent, MB", "exposed, %",
            "efficiency, %"], rows


def processes():
    """Messages between two processes of one host."""
    rows = [[row["case"], number(row["bytes"]), number(row["tcp_us"], 1), number(row["mpi_us"], 1)]
            for row in load("cpu_xeon_2_cores")["rows"] if row["benchmark"] == "process_comm_benchmark"]
    return ["operation", "bytes", "sockets, us", "MPI, us"], rows


def pytorch():
    """burst.attention from PyTorch and its peers on H200s: forward and backward, 32 heads of 128."""
    rows = []
    for gpus, tokens in ((4, 262144), (4, 131072), (4, 65536), (2, 131072), (2, 32768), (2, 4096)):
        for causal in (False, True):
            measured = load("pytorch_attention_%d_h200" % gpus)["rows"]
            row = one(measured, case="ring", tokens=tokens, causal=causal)["both_ms"]
            digits = 0 if tokens > 100000 else (1 if tokens > 10000 else 2)
            peers = ("published", "ring-flash-attention", "torch context_parallel")
            rows.append([number(gpus), number(tokens), "causal" if causal else "full", number(row["burst"], digits)]
                        + [number(row.get(peer), digits) for peer in peers]
                        + [ratio(min(row[peer] for peer in peers if peer in row), row["burst"])])
    return ["GPUs", "tokens", "mask", "Burst, ms", "published BurstAttention, ms", "ring-flash-attention, ms",
            "context_parallel, ms", "to the best peer"], rows


def headline():
    """The rows of README.md."""
    def row(task, ours, peer, who):
        return [task, number(ours), number(peer), who, ratio(ours, peer)]
    steps = load("train_step_h200")["rows"]
    rows = []
    for model, task in (("d12", "GPT-2 124M, 64 x 1,024 tokens, tokens/s"),
                        ("llama_1b", "Llama 1.07B, 1 x 16,384 tokens, tokens/s")):
        step = one(steps, model=model, commit="c716204", deterministic=True)
        rows.append(row(task, step["tokens_per_second"], step["pytorch_tokens_per_second"],
                        "compiled PyTorch with cuDNN"))
    long = [(step["model"], step["memory"], step) for step in long_steps()
            if step["tokens"] == 131072 and step["gpus"] == 2]
    small = [step for model, memory, step in long if memory == "none"][0]
    rows.append(row("Llama 1.07B, 131,072 tokens on 2 GPUs, tokens/s per GPU", small["rate"], small["peer"],
                    "PyTorch with ring-flash-attention (minutes before)"))
    large = [step for model, memory, step in long if model == LLAMA_8B][0]
    upipe = one(load("published")["rows"], who="UPipe", tokens=131072)
    rows.append(row("Llama 8B, 131,072 tokens on 2 GPUs, tokens/s per GPU", large["rate"],
                    upipe["tokens_per_second"], "UPipe on 8 x H100 (as published)"))
    wanted = dict(batch=1, tokens=16384, heads=32, kv_heads=32, head_dim=128, value_dim=128, mask="causal")
    for name in ("forward", "backward"):
        rates = one(load("attention_peers_h100")["rows"], **wanted, **{"pass": name})["tflops"]
        peer = max(PEERS, key=lambda peer: rates[peer])
        rows.append(row("attention %s, causal, 16K tokens, H100, TFLOP/s" % name, rates["ours"], rates[peer],
                        PEERS[peer] + (" (not deterministic)" if name == "backward" else "")))
    return ["task", "Burst", "strongest peer", "which", "ratio"], rows


TABLES = {function.__name__: function for function in (
    training, float8_steps, float8_long, float8_layers, float8_losses, float8_recipes, long_training, published, kernels,
    backward_heads, two_widths, peers_h100, peers_h200, regimes, masks, fp8, fp8_errors, few_queries,
    float16, sinks, ampere, dense, ops, ring,
    strategies, nccl, documents, balance, memory_options, recompute, data_parallel, convergence, saves, context, losses, exact,
    generation, cpu, cpu_attention, cpu_pytorch, cpu_ring, processes, pytorch, headline)}


def markdown(name):
    """Returns the lines of a table."""
    headers, rows = TABLES[name]()
    for row in rows:
        if len(row) != len(headers):
            raise SystemExit("table %s: a row must have %d cells; got %d" % (name, len(headers), len(row)))
    def is_number(text):
        return text.replace(",", "").replace(".", "").lstrip("-").isdigit() or text == NONE
    ruler = ["--:" if all(is_number(row[i]) for row in rows) else "---" for i in range(len(headers))]
    lines = ["| " + " | ".join(cells) + " |" for cells in [headers] + rows]
    return [lines[0], "|" + "|".join(ruler) + "|"] + lines[1:]
