"""python -m burst.wandb RUN: sends the metrics of a run of //train to Weights & Biases.

After pip install wandb:

  python -m burst.wandb runs/llama_tiny-1 --project=mine            # what the run has so far
  python -m burst.wandb runs/llama_tiny-1 --project=mine --follow   # also what follows, until the run's last step

The names equal those that --tensorboard writes. A second call continues the same run of W&B, and sends only later steps.
"""

import argparse
import hashlib
import json
import os
import sys
import time

_VALIDATION = {"val_loss": "loss/validation", "val_loss_ema": "loss/validation_ema"}
_NAMES = {"loss": "loss/train", **_VALIDATION}
_FACTS = ("flops_per_token", "peak_flops", "planned", "peak_bytes", "seconds", "sample")


def _parse(line):
    """Returns a row of metrics.jsonl, or None for a line that is not a whole row."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _values(row):
    """Returns a row's values by name. A trainer writes what is not a number as null."""
    return {_NAMES.get(name, name): float("nan") if value is None else value
            for name, value in row.items() if name != "step"}


class _Rows:
    """The rows of a metrics.jsonl that may grow. A run that is resumed replaces the file, from an earlier step on."""

    def __init__(self, path):
        self._path = path
        self._offset, self._last, self._step = 0, b"", 0

    def read(self):
        """Returns the rows of later steps than before. The last row of the file is returned when another one follows,
        because its validation loss may still come; rest() returns it at once."""
        with open(self._path, "rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:  # another file
                self._offset = 0
                file.seek(0)
            lines = file.read().split(b"\n")[:-1]  # without a row that is being written
        self._rest = lines[-1:]
        for line in lines[:-1]:
            self._last = line + b"\n"
            self._offset += len(self._last)
        return self._later(lines[:-1])

    def rest(self):
        """Returns the last row that read() left, in a list."""
        return self._later(self._rest)

    def _later(self, lines):
        rows = [row for row in map(_parse, lines) if row is not None and row["step"] > self._step]
        self._step = max([self._step] + [row["step"] for row in rows])
        return rows

    def last_step(self):
        """Returns the step of the row that read() left, or of the row before it."""
        return max([self._step] + [row["step"] for row in map(_parse, self._rest) if row is not None])


def _json(path):
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (OSError, ValueError) as error:
        raise SystemExit("error: %s: must be a file of a run of //train; got: %s" % (path, error))
    return value


def _run_id(folder, metrics):
    """Returns a name that is the same for every call on a run, and differs for another run in the folder."""
    with open(metrics, "rb") as file:
        first = file.readline()
    # The first row may get validation losses later.
    row = {name: value for name, value in (_parse(first) or {}).items() if name not in _VALIDATION}
    text = os.path.realpath(folder) + json.dumps(row, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _send(run, rows):
    for row in rows:
        if row["step"] >= run.step:
            run.log(_values(row), step=row["step"])


def _main():
    parser = argparse.ArgumentParser(prog="python -m burst.wandb", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="Send the metrics of this folder.")
    parser.add_argument("--project", default="burst", help="Send them to this project. Default: burst.")
    parser.add_argument("--name", help="Show the run by this name. Default: the folder's.")
    parser.add_argument("--id", help="Continue this run of W&B. Default: the run of earlier calls.")
    parser.add_argument("--follow", action="store_true", help="Wait for further steps, until the last one.")
    parser.add_argument("--every", type=float, default=5, help="Look for steps every N seconds. Default: 5.")
    options = parser.parse_args()
    config = _json(os.path.join(options.run, "config.json"))
    metrics = os.path.join(options.run, "metrics.jsonl")
    if not os.path.isfile(metrics) or os.path.getsize(metrics) == 0:
        raise SystemExit("error: %s: must have a step; try again after the first one" % metrics)
    try:
        import wandb
    except ImportError:
        raise SystemExit("error: wandb must be installed; pip install wandb")
    run = wandb.init(project=options.project, name=options.name or os.path.basename(os.path.realpath(options.run)),
                     id=options.id or _run_id(options.run, metrics), config=config, resume="allow")
    rows, steps = _Rows(metrics), config.get("steps", 0)
    try:
        while True:
            _send(run, rows.read())
            if not options.follow or rows.last_step() >= steps:
                break
            time.sleep(options.every)
    except KeyboardInterrupt:
        pass
    # The validation loss of the last step comes after its row; a run that has ended has both.
    facts = os.path.join(options.run, "facts.json")
    while (options.follow and rows.last_step() >= steps and os.path.isfile(facts)
           and not _json(facts).get("peak_bytes")):
        time.sleep(options.every)
    _send(run, rows.read() + rows.rest())
    if os.path.isfile(facts):
        run.summary.update({name: value for name, value in _json(facts).items() if name in _FACTS and value})
    run.finish()


if __name__ == "__main__":
    sys.exit(_main())
