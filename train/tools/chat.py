#!/usr/bin/env python3
"""Talks with a model: renders what you write by its chat template, and lets //train:generate answer.

    bazel run //train:chat -- --checkpoint=MODEL_DIR
    bazel run //train:chat -- --checkpoint=runs/NAME --template=MODEL_DIR --temperature=0.7 --ranks=4

Other options go to //train:generate. A line is a message, /new begins another chat, and /exit or Ctrl-D ends. A chat
that is longer than the model's context gives a warning, and the model reads its end.
"""

import argparse
import json
import os
import pathlib
import secrets
import subprocess
import sys

import chat_template  # train/tools/chat_template.py


def find_template(options):
    """Returns the chat template of --template, or of the model that --checkpoint names."""
    working = pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""))
    model = working / options.checkpoint
    if not model.exists():
        sys.exit(f"error: --checkpoint: no such file or folder: {model}")
    # A run that began with a model keeps its files in a folder of its own.
    folder = model if model.is_dir() else model.parent
    companions = folder / "huggingface"
    tokenizer = companions if companions.is_dir() else folder
    if options.template is None:
        return chat_template.Template(tokenizer)
    path = working / options.template
    own = path if path.is_dir() else path.parent
    has_tokens = any((own / name).is_file() for name in chat_template.TOKEN_FILES)
    return chat_template.Template(path, own if has_tokens else tokenizer)


def end_of_answer(template):
    """Returns what the template puts behind an answer, such as "<|im_end|>"; "" if it is white space alone."""
    answer = secrets.token_hex(16)
    question = {"role": "user", "content": "?"}
    messages = [question, {"role": "assistant", "content": answer}, question]
    try:
        tail = template.render(messages[:2], {})[0].partition(answer)[2]
    except chat_template.BadLine:
        return ""
    try:
        # The last answer may have an end of its own, and the next message may begin without a space.
        next_tail = template.render(messages, {})[0].partition(answer)[2]
        return tail[: chat_template.common_start(tail, next_tail)].strip() or tail.strip()
    except chat_template.BadLine:
        return tail.strip()


class Model:
    """//train:generate as a process that answers one prompt after the other."""

    def __init__(self, options, stop, others):
        program = pathlib.Path(sys.argv[0]).absolute().parent / "generate"
        command = [program, "--checkpoint=" + options.checkpoint, "--prompts=-", "--stream"]
        # The template's text has BOS, and chats are trained as it renders them.
        self._process = subprocess.Popen(
            command + ["--nobos", "--stop=" + stop] + others,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )

    def answer(self, prompt):
        """Yields the pieces of the text after the prompt."""
        try:
            self._process.stdin.write(json.dumps(prompt) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.end()
        for line in self._process.stdout:
            row = json.loads(line)
            if "text" in row:
                return
            yield row["piece"]
        self.end()

    def end(self):
        """Ends the program with generate's exit code. It has printed its error."""
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        raise SystemExit(self._process.wait())


def talk(template, model, system):
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = list(first)
    shows = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")  # the model reads UTF-8
    while True:
        try:
            line = input("> " if shows else "")
        except EOFError:
            model.end()
        if line.strip() == "/exit":
            model.end()
        if line.strip() == "/new":
            messages = list(first)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            prompt, _ = template.render(messages, {}, add_generation_prompt=True)
        except chat_template.BadLine as error:
            print(f"error: --template: {error}", file=sys.stderr)
            messages.pop()
            continue
        answer = ""
        for piece in model.answer(prompt):
            print(piece, end="", flush=True)
            answer += piece
        print(flush=True)
        messages.append({"role": "assistant", "content": answer})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", required=True, help="Load a run, a checkpoint, or a Hugging Face directory.")
    parser.add_argument("--template", help="Take the chat template of a folder, or a .jinja file. Default: the model's.")
    parser.add_argument("--system", help="Begin each chat with this message. Default: none.")
    parser.add_argument("--stop", help="End an answer before this. Default: what the template puts behind answers.")
    options, others = parser.parse_known_args()
    template = find_template(options)
    stop = end_of_answer(template) if options.stop is None else options.stop
    talk(template, Model(options, stop, others), options.system)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
