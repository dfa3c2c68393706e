"""The tables of docs/performance.md and benchmarks/results/README.md: each function returns headers and rows."""

from results import (backward_h200, forward_h200, load, long_steps, one, ring_rows, shape)

NONE = "-"


def number(value, digits=0):
    return NONE if value is None else "{:,.{}f}".format(value, digits)


def ratio(ours, peer):
    return NONE if ours is None or peer is None else "%.2f" % (ours / peer)


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
    rows = [[row["layer"], number(row["fp8"], 2), number(row["bf16"], 2), number(row["torchao"], 2),
             ratio(row["torchao"], row["fp8"])] for row in load(FLOAT8)["layers"]]
    return ["layer", "fp8, ms", "bf16, ms", "torchao, ms", "speed to torchao"], rows


def float8_losses():
    rows = [[row["model"], number(row["steps"]), number(row["bf16"], 4), number(row["fp8"], 4),
             number(row.get("free"), 4)] for row in load(FLOAT8)["losses"]]
    return ["model", "steps", "bf16", "fp8", "bf16, free"], rows


def long_training():
    rows = [[row["model"], number(row["tokens"]), row["mask"], number(row["gpus"]), row["memory"],
             number(row["rate"]), number(row["GiB"]), number(row["peer"]), ratio(row["rate"], row["peer"])]
            for row in long_steps()]
    return ["model", "tokens", "mask", "H200", "recomputed; moved", "tokens/s a GPU", "GiB a GPU",
            "peer, tokens/s a GPU", "ratio"], rows


def published():
    rows = [[row["who"], row["model"], row.get("printed", number(row["tokens"])), row["gpus"], row["settings"],
             number(row["tokens_per_second"]), "computed" if row.get("arithmetic") else
             ("printed" if row["tokens_per_second"] else NONE), row["source"]]
            for row in load("published")["rows"] if row["tokens"] not in (262144, 524288)]
    return ["who", "model", "tokens", "GPUs", "settings", "tokens/s a GPU", "figure", "source"], rows


# Name, shape, and whether docs/performance.md shows it (else only benchmarks/results/README.md does).
KERNELS = (
    ("D=128, full, 8K", shape(8192, 128, "full"), False),
    ("D=128, full, 16K", shape(16384, 128, "full"), True),
    ("D=128, causal, 8K", shape(8192, 128, "causal"), True),
    ("D=128, causal, 16K", shape(16384, 128, "causal"), True),
    ("D=64, full, 8K", shape(8192, 64, "full"), False),
    ("D=64, full, 16K", shape(16384, 64, "full"), True),
    ("D=64, causal, 8K", shape(8192, 64, "causal"), False),
    ("D=64, causal, 16K", shape(16384, 64, "causal"), True),
    ("D=96, full, 16K, 16 heads", shape(16384, 96, "full", 16), False),
    ("D=96, causal, 16K, 16 heads", shape(16384, 96, "causal", 16), True),
    ("D=192, full, 16K, 16 heads", shape(16384, 192, "full", 16), False),
    ("D=192, causal, 16K, 16 heads", shape(16384, 192, "causal", 16), True),
    ("D=256, full, 16K, 16 heads", shape(16384, 256, "full", 16), True),
    ("D=256, causal, 16K, 16 heads", shape(16384, 256, "causal", 16), True),
    ("D=128, full, 16K, 64 heads on 8", shape(16384, 128, "full", 64, 8), False),
    ("D=128, causal, 16K, 64 heads on 8", shape(16384, 128, "causal", 64, 8), True),
    ("D=128, causal, 16K, 16 heads on 8", shape(16384, 128, "causal", 16, 8), False),
    ("D=64, causal, 64 x 1,024, 12 heads (GPT-2)", shape(1024, 64, "causal", 12, batch=64), True),
    ("D=128, causal, 16 x 2,048", shape(2048, 128, "causal", batch=16), False),
    ("D=128, causal, 16 x 512", shape(512, 128, "causal", batch=16), False),
    ("D=128, documents of 512 to 16K, 64K in all", shape(65536, 128, "docs"), False),
    ("D=128, window of 4,096 in 64K", shape(65536, 128, "window"), False),
)


def kernels(everything=False):
    rows = []
    for name, wanted, main in KERNELS:
        if not main and not everything:
            continue
        forward = forward_h200(wanted)
        default, free = backward_h200(wanted, True), backward_h200(wanted, False)
        rows.append([name, number(forward[0]), ratio(forward[0], forward[1]), ratio(forward[0], forward[2]),
                     number(default[0]), ratio(default[0], default[1]), ratio(default[0], default[2]),
                     number(free[0]), ratio(free[0], free[1])])
    return ["shape", "forward, TFLOP/s", "to FA3", "to cuDNN", "backward, TFLOP/s", "to FA3", "to cuDNN",
            "free backward, TFLOP/s", "to FA3"], rows


def kernels_all():
    return kernels(everything=True)


def kernels_grouped():
    rows = []
    for row in load("backward_splits_h200")["rows"]:
        if row["deterministic"] and row["head_dim"] == 128 and row["mask"] == "causal" and row["heads"] != row["kv_heads"]:
            rows.append(["%d on %d" % (row["heads"], row["kv_heads"]), "%d x %s" % (row["batch"], number(row["tokens"])),
                         number(row["after"]), ratio(row["after"], row["fa3"])])
    return ["heads", "batch", "backward, TFLOP/s", "to FA3"], rows


H100 = (
    ("D=128, causal, 8K", shape(8192, 128, "causal"), "backward", "after"),
    ("D=128, causal, 16K", shape(16384, 128, "causal"), "backward", "after"),
    ("D=128, causal, 64K", shape(65536, 128, "causal"), "backward_before", "deterministic"),
    ("D=128, full, 8K", shape(8192, 128, "full"), "backward", "after"),
    ("D=128, causal, 16K, 64 heads on 8", shape(16384, 128, "causal", 64, 8), "backward_before", "deterministic"),
    ("D=256, causal, 16K, 16 heads", shape(16384, 256, "causal", 16), "backward_before", "deterministic"),
)


def kernels_h100():
    results = load("attention_tiles_h100")
    rows = []
    for name, wanted, part, field in H100:
        found = [row for row in results["forward"] if row["machine"] == "c"
                 and all(row.get(key) == value for key, value in wanted.items())]
        ours, fa3 = (found[0]["after"], found[0]["fa3"]) if found else (None, None)
        backward = one(results[part]["rows"], **wanted)
        rows.append([name, number(ours), ratio(ours, fa3), number(backward[field]),
                     ratio(backward[field], backward["fa3"]), number(backward["free"]),
                     ratio(backward["free"], backward["fa3"])])
    return ["shape", "forward, TFLOP/s", "to FA3", "backward, TFLOP/s", "to FA3", "free backward, TFLOP/s",
            "to FA3"], rows


def masks():
    rows = []
    for row in load("pytorch_masks_h200")["rows"]:
        cells = [row["mask"], number(row["tokens"]), str(row["head_dim"]), number(row["density"], 2)]
        for direction in ("forward", "backward"):
            ours, causal, flex = (row["%s, %s" % (direction, side)]["TFLOP/s"]
                                  for side in ("burst", "causal", "FlexAttention"))
            cells += [number(ours), ratio(ours, causal), ratio(ours, flex)]
        rows.append(cells)
    return ["mask", "tokens", "D", "density", "forward, TFLOP/s", "to causal", "to FlexAttention",
            "backward, TFLOP/s", "to causal", "to FlexAttention"], rows


def fp8():
    results = load("fp8_attention_h200")["bench"]
    rows = []
    for mask in ("full", "causal"):
        for tokens in (16384, 65536):
            row = one([r for r in results if r["batch"] == 1 and r["heads"] == r["kv_heads"]],
                      length=tokens, mask=mask)
            rows.append([mask, number(tokens), number(row["fp8_tflops"]), number(row["bfloat16_tflops"]),
                         ratio(row["fp8_tflops"], row["bfloat16_tflops"]),
                         ratio(row["fp8_tflops"], row["cudnn_tflops"])])
    return ["mask", "tokens", "fp8, TFLOP/s", "ours in bf16, TFLOP/s", "to ours in bf16", "to cuDNN in bf16"], rows


def few_queries():
    rows = []
    for row in load("decode_h200")["rows"]:
        rows.append(["%d x %d" % (row["batch"], row["q_len"]), number(row["k_len"]),
                     "%d on %d" % (row["heads"], row["kv_heads"]), str(row["dim"]),
                     number(1000 * row["ours_ms"]), number(row["ours_gb_per_s"] / 1000, 2),
                     number(row["of_copy"], 2), ratio(row["cudnn_ms"], row["ours_ms"]),
                     ratio(row["flash2_ms"], row["ours_ms"])])
    return ["batch x queries", "keys", "heads", "D", "time, us", "K and V read, TB/s", "to a copy", "cuDNN's time to ours",
            "FlashAttention-2's time to ours"], rows


def ring():
    rows = [[number(row["gpus"]), row["mask"], number(row["tokens"]), number(row["ms"], 1), number(row["tflops"]),
             number(row["exposed"], 1), number(row["efficiency"])] for row in ring_rows()
            if row["tokens"] >= 16384 * row["gpus"] and (row["mask"] == "causal" or row["tokens"] <= 65536)]
    return ["GPUs", "mask", "tokens", "forward and backward, ms", "TFLOP/s a GPU", "exposed, %", "efficiency, %"], rows


def strategies():
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
    rows = []
    for row in load("masks_ring_2_h200")["rows"]:
        if row["case"] != "documents":
            continue
        def rate(name):
            return number(row[name]["TFLOP/s a GPU"])
        rows.append([number(row["tokens a GPU"]), number(row["longest"]), rate("forward, balanced"),
                     rate("forward, Ulysses"), rate("forward, one GPU, whole sequence"), rate("backward, balanced"),
                     rate("backward, Ulysses"), rate("backward, one GPU, whole sequence")])
    return ["tokens a GPU", "longest document", "forward", "Ulysses", "one GPU", "backward", "Ulysses", "one GPU"], rows


def balance():
    rows = []
    for row in load("balance_xeon")["rows"]:
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
    rows = []
    run = [run for run in load("scaling_2_h200")["runs"] if run.get("experiment") == "generation"]
    for row in run[0]["rows"]:
        rows.append(["%d H200" % row["ranks"], "1", number(row["first_ms"] / 1000, 1), number(row["token_ms"], 1),
                     number(row["cache_mib_per_rank"] / 1024), number(row["gb_per_second_per_rank"] / 1000, 2)])
    row = load("generation_2_h100")["rows"][0]
    rows.append(["2 H100", number(row["batch"]), number(row["first_token_ms"] / 1000, 1), number(row["token_ms"], 1),
                 number(row["cache_mib_a_gpu"] / 1024), number(row["gb_per_second_a_gpu"] / 1000, 2)])
    return ["GPUs", "sequences", "first token, s", "a later token, ms", "K and V, GiB a GPU", "read, TB/s a GPU"], rows


def cpu():
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


def float16():
    rows = []
    for row in load("attention_h200_float16")["bench"]:
        if row["case"] == "cublas 8192":
            continue
        rows.append(["D=%d" % row["dim"], row["mask"], "%d x %s" % (row["batch"], number(row["length"])),
                     "%d on %d" % (row["heads"], row["kv_heads"]), number(row.get("fwd_tflops")), number(row.get("fwd_ratio"), 2),
                     number(row.get("bwd_tflops")), number(row.get("bwd_ratio"), 2)])
    return ["D", "mask", "batch", "heads", "forward, TFLOP/s", "to cuDNN", "free backward, TFLOP/s", "to cuDNN"], rows


def sinks():
    rows = [["D=%d" % row["head_dim"], row["mask"], "%d x %s" % (row["batch"], number(row["seqlen"])),
             "%d on %d" % (row["heads"], row["kv_heads"]), number(row["without"]), number(row["with"])]
            for row in load("attention_sinks_h200")["sinks"]]
    return ["D", "mask", "batch", "heads", "without, TFLOP/s", "with, TFLOP/s"], rows


def ops():
    rows = [[row["case"], number(row["us"], 1), number(row["GB_s"]), number(row["of_copy"], 2)]
            for row in load("ops_h200")["rows"]]
    return ["operation/shape", "time, us", "GB/s", "to a copy"], rows


def dense():
    rows = [[row["case"], number(row["us"]), number(row["TFLOP_s"]), number(row["of_cublas"], 2)]
            for row in load("dense_h200")["rows"]]
    return ["part/shape", "time, us", "TFLOP/s", "to cuBLAS"], rows


def nccl():
    rows = [[number(row["MiB"]), number(row["hop"], 1), number(row["hop_nccl"], 1), number(row["sum"], 1),
             number(row["sum_nccl"], 1)] for row in load("nccl_4_h200")["rows"]]
    return ["MiB", "transfer, GB/s", "NCCL alone, GB/s", "all-reduce, GB/s", "NCCL alone, GB/s"], rows


def memory_options():
    rows = [[row["model"], number(row["seqlen"]), number(row["gpus"]), "`%s`" % row["options"],
             number(row["tokens_per_second"]), number(row["GiB"], 1)]
            for row in load("training_h200")["rows"] if row["seqlen"] != 262144]
    return ["model", "tokens", "GPUs", "options", "tokens/s a GPU", "GiB a GPU"], rows


def ampere():
    rows = []
    for row in load("attention_interface_h200")["rows"]:
        name, direction = row["case"].rsplit(", ", 1)
        if "2 x 8192" in name and "D=256" not in name:
            rows.append([name.split(" 2 x")[0], direction, number(row["tflops"]["sm80"]),
                         ratio(row["tflops"]["sm80"], row["tflops"]["flash2"])])
    return ["shape", "pass", "TFLOP/s", "to FA2"], rows


def saves():
    found = load("long_training_2_h200")["saves"]
    rows = [[number(row["step"]), number(row["pause_ms"]), number(row["check_ms"]), number(row["copy_ms"]),
             number(row["written_s"], 1)] for row in found["rows"]]
    return ["after step", "pause, ms", "of it the check, ms", "of it the copy, ms", "written after, s"], rows


def context():
    found = load("context_quality_h200")
    columns = [found["perplexity"][name] for name in
               ("before, last 1024 tokens", "after, last 1024 tokens", "after, all tokens before")]
    rows = [["%s to %s" % (number(low), number(high))] + [number(column[i], 2) for column in columns]
            for i, (low, high) in enumerate(found["ranges"])]
    return ["positions", "before, last 1,024 tokens", "after, last 1,024 tokens", "after, all tokens"], rows


def recompute():
    rows = []
    for row in load("plan_h200")["rows"]:
        options = row["options"]
        if "--model=llama_1b" in options and "--seqlen=65536" in options:
            kind = [o.split("=")[1] for o in options if o.startswith("--recompute=")] or ["none"]
            gpus = [o.split("=")[1] for o in options if o.startswith("--gpus=")][0].split("x")[0]
            rows.append([gpus, kind[0], number(row["tokens_per_second"]), number(row["GiB"])])
    return ["H200", "recomputed", "tokens/s a GPU", "GiB a GPU"], rows


def data_parallel():
    row = one(load("train_step_h200")["rows"], data_parallel=4)
    rows = [[number(run), number(rate), number(100 * part, 1)] for run, (rate, part) in
            enumerate(zip(row["tokens_per_second"], row["of_four_alone_at_once"]), 1)]
    return ["run", "tokens/s, all GPUs", "of four alone at once, %"], rows


def convergence():
    found = [row["best_val_loss"] for row in load("train_step_h200")["nanogpt_gpu"]["rows"] if row["init_std"] == 0.02]
    cpu_loss = [row["val_loss"] for row in load("cpu_epyc_2_cores")["rows"] if row["benchmark"] == "convergence"]
    rows = [["GPU setting, nanoGPT's initialization", number(len(found)), number(sum(found) / len(found), 3),
             number(min(found), 3), number(max(found), 3), "1.4697"],
            ["CPU setting", number(len(cpu_loss)), number(sum(cpu_loss) / len(cpu_loss), 3), number(min(cpu_loss), 3),
             number(max(cpu_loss), 3), "1.88"]]
    return ["setting", "seeds", "mean", "lowest", "highest", "nanoGPT, published"], rows


def cpu_pytorch():
    rows = [[row["work"], row["unit"]] + [number(value) for value in row["burst"] + row["pytorch"]]
            for row in load("cpu_pytorch_2_cores")["rows"]]
    return ["work", "unit", "lowest", "highest", "PyTorch, lowest", "highest"], rows


def losses():
    rows = [["`%s`" % row["options"], number(row["ms_a_step"]), "%.1e" % row["loss_difference_from_one_gpu"],
             "%.1e" % row["norm_difference_from_one_gpu"],
             "`%s`" % row["same_bits_as"] if "same_bits_as" in row else NONE]
            for row in load("long_training_2_h200")["losses"]["rows"]]
    return ["options", "ms a step", "losses", "norms", "equal in every bit to"], rows


def cpu_ring():
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
    rows = [[row["case"], number(row["bytes"]), number(row["tcp_us"], 1), number(row["mpi_us"], 1)]
            for row in load("cpu_xeon_2_cores")["rows"] if row["benchmark"] == "process_comm_benchmark"]
    return ["operation", "bytes", "sockets, us", "MPI, us"], rows


def fp8_errors():
    results = load("fp8_attention_h200")["errors"]
    rows = []
    for name, inputs, tokens, mask in (
            ("normal", "normal", 4096, "full"), ("normal", "normal", 16384, "causal"),
            ("one element in 1,000 ten times larger", "outliers", 16384, "causal"),
            ("four channels of Q and K eight times larger", "channels", 16384, "causal"),
            ("logits with a standard deviation of 9", "peaked", 16384, "causal")):
        row = one(results, inputs=inputs, length=tokens, mask=mask)
        rows.append([name, number(tokens), mask, number(row["fp8"]["out"], 3), number(row["simulated_block"], 3),
                     number(row["simulated_tensor"], 3), number(row["bfloat16"]["out"], 4),
                     number(row["fp8"]["dq"], 3), number(row["fp8"]["dk"], 3), number(row["fp8"]["dv"], 3)])
    return ["inputs", "tokens", "mask", "fp8", "one scale a block", "one scale a tensor", "bf16", "dq", "dk", "dv"], rows


TABLES = {function.__name__: function for function in (
    training, float8_steps, float8_layers, float8_losses, long_training, published, kernels, kernels_all, kernels_grouped, kernels_h100, masks, fp8, fp8_errors,
    few_queries, float16, sinks, ampere, dense, ops, ring, strategies, nccl, documents, balance, memory_options, recompute,
    data_parallel, convergence, saves, context, losses, exact,
    generation, cpu, cpu_pytorch, cpu_ring, processes)}


def markdown(name):
    """Returns the lines of a table."""
    headers, rows = TABLES[name]()
    for row in rows:
        if len(row) != len(headers):
            raise SystemExit("table %s: a row must have %d cells; got %d" % (name, len(headers), len(row)))
    def is_number(text):
        return text.replace(",", "").replace(".", "").lstrip("-").isdigit() or text == NONE
    ruler = ["--:" if all(is_number(row[i]) for row in rows) else "---" for i in range(len(headers))]
    return ["| " + " | ".join(cells) + " |" for cells in [headers, ruler] + rows]
