#!/usr/bin/env python3
"""Runs the commands of the pages, with a tiny model and few steps.

Every command of a block of shell is run or is in NOT_RUN with the reason. The commands of a page run in order, in a
folder that has the files which pages name: my.txt, DIR, runs/NAME and others. Instead of torchrun,
tests/faults/launcher.sh starts processes. A command fails if its exit code is not 0. If its remark is
"# error: TEXT", the exit code must be 2, and the output must have TEXT.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path.cwd()
TINY = "--model=" + json.dumps(dict(family="llama", layers=4, width=32, heads=4, kv_heads=4, ffn=64))
# The file of each program, and options that make it small. They come last, so they win over the page's.
PROGRAMS = {
    "train": ("train/train", ["--steps=2", "--seqlen=32", "--batch=8", "--eval_every=0", "--sample=0", "--threads=1"]),
    "plan": ("train/tools/plan", ["--seqlen=1024"]),
    "evaluate": ("train/tools/evaluate", []),
    "generate": ("train/tools/generate", ["--tokens=4"]),
    "tokenize": ("train/tools/tokenize", []),
    "chat": ("train/tools/chat", []),
    "chats": ("train/tools/chats", []),
    "export": ("train/tools/export", []),
    "import": ("train/tools/import", []),
    "attention": ("examples/attention", []),
}
# How a command that is not run begins, and why it is not run.
NOT_RUN = {
    "third_party/install.sh": "installs packages",
    "bazel build": "a test does not run Bazel",
    "bazel test": "a test does not run Bazel",
    "bazel run -c opt --cxxopt=-std=c++17 :attend": "//tests/workspace builds it",
    "pip install": "//tests/python:wheel_test installs the wheel",
    ".ci/": "CI runs it",
    "git config": "changes the repository",
    "clang-tidy": "is not part of CI",
    "tests/fuzz/fuzz.sh": "needs a fuzzing compiler; //tests/fuzz replays the corpus",
    "./run.sh": "needs a GPU machine",
    "./sanitize.sh": "needs a GPU machine",
    "gdb": "needs a process that hangs",
    "nsys": "needs a GPU and Nsight",
    "bazel run //train -- --model=llama_1b --data='shards/*.bin' --precision=fp8": "needs a GPU",
    "torchrun --nproc_per_node=4 -m burst": "//tests/python:package_test runs it",
    "torchrun --nproc_per_node=4 examples/pytorch/finetune.py": "//tests/python:finetune_test runs it",
    "torchrun --nnodes=2": "needs two hosts: //tests/hosts:two_hosts_test",
    "mpirun": "//tests/comm and //tests/faults run mpirun",
    "srun": "needs Slurm; //tests/comm:process_launch_test has its variables",
    "export": "is for two hosts: //tests/hosts:two_hosts_test",
}
COMMAND = re.compile(r"(bazel|bazel-bin/\S+|torchrun|mpirun|srun|pip|git|gdb|nsys|export|clang-tidy|\.ci/\S+|\./\S+|"
                     r"third_party/\S+|tests/\S+)( |$)")


def commands(page):
    """Yields (command, remark) of a page's blocks of shell, which name no language."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.S | re.M):
        for line in [] if language else re.sub(r"\\\n\s*", "", block).split("\n"):
            line, _, remark = line.partition(" #")
            for command in map(str.strip, line.split("&&")):
                if COMMAND.match(command):
                    yield command, remark.strip()


def small(command):
    """Returns arguments that run a command with little work, or None for a program that PROGRAMS lacks."""
    words, launcher = shlex.split(command), []
    if words[0] == "torchrun":
        ranks = re.match("--nproc_per_node=(.*)", words[1]).group(1)
        launcher = [str(ROOT / "tests/faults/launcher.sh"), "torchrun", ranks, "30"]
        words = words[words.index("--no_python") + 1:]
    label = next(word for word in words if word.startswith(("//", "bazel-bin/")))
    name = re.split("[:/]", label)[-1]
    if name not in PROGRAMS:
        return None
    given = words[words.index("--") + 1:] if "--" in words else words[words.index(label) + 1:]
    path, options = PROGRAMS[name]
    if name in ("train", "plan") and not {"--model=DIR", "--model=runs/chat"} & set(given):
        options = options + [TINY]
    if "--counts=1,2,4,8" in given:
        options = options + ["--seqlens=1024,2048"]
    return launcher + [str(ROOT / path)] + given + options


def run(arguments, folder, expect=0, says=""):
    result = subprocess.run(arguments, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=200)
    if result.returncode == expect and says in result.stdout:
        return True
    print("FAILED with %d: %s\n%s" % (result.returncode, shlex.join(arguments), result.stdout[-3000:]))
    return False


def make_files(folder):
    """Makes the files that pages name."""
    text = "\n".join("sentence %d of many" % (i * 7919 % 1000) for i in range(1000)) + "\n"
    (folder / "my.txt").write_text(text)
    (folder / "book.txt").write_text(text[:200])
    (folder / "web").mkdir()
    (folder / "web/1.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text.split("\n")))
    (folder / "prompts.jsonl").write_text(json.dumps("sentence") + "\n" + json.dumps({"prompt": "of many"}) + "\n")
    tokenizers = ROOT / "tests/train/tokenizers"
    shutil.copytree(tokenizers / "tiny_gpt2", folder / "gpt2")
    shutil.copytree(tokenizers / "tiny", folder / "llama3")
    choice = dict(context="sentence", choices=[" of many", " of few"], answer=0)
    (folder / "choices.jsonl").write_text(json.dumps(choice) + "\n")
    train = "bazel run //train -- --out=runs/"
    made = run(small(train + "NAME") + ["--steps=1"], folder)
    made &= run(small(train + "other --data=my.txt --tokenizer=llama3/tokenizer.json") + ["--steps=1"], folder)
    made &= run(small("bazel run //train:export -- runs/other --out=DIR"), folder)
    shutil.copy(folder / "llama3/tokenizer.json", folder / "DIR")
    (folder / "DIR/chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    chat = [dict(role="user", content="sentence"), dict(role="assistant", content="of many")]
    (folder / "chats.jsonl").write_text(100 * (json.dumps(dict(messages=chat)) + "\n"))
    os.symlink("NAME", folder / "runs/llama_tiny-1")
    return made


def main():
    count, failed, used = 0, 0, set()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TEST_TMPDIR")) as scratch:
        template = pathlib.Path(scratch) / "template"
        template.mkdir()
        if not make_files(template):
            return 1
        for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
            name = str(page.relative_to(ROOT))
            folder = pathlib.Path(scratch) / name.replace("/", "_")
            shutil.copytree(template, folder, symlinks=True)
            for command, remark in commands(page):
                reason = next((begin for begin in NOT_RUN if command.startswith(begin)), None)
                used.add(reason)
                if reason is not None:
                    continue
                print("%s: %s" % (name, command), flush=True)
                arguments = small(command)
                error = re.match(r"error: (.*?) *(\.\.\.)?$", remark)
                count += 1
                if arguments is None:
                    print("FAILED: neither PROGRAMS nor NOT_RUN has it")
                    failed += 1
                elif not run(arguments, folder, 2 if error else 0, error.group(1) if error else ""):
                    failed += 1
    for begin in set(NOT_RUN) - used:
        print("FAILED: no page has a command that begins with %r" % begin)
        failed += 1
    print("%d commands, %d failures" % (count, failed))
    return 1 if failed or count < 30 else 0


if __name__ == "__main__":
    sys.exit(main())
