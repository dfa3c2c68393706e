"""Tests python -m burst.wandb with a module in place of wandb that records the calls."""

import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

from harness import main

# Appends every call to calls.jsonl. `step` is the next step of the run that is continued.
FAKE = """
import json, os
def note(*call):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(call) + "\\n")
class Summary:
    def update(self, values): note("summary", values)
class Run:
    step, summary = int(os.environ["NEXT_STEP"]), Summary()
    def log(self, values, step): note("log", step, values)
    def finish(self): note("finish")
def init(**arguments):
    note("init", arguments)
    return Run()
"""


def row(step, **more):
    return dict(dict(step=step, tokens=100 * step, loss=2.5 / step, lr=0.1, grad_norm=1.5, tokens_per_second=7,
                     step_ms=3), **more)


class WandbTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="burst-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.run_folder = self.folder / "runs" / "mine"
        self.run_folder.mkdir(parents=True)
        (self.folder / "wandb.py").write_text(FAKE)
        (self.run_folder / "config.json").write_text(json.dumps(dict(steps=4, lr=0.1)))
        self.write([row(1), row(2, val_loss=1.25, val_loss_ema=1.0), row(3, loss=None, skipped=True)])

    def write(self, rows, more="", name="metrics.jsonl"):
        """Replaces the metrics by another file, as a run that is resumed does."""
        (self.run_folder / "new").write_text("".join(json.dumps(r) + "\n" for r in rows) + more)
        (self.run_folder / "new").rename(self.run_folder / name)

    def start(self, *arguments, next_step=0, fake=True):
        paths = [str(self.folder)] if fake else []
        (self.folder / "calls.jsonl").unlink(missing_ok=True)
        environment = dict(os.environ, CALLS=str(self.folder / "calls.jsonl"), NEXT_STEP=str(next_step),
                           PYTHONPATH=os.pathsep.join(paths + [os.environ["PYTHONPATH"]]))
        return subprocess.Popen([sys.executable, "-m", "burst.wandb", str(self.run_folder), *arguments],
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def calls(self):
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self):
        return [call[1] for call in self.calls() if call[0] == "log"]

    def finish(self, process):
        out, error = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 0, out + error)
        return self.calls()

    def test_sends_the_rows(self):
        (self.run_folder / "facts.json").write_text(json.dumps(dict(peak_bytes=7, planned="", sample="once")))
        init, *logs, summary, last = self.finish(self.start("--project=p"))
        self.assertEqual(init[1]["config"], dict(steps=4, lr=0.1))
        self.assertEqual((init[1]["project"], init[1]["name"], init[1]["resume"]), ("p", "mine", "allow"))
        self.assertEqual([log[:2] for log in logs], [["log", 1], ["log", 2], ["log", 3]])
        self.assertEqual(logs[1][2], {"tokens": 200, "loss/train": 1.25, "loss/validation": 1.25,
                                      "loss/validation_ema": 1.0, "lr": 0.1,
                                      "grad_norm": 1.5, "tokens_per_second": 7, "step_ms": 3})
        self.assertTrue(math.isnan(logs[2][2]["loss/train"]))
        self.assertEqual(summary[1], dict(peak_bytes=7, sample="once"))
        self.assertEqual(last, ["finish"])
        # A second call continues the run. Another run in the folder is another one.
        again = self.finish(self.start(next_step=3))
        self.assertEqual(again[0][1]["id"], init[1]["id"])
        self.assertEqual(self.steps(), [3])
        self.write([row(1, loss=9)])
        self.assertNotEqual(self.finish(self.start())[0][1]["id"], init[1]["id"])

    def wait_for(self, steps):
        end = time.monotonic() + 60
        while self.steps() != steps and time.monotonic() < end:
            time.sleep(0.05)
        self.assertEqual(self.steps(), steps)

    def test_follows_a_run(self):
        (self.run_folder / "facts.json").write_text(json.dumps(dict(peak_bytes=0)))
        process = self.start("--follow", "--every=0.05")
        self.wait_for([1, 2])  # the third may get a validation loss
        self.write([row(1), row(2)], '{"step": 3, "tok')  # resumed after step 2; a row is being written
        self.write([row(1), row(2), row(3, val_loss=2.0), row(4)])
        self.wait_for([1, 2, 3])
        time.sleep(0.3)
        self.write([row(1), row(2), row(3, val_loss=2.0), row(4, val_loss=3.0)])
        (self.run_folder / "done").write_text(json.dumps(dict(peak_bytes=5)))
        (self.run_folder / "done").rename(self.run_folder / "facts.json")
        self.finish(process)
        values = {call[1]: call[2] for call in self.calls() if call[0] == "log"}
        self.assertEqual(self.steps(), [1, 2, 3, 4])
        self.assertEqual((values[3]["loss/validation"], values[4]["loss/validation"]), (2.0, 3.0))

    def test_errors_are_sentences(self):
        for arguments, prepare, message in (
                ((), lambda: (self.folder / "wandb.py").write_text("raise ImportError"), "pip install wandb"),
                ((), lambda: self.write([]), "metrics.jsonl: must have a step"),
                ((), lambda: (self.run_folder / "config.json").write_text("{"), "config.json: must be a file")):
            prepare()
            process = self.start(*arguments)
            error = process.communicate(timeout=60)[1]
            self.assertEqual(process.returncode, 1)
            self.assertTrue(error.startswith("error: ") and message in error, error)
            self.assertEqual(error.count("\n"), 1)


if __name__ == "__main__":
    main()
