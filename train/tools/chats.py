#!/usr/bin/env python3
"""Renders chats by a model's chat template, for //train:tokenize and //train.

    bazel run //train:chats -- --data='chats/*.jsonl' --template=MODEL_DIR --out=rendered.jsonl
    bazel run //train:tokenize -- --data=rendered.jsonl --tokenizer=MODEL_DIR --out=shards

A line of the data is a JSON object with `messages`, a list of {"role", "content", ...}, or with `prompt` and
`completion`, which are texts or lists of messages. A line of the result has the rendered `text`, and in `counted` the
ranges of its UTF-8 bytes, [begin, end), whose tokens count in the loss.

What the template marks by {% generation %} counts for the role assistant, as in transformers. Without marks, and for
other roles, a message counts from the end of the rendered messages before it to its own end. A completion counts as a
whole. A line may also have `tools`, `documents` and `chat_template_kwargs`, such as {"enable_thinking": false}.
"""

import argparse
import glob
import gzip
import json
import os
import pathlib
import re
import signal
import sys
import zlib

from chat_template import BadLine, Template, common_start, kind  # train/tools/chat_template.py

MARK_IT = "give a template that marks what counts by {% generation %}, with --template=FILE --tokenizer=MODEL_DIR"


def beginning(template, messages, line, text, add_generation_prompt=False):
    """Returns the rendered messages if the text begins with them, else None."""
    part, _ = template.render(messages, line, add_generation_prompt)
    if not text.startswith(part):
        part = part.removesuffix(template.tokens.get("eos_token", ""))  # some write it behind the last message alone
    return part if text.startswith(part) else None


def begin_of(template, messages, number, line, whole):
    """Returns where a message begins in `whole`, the text up to its end. An answer begins behind its header."""
    answers = messages[number]["role"] == "assistant"
    if number == 0 and not answers:
        return 0
    before = beginning(template, messages[:number], line, whole, add_generation_prompt=answers)
    if before is not None:
        return len(before)
    if answers and number > 0:
        # The prompt may have more than the header, such as the begin of a thought that this answer does not have.
        before = beginning(template, messages[:number], line, whole)
        prompt, _ = template.render(messages[:number], line, add_generation_prompt=True)
        begin = common_start(prompt, whole)
        if before is not None and prompt[len(before) : begin].strip():
            return begin
    raise BadLine(f"the template renders what is before message {number} differently without it; {MARK_IT}")


def turns(template, messages, line, roles, text):
    """Returns the ranges of characters of the messages of `roles`, by rendering the messages before each."""
    ranges = []
    for number, message in enumerate(messages):
        if message["role"] not in roles:
            continue
        whole = beginning(template, messages[: number + 1], line, text)
        if whole is None:
            raise BadLine(f"the template renders message {number} differently when others follow; {MARK_IT}")
        ranges.append([begin_of(template, messages, number, line, whole), len(whole)])
    return ranges


def messages_of(line, name):
    """Returns the messages that a line has under a name."""
    value = line[name]
    if not isinstance(value, list) or len(value) == 0:
        raise BadLine(f"{name} must be a list of messages; got {'an empty list' if value == [] else kind(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadLine(f"{name} must be objects with a role, a text; got {kind(message)} without one")
    return value


def render_line(template, line, roles):
    """Returns the text of a line, and the ranges of its characters that count."""
    prompt, completion = line.get("prompt"), line.get("completion")
    is_pair = prompt is not None and completion is not None
    if line.get("messages") is not None:
        if is_pair:
            raise BadLine("it must have messages, or prompt and completion; got all three")
        messages = messages_of(line, "messages")
        text, marked = template.render(messages, line)
        if marked is None:
            return text, turns(template, messages, line, roles, text)
        others = turns(template, messages, line, roles - {"assistant"}, text)
        return text, union(others + (marked if "assistant" in roles else []))
    if not is_pair:
        raise BadLine("it must have 'messages', or 'prompt' and 'completion'")
    if isinstance(prompt, str) and isinstance(completion, str):
        template.check_tokens("a completion ends with eos_token")
        begin, end = template.beginning + prompt, template.tokens.get("eos_token", "")
        text = begin + completion + ("" if completion.endswith(end) else end)
        return text, [[len(begin), len(text)]]
    before, _ = template.render(messages_of(line, "prompt"), line, add_generation_prompt=True)
    text, _ = template.render(prompt + messages_of(line, "completion"), line)
    if not text.startswith(before):
        raise BadLine("the template renders the prompt differently when a completion follows; give messages")
    return text, [[len(before), len(text)]]


def union(ranges):
    """Returns ranges that neither overlap nor touch, in order."""
    result = []
    for begin, end in sorted(ranges):
        if result and begin <= result[-1][1]:
            result[-1][1] = max(result[-1][1], end)
        else:
            result.append([begin, end])
    return result


def in_bytes(text, ranges):
    """Returns ranges of UTF-8 bytes."""
    result, done, at = [], 0, 0
    for bounds in ranges:
        row = []
        for place in bounds:
            at += len(text[done:place].encode())
            done = place
            row.append(at)
        result.append(row)
    return result


def files_of(options):
    paths = glob.glob(os.path.join(glob.escape(options.cwd), options.data))
    return sorted(paths) or [os.path.join(options.cwd, options.data)]


def numbered_lines(path):
    if path.endswith(".zst"):
        raise SystemExit(f"error: --data: {path}: must be .jsonl or .jsonl.gz; got .zst; unpack it with zstd -d")
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as lines:
            yield from enumerate(lines, start=1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SystemExit(f"error: --data: {path}: must be a whole gzip file; got: {error}; get or make it again")
    except OSError as error:
        raise SystemExit(f"error: --data: cannot read {path}: {error.strerror}")


def parse(line):
    try:
        value = json.loads(line)
    except ValueError as error:
        raise BadLine(f"it is not JSON: {error}")
    except RecursionError:
        raise BadLine("it is nested too deeply")
    if not isinstance(value, dict):
        raise BadLine("it must be a JSON object")
    return value


class Tally:
    """Knows what the lines were."""

    def __init__(self):
        self.written = 0
        self.silent = 0  # of these, lines of which nothing counts
        self.roles = set()  # of the messages
        self.skipped = 0
        self.first = None  # the first error


def convert(options, template, out):
    """Writes all lines, and returns their Tally."""
    tally = Tally()
    for path in files_of(options):
        for number, line in numbered_lines(path):
            if not line.strip():
                continue
            try:
                value = parse(line)
                text, ranges = render_line(template, value, options.roles)
                text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # halves of pairs must not meet
            except BadLine as error:
                message = f"--data: {path}: line {number}: {error}"
                if options.bad_lines == "error":
                    raise SystemExit(f"error: {message}")
                tally.skipped, tally.first = tally.skipped + 1, tally.first or message
                continue
            tally.roles.update(message["role"] for message in value.get("messages") or [])
            tally.silent += all(begin == end for begin, end in ranges)
            row = {"text": text, "counted": in_bytes(text, ranges)}
            out.write(json.dumps(row) + "\n")
            tally.written += 1
    return tally


def is_rendered(path):
    """Whether the first line is one of a result of this program, or the file is empty."""
    with open(path, "rb") as file:
        line = file.readline()
    try:
        row = json.loads(line) if line else {"text": "", "counted": []}
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and row.keys() == {"text", "counted"}


def check_paths(options, template, path):
    """Refuses to write over a file that is read, or that is not a result of this program."""
    for file in [*files_of(options), *template.files]:
        if os.path.exists(file) and os.path.exists(path) and os.path.samefile(file, path):
            raise SystemExit(f"error: --out: must not be a file that is read; got {path}; give another name")
    if os.path.exists(path) and not (os.path.isfile(path) and is_rendered(path)):
        raise SystemExit(
            f"error: --out: must be a new file or rendered chats; got {path}, which is neither; give another name"
        )


def check_counts(options, tally):
    """Refuses a result that nothing can be learned from."""
    if tally.silent < tally.written:
        return
    if tally.written == 0:
        what = f"the first error is: {tally.first}" if tally.skipped > 0 else "give a file with chats"
        raise SystemExit(f"error: --data: must have a chat that can be rendered; got {options.data}; {what}")
    found = ", ".join(sorted(tally.roles)) or "none"
    given = ", ".join(sorted(options.roles))
    raise SystemExit(
        f"error: --roles: must be roles of some messages that are not empty; got {given}, and nothing counts; "
        f"give some of the roles in the data: {found}"
    )


def write(options, template, path):
    """Writes the result as a whole or not at all, and returns the Tally."""
    part = f"{path}.{os.getpid()}.part"
    with open(part, "x", encoding="utf-8") as out:
        try:
            tally = convert(options, template, out)
            check_counts(options, tally)
            out.close()
            os.rename(part, path)
        except BaseException:
            os.unlink(part)
            raise
    return tally


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--data", required=True, help="Read .jsonl or .jsonl.gz, a file or a pattern.")
    parser.add_argument("--template", required=True, help="Take the chat template of a folder, or a .jinja file.")
    parser.add_argument("--tokenizer", help="Take special tokens of this folder. Default: the template's folder.")
    parser.add_argument("--out", required=True, help="Write lines with rendered texts to this file.")
    parser.add_argument("--roles", default="assistant", help="Count messages of these roles. Default: assistant.")
    parser.add_argument(
        "--bad_lines", choices=("error", "skip"), default="error",
        help="Stop at lines that cannot be rendered, or count them and go on. Default: error.",
    )
    options = parser.parse_args()
    options.cwd = os.environ.get("BUILD_WORKING_DIRECTORY", "")
    options.roles = {role.strip() for role in options.roles.split(",")}
    if "" in options.roles:
        raise SystemExit(
            "error: --roles: must be names of roles with commas between them; got an empty name; give --roles=assistant"
        )
    cwd = pathlib.Path(options.cwd)
    template = Template(cwd / options.template, options.tokenizer and cwd / options.tokenizer)
    path = os.path.realpath(cwd / options.out)  # a link stays one
    try:
        check_paths(options, template, path)
        tally = write(options, template, path)
    except OSError as error:
        raise SystemExit(f"error: --out: {error}")
    print(f"{tally.written:,} chats: {path}")
    if tally.silent > 0:
        print(f"{tally.silent:,} of them have nothing that counts in the loss")
    if tally.skipped > 0:
        print(f"left out {tally.skipped:,} lines (--bad_lines=skip); the first: {tally.first}")
    unknown = ", ".join(sorted(options.roles - tally.roles))
    if unknown and tally.roles:
        print(f"warning: --roles: no message has the role {unknown}", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
