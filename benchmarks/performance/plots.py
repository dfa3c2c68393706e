"""Draws the plots of docs/performance.md as SVG text, with Python's standard library alone."""

import math

from results import (LLAMA_8B, load, long_steps, one, ring_rows)

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 200, 40, 50
COLORS = ("#1f5fa8", "#c8501e", "#2e8540", "#7a4ca0")
GRAYS = ("#111111", "#777777", "#b08d2f", "#7a4ca0")


class Plot:
    """A diagram: axes, then series of points, with a legend at the right."""

    def __init__(self, title, x_label, y_label, x_range, y_range, x_ticks, y_ticks, log_x=True, log_y=True):
        self.x_range, self.y_range, self.log_x, self.log_y = x_range, y_range, log_x, log_y
        self.legend = 0
        self.parts = [
            '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
            'font-size="12">' % (WIDTH, HEIGHT),
            '<rect width="%d" height="%d" fill="white"/>' % (WIDTH, HEIGHT)]
        self.text(LEFT, 22, title, size=14)
        for value, label in x_ticks:
            self.line([(value, y_range[0]), (value, y_range[1])], "#e4e4e4", 1)
            self.text(self.x(value), HEIGHT - BOTTOM + 18, label, anchor="middle")
        for value, label in y_ticks:
            self.line([(x_range[0], value), (x_range[1], value)], "#e4e4e4", 1)
            self.text(LEFT - 8, self.y(value) + 4, label, anchor="end")
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, anchor="middle")
        self.parts.append('<text x="16" y="%.0f" text-anchor="middle" transform="rotate(-90 16 %.0f)">%s</text>' % (
            (TOP + HEIGHT - BOTTOM) / 2, (TOP + HEIGHT - BOTTOM) / 2, y_label))

    def x(self, value):
        return self._place(value, self.x_range, self.log_x, LEFT, WIDTH - RIGHT)

    def y(self, value):
        return self._place(value, self.y_range, self.log_y, HEIGHT - BOTTOM, TOP)

    @staticmethod
    def _place(value, limits, logarithmic, first, last):
        low, high = limits
        if logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return first + (last - first) * (value - low) / (high - low)

    def text(self, x, y, text, anchor="start", size=12, color="#222222"):
        self.parts.append('<text x="%.1f" y="%.1f" text-anchor="%s" font-size="%d" fill="%s">%s</text>' % (
            x, y, anchor, size, color, text))

    def line(self, points, color, width=2, dash=""):
        places = " ".join("%.1f,%.1f" % (self.x(x), self.y(y)) for x, y in points)
        self.parts.append('<polyline points="%s" fill="none" stroke="%s" stroke-width="%s"%s/>' % (
            places, color, width, ' stroke-dasharray="%s"' % dash if dash else ""))

    def series(self, name, points, color, connect=True, labels=None, label_shift=-9, dash="",
               filled=True):
        """Draws points; labels[i] is written label_shift pixels below point i, with 0 at its right."""
        paint = 'fill="%s"' % color if filled else 'fill="white" stroke="%s"' % color
        if connect and len(points) > 1:
            self.line(points, color, dash=dash)
        for i, (x, y) in enumerate(points):
            self.parts.append('<circle cx="%.1f" cy="%.1f" r="4" %s/>' % (self.x(x), self.y(y), paint))
            if labels and labels[i]:
                place = (self.x(x), self.y(y) + label_shift, "middle")
                if label_shift == 0:
                    place = (self.x(x) + 10, self.y(y) + 4, "start")
                self.text(place[0], place[1], labels[i], anchor=place[2], size=10, color=color)
        place = TOP + 10 + 20 * self.legend
        self.legend += 1
        self.parts.append('<circle cx="%d" cy="%d" r="4" %s/>' % (WIDTH - RIGHT + 18, place - 4, paint))
        self.text(WIDTH - RIGHT + 28, place, name)

    def svg(self):
        return "\n".join(self.parts) + "\n</svg>\n"


def _length(tokens):
    return "%dM" % (tokens >> 20) if tokens >= 1 << 20 else "%dK" % (tokens >> 10)


def throughput():
    """Returns the plot of tokens/s a GPU over the length of a sequence, with figures that other projects publish."""
    lengths = [1 << power for power in range(13, 23)]
    plot = Plot("Training: tokens/s a GPU over the length of a sequence", "tokens in a sequence", "tokens/s a GPU",
                (6000, 6e6), (80, 100000), [(n, _length(n)) for n in lengths],
                [(100, "100"), (1000, "1,000"), (10000, "10,000"), (100000, "100,000")])
    steps = long_steps()
    for color, (model, name) in enumerate((("1.07B Llama", "1.07B"), (LLAMA_8B, "8B"))):
        best = {}
        for row in steps:
            if row["model"] == model and row["mask"] == "causal":
                best[row["tokens"]] = max(best.get(row["tokens"], 0), row["rate"])
        plot.series(name + ", causal, H200", sorted(best.items()), COLORS[color])
    window = [(r["tokens"], r["rate"]) for r in steps if r["model"] == LLAMA_8B and r["mask"] != "causal"]
    plot.series("8B, window 8,192, H200", window, COLORS[2])
    others = [row for row in load("published")["rows"] if row["tokens_per_second"]]
    for color, who in enumerate(sorted({row["who"] for row in others})):
        points = [(row["tokens"], row["tokens_per_second"]) for row in others if row["who"] == who]
        plot.series("published: " + who, points, GRAYS[color], connect=False)
    return plot.svg()


def ring_efficiency():
    """Returns the plot of a GPU's rate in a ring, relative to the same kernels without a ring."""
    plot = Plot("Ring attention, 16,384 tokens a GPU, forward and backward, H200", "GPUs", "efficiency, %",
                (0.9, 4.6), (80, 102), [(1, "1"), (2, "2"), (4, "4")],
                [(n, str(n)) for n in range(80, 101, 5)], log_y=False)
    for color, mask in enumerate(("full", "causal")):
        points = [(1, 100.0)] + [(row["gpus"], row["efficiency"]) for row in ring_rows()
                                 if row["mask"] == mask and row["tokens"] == 16384 * row["gpus"]]
        plot.series(mask + " mask", points, COLORS[color], labels=["%.1f" % y for _, y in points],
                    label_shift=18 if mask == "full" else -9)
    return plot.svg()


def roofline():
    """Returns the plot of kernels' TFLOP/s over their FLOPs for each byte of inputs and outputs, on one H200."""
    peak, bandwidth = 989.0, 4.8  # dense bf16 TFLOP/s and TB/s of the data sheet
    plot = Plot("Attention kernels on one H200, bf16", "FLOP per byte of inputs and outputs", "TFLOP/s",
                (4, 20000), (20, 1500), [(n, "{:,}".format(n)) for n in (10, 100, 1000, 10000)],
                [(n, "{:,}".format(n)) for n in (30, 100, 300, 1000)])
    plot.line([(20 / bandwidth, 20), (peak / bandwidth, peak), (20000, peak)], "#999999", 2, "6 4")
    plot.text(plot.x(2500), plot.y(peak) - 8, "peak", size=11, color="#777777")
    points, labels = [], []
    for row in load("decode_h200")["rows"][:3]:
        intensity = row["q_len"] * row["heads"] / row["kv_heads"]  # 4 D k FLOPs a head, 4 D k bytes a KV head
        points.append((intensity, row["ours_gb_per_s"] / 1000 * intensity))
        labels.append(str(row["q_len"]))
    plot.series("1, 4, 8 queries, 128K keys", points, COLORS[2], labels=labels, label_shift=0)
    forward, backward, labels = [], [], []
    forwards, backwards = load("attention_fa3_quick_h200")["rows"], load("attention_peers_h200")["rows"]
    for batch, tokens in ((16, 512), (16, 2048), (1, 8192), (1, 16384)):
        wanted = dict(batch=batch, tokens=tokens, heads=32, kv_heads=32, head_dim=128, mask="causal")
        # With n tokens, causal: 2 n n D FLOPs on 4 tensors of 2 n D bytes; 5 n n D FLOPs on 8 tensors.
        forward.append((tokens / 4, one(forwards, **wanted)["forward"]["ours"]))
        backward.append((tokens * 5 / 16, one(backwards, **wanted, **{"pass": "backward"})["tflops"]["ours"]))
        labels.append("{:,}".format(tokens))
    plot.series("forward, D=128, causal", forward, COLORS[0], labels=labels)
    plot.series("backward, D=128, causal", backward, COLORS[1], labels=labels, label_shift=18)
    return plot.svg()


def _float8_curves(curve, title, y_label, y_range, y_ticks, log_y):
    """Returns the plot of a curve of training in bf16 and in fp8 over the tokens that a run has seen."""
    data = load("train_step_float8_h100")
    tokens = 65536  # in a step
    plot = Plot(title, "million tokens seen", y_label, (0, 60), y_range, [(n, str(n)) for n in range(0, 61, 10)],
                [(y, str(y)) for y in y_ticks], log_x=False, log_y=log_y)
    for color, (name, of) in enumerate((("Llama 386M", "llama_%s"), ("GPT-2 124M", "d12_%s_1"),
                                        ("GPT-2 124M, seed 2", "d12_%s_2"))):
        for precision, dash in (("bf16", ""), ("fp8", "5 4")):
            points = [(step * tokens / 1e6, y) for step, y in data["curves"][of % precision][curve]]
            plot.series("%s, %s" % (name, precision), points, COLORS[color], dash=dash,
                        filled=precision == "bf16")
    return plot.svg()


def float8_losses():
    """Returns the plot of validation losses of runs that differ by their precision alone."""
    return _float8_curves("validation", "Validation loss: bf16, and fp8 dashed", "loss", (2, 4.2),
                          (2, 2.5, 3, 3.5, 4), log_y=False)


def float8_gradients():
    """Returns the plot of the gradients' norms of the runs of float8_losses."""
    return _float8_curves("grad_norm", "Norm of the gradients: bf16, and fp8 dashed", "norm", (0.15, 1.5),
                          (0.2, 0.5, 1), log_y=True)


PLOTS = {"throughput": throughput, "ring_efficiency": ring_efficiency, "roofline": roofline,
         "float8_losses": float8_losses, "float8_gradients": float8_gradients}
