"""The tables of the attention kernels on one GPU: each function returns headers and rows."""

from cells import number, ratio
from results import load, one

# The rows of docs/performance.md: name, and (batch, tokens, heads, KV heads, head_dim, value_dim, mask).
KERNELS = (
    ("D=128, full, 16K", (1, 16384, 32, 32, 128, 128, "full")),
    ("D=128, causal, 8K", (1, 8192, 32, 32, 128, 128, "causal")),
    ("D=128, causal, 16K", (1, 16384, 32, 32, 128, 128, "causal")),
    ("D=128, causal, 16K, 64 heads on 8", (1, 16384, 64, 8, 128, 128, "causal")),
    ("D=128, causal, 16K, 32 heads on 8", (1, 16384, 32, 8, 128, 128, "causal")),
    ("D=64, full, 16K", (1, 16384, 32, 32, 64, 64, "full")),
    ("D=64, causal, 16K", (1, 16384, 32, 32, 64, 64, "causal")),
    ("D=96, causal, 16K, 16 heads", (1, 16384, 16, 16, 96, 96, "causal")),
    ("D=192, causal, 16K, 16 heads", (1, 16384, 16, 16, 192, 192, "causal")),
    ("D=192/128, causal, 16K, 128 heads", (1, 16384, 128, 128, 192, 128, "causal")),
    ("D=256, full, 16K, 16 heads", (1, 16384, 16, 16, 256, 256, "full")),
    ("D=256, causal, 16K, 16 heads", (1, 16384, 16, 16, 256, 256, "causal")),
    ("D=64, causal, 64 x 1,024, 12 heads (GPT-2)", (64, 1024, 12, 12, 64, 64, "causal")),
)


def dims(row):
    return str(row["head_dim"]) if row["value_dim"] == row["head_dim"] else "%(head_dim)d/%(value_dim)d" % row


# The peers of attention_peers_h100 and attention_peers_h200, whose backward adds in any order.
PEERS = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4", "cudnn": "cuDNN"}


def fastest_peer(rates):
    """Returns the rate of the fastest peer, in any order of additions."""
    return max(rates[name] for name in PEERS if name in rates)


def kernels():
    rows = []
    of = ("batch", "tokens", "heads", "kv_heads", "head_dim", "value_dim", "mask")
    peers = load("attention_peers_h100")["rows"]
    for name, wanted in KERNELS:
        forward, backward = ([row["tflops"] for row in peers if row["pass"] == which and
                              tuple(row[key] for key in of) == wanted][0] for which in ("forward", "backward"))
        cells = [name]
        for rates, side in ((forward, "ours"), (backward, "ours"), (backward, "ours free")):
            cells += [number(rates[side]), ratio(rates[side], fastest_peer(rates))]
        rows.append(cells)
    return ["shape", "forward, TFLOP/s", "to the fastest peer", "backward, TFLOP/s", "to the fastest peer",
            "free backward, TFLOP/s", "to the fastest peer"], rows


def backward_heads():
    """The backward before and after blocks took one head, and wide heads were not reversed; one H100, TFLOP/s."""
    rows = []
    for row in load("backward_heads_h100")["rows"]:
        rates = row["tflops"]
        rows.append(["%d x %s, %d on %d, D=%s, %s" % (row["batch"], number(row["tokens"]), row["heads"], row["kv_heads"],
                                                      dims(row), row["mask"]),
                     number(rates["before"]), number(rates["after"]), ratio(rates["after"], rates["before"]),
                     number(rates["after_free"]), ratio(rates["after"], rates["after_free"]),
                     ratio(rates["after"], rates.get("fastest_peer"))])
    return ["shape", "before", "after", "ratio", "free", "to free", "to the fastest peer"], rows


def regimes():
    """Attention in bf16 on an H100 in TFLOP/s, at the power limit (hot) and after pauses (rested).

    cuDNN is called through its own frontend, by the fastest plan. Only "ours" and cuDNN's fixed order repeat bits."""
    rows = []
    for row in load("attention_regimes_h100")["rows"]:
        rates = row["tflops"]
        rows.append([row["pass"], "%d x %s, %d on %d, D=%d, %s" % (row["batch"], number(row["tokens"]), row["heads"],
                                                                   row["kv_heads"], row["head_dim"], row["mask"]),
                     row["regime"], number(rates["ours"]), number(rates.get("ours free")), number(rates["fa3"]),
                     number(rates["cudnn"]), number(rates["cudnn frontend"]),
                     number(rates.get("cudnn frontend fixed order"))])
    return ["pass", "shape", "regime", "ours", "ours, free", "FA3", "cuDNN by PyTorch", "cuDNN", "cuDNN, fixed order"], rows


def peers_of(gpu):
    """Returns the table of attention on a GPU, "h100" or "h200", and its peers.

    The last columns divide our rate in a fixed order by FA4's, and our free rate (a forward's only rate) by the fastest
    peer's."""
    rows = []
    for row in load("attention_peers_" + gpu)["rows"]:
        rates = row["tflops"]
        best = fastest_peer(rates)
        rows.append([row["pass"], "%d x %s, %d on %d, D=%s, %s" % (row["batch"], number(row["tokens"]), row["heads"],
                                                                   row["kv_heads"], dims(row), row["mask"]),
                     number(rates["ours"]), number(rates.get("ours free")), number(rates.get("fa3")), number(rates["fa4"]),
                     number(rates.get("fa4 fixed order")), number(rates["cudnn"]),
                     ratio(rates["ours"], rates.get("fa4 fixed order")), ratio(rates.get("ours free", rates["ours"]), best)])
    return ["pass", "shape", "ours", "ours, free", "FA3", "FA4", "FA4, fixed order", "cuDNN", "to FA4, fixed order",
            "to the fastest"], rows


def peers_h100():
    """Attention in bf16 on an H100 in TFLOP/s, at the power limit. FA4: flash-attn-4 4.0.0b36, its path for Hopper."""
    return peers_of("h100")


def peers_h200():
    """Attention in bf16 on an H200 in TFLOP/s, at the power limit. FA4: flash-attn-4 4.0.0b36, its path for Hopper."""
    return peers_of("h200")


def two_widths():
    """The backward of heads of 192 and 128 columns before and after they took one pass, TFLOP/s."""
    rows = []
    for row in load("backward_two_widths")["rows"]:
        rates = row["tflops"]
        rows.append([row["gpu"], "%d x %s, %d on %d, %s" % (row["batch"], number(row["tokens"]), row["heads"],
                                                            row["kv_heads"], row["mask"]),
                     number(rates["before"]), number(rates["after"]), ratio(rates["after"], rates["before"]),
                     number(rates["after_free"]), ratio(rates["after"], rates["after_free"]),
                     ratio(rates["after"], rates.get("fastest_peer"))])
    return ["GPU", "shape", "before", "after", "ratio", "free", "to free", "to the fastest peer"], rows


def masks():
    """Masks from PyTorch, one H200, against our causal mask and compiled FlexAttention.

    Rates count visible pairs. The backward is deterministic."""
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
    """The forward in fp8 on one H200, D=128, with rounding."""
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
    """Few queries on a long cache, one H200. A copy is a device-to-device copy of as many bytes."""
    rows = []
    for row in load("decode_h200")["rows"]:
        rows.append(["%d x %d" % (row["batch"], row["q_len"]), number(row["k_len"]),
                     "%d on %d" % (row["heads"], row["kv_heads"]), str(row["dim"]),
                     number(1000 * row["ours_ms"]), number(row["ours_gb_per_s"] / 1000, 2),
                     number(row["of_copy"], 2), ratio(row["cudnn_ms"], row["ours_ms"]),
                     ratio(row["flash2_ms"], row["ours_ms"])])
    return ["batch x queries", "keys", "heads", "D", "time, us", "K and V read, TB/s", "to a copy", "cuDNN's time to ours",
            "FlashAttention-2's time to ours"], rows


def float16():
    """The Hopper kernels in float16 against cuDNN, one H200."""
    rows = []
    for row in load("attention_h200_float16")["bench"]:
        if row["case"] == "cublas 8192":
            continue
        rows.append(["D=%d" % row["dim"], row["mask"], "%d x %s" % (row["batch"], number(row["length"])),
                     "%d on %d" % (row["heads"], row["kv_heads"]), number(row.get("fwd_tflops")), number(row.get("fwd_ratio"), 2),
                     number(row.get("bwd_tflops")), number(row.get("bwd_ratio"), 2)])
    return ["D", "mask", "batch", "heads", "forward, TFLOP/s", "to cuDNN", "free backward, TFLOP/s", "to cuDNN"], rows


def sinks():
    """The forward without and with attention sinks, one H200."""
    rows = [["D=%d" % row["head_dim"], row["mask"], "%d x %s" % (row["batch"], number(row["seqlen"])),
             "%d on %d" % (row["heads"], row["kv_heads"]), number(row["without"]), number(row["with"])]
            for row in load("attention_sinks_h200")["sinks"]]
    return ["D", "mask", "batch", "heads", "without, TFLOP/s", "with, TFLOP/s"], rows


def ampere():
    """The kernels for GPUs since Ampere, on an H200: 16 heads, 2 x 8,192 tokens. FA2 is FlashAttention-2."""
    rows = []
    for row in load("attention_interface_h200")["rows"]:
        name, direction = row["case"].rsplit(", ", 1)
        if "2 x 8192" in name and "D=256" not in name:
            rows.append([name.split(" 2 x")[0], direction, number(row["tflops"]["sm80"]),
                         ratio(row["tflops"]["sm80"], row["tflops"]["flash2"])])
    return ["shape", "pass", "TFLOP/s", "to FA2"], rows


def fp8_errors():
    """Relative root mean square errors of the forward in fp8 against float64, D=128.

    "One scale" is plain rounding to 8 bits with the rest in float64. The gradients dq, dk and dv come from
    a 16-bit backward after the 8-bit forward."""
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
