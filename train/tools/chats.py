#!/usr/bin/env python3
"""Renders chats by a model's chat template, for //train:tokenize and //train.

    bazel run //train:chats -- --data='chats/*.jsonl' --template=MODEL_DIR --out=rendered.jsonl
    bazel run //train:tokenize -- --data=rendered.jsonl --tokenizer=MODEL_DIR --out=shards

A line of the data is a JSON object with `messages`, a list of {"role", "content", ...}, or with `prompt` and
`completion`, which are texts or lists of messages. A line of the result has the rendered `text`, and in `counted` the
ranges of its UTF-8 bytes, [begin, end), whose tokens count in the loss.

What the template marks by {% generation %} counts for the role assistant, as in transformers. Without marks, and for
other roles, a message counts from the end of the rendered messages before it to its own end. A completion counts as a
whole.
"""

import argparse
import datetime
import glob
import gzip
import json
import os
import pathlib
import re
import secrets
import sys
import zlib

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class BadLine(Exception):
    """Says why a line cannot be rendered."""


class GenerationExtension(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, around what a model writes. Puts marks around the text inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        self.environment.has_marks = True
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        begin, end = self.environment.marks
        return begin + caller() + end


class Template:
    """A chat template and the special tokens of its tokenizer."""

    def __init__(self, path):
        self._path = path
        self._folder = path if path.is_dir() else path.parent
        self.files = []  # that were read
        self._config = self._json("tokenizer_config.json")
        self.tokens = self._special_tokens()
        self.beginning = self._beginning()
        nonce = secrets.token_hex(16)  # texts cannot have the marks by chance
        self._marks = (f"<{nonce}>", f"</{nonce}>")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, jinja2.ext.loopcontrols]
        )
        environment.marks = self._marks
        environment.has_marks = False  # until a tag is parsed
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        source = self._source(path)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # Jinja computes what is constant at once, which may fail by any
            raise SystemExit(f"error: --template: {path}: must be a Jinja template; got: {error}")
        self.has_marks = environment.has_marks

    def _read(self, path):
        self.files.append(path)
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"error: --template: cannot read {path}: {error.strerror}")
        except UnicodeDecodeError as error:
            raise SystemExit(f"error: --template: {path}: must be UTF-8; got: {error}; save it as UTF-8")

    def _json(self, name):
        path = self._folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(self._read(path))
        except (ValueError, RecursionError) as error:
            raise SystemExit(f"error: --template: {path}: must be JSON; got: {error}; take the model's own file")
        if not isinstance(value, dict):
            raise SystemExit(
                f"error: --template: {path}: must be a JSON object; got {_kind(value)}; take the model's own file"
            )
        return value

    def _source(self, path):
        if path.is_file():
            return self._read(path)
        file = path / "chat_template.jinja"
        if file.is_file():
            return self._read(file)
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if template is not None and not isinstance(template, str):
            raise SystemExit(
                f"error: --template: {path / 'tokenizer_config.json'}: chat_template must be a text or a list with a "
                f"text named default; got {_kind(template)}; take the model's own file"
            )
        if template is None:
            raise SystemExit(
                f"error: --template: must be a folder with chat_template.jinja, or with chat_template in "
                f"tokenizer_config.json; got {path}; give the folder of an instruct model, or a template's file"
            )
        return template

    def _special_tokens(self):
        tokens = {**self._json("special_tokens_map.json"), **self._config}
        texts = {}
        for name in SPECIAL_TOKENS:
            token = tokens.get(name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                texts[name] = text
        return texts

    def _beginning(self):
        """Returns the text of the tokens that the tokenizer puts before a text: tokenizer.json's, else add_bos_token's."""
        before = "".join(_tokens_before(self._json("tokenizer.json").get("post_processor")))
        return before or (self.tokens.get("bos_token", "") if self._config.get("add_bos_token") else "")

    def render(self, messages, line, add_generation_prompt=False):
        """Returns the text, and the ranges of characters that the template marks."""
        try:
            text = self._template.render(
                messages=messages,
                tools=line.get("tools"),
                documents=line.get("documents"),
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
                **line.get("chat_template_kwargs", {}),
            )
        except jinja2.TemplateError as error:
            raise BadLine(f"the template {self._path} cannot render it: {error}")
        except Exception as error:  # a template is a program, and may fail by any
            raise BadLine(f"the template {self._path} cannot render it: {type(error).__name__}: {error}")
        begin, end = self._marks
        parts, ranges, at = [], [], 0
        for number, part in enumerate(text.split(begin)):
            if number > 0:
                inside, _, part = part.partition(end)
                ranges.append([at, at + len(inside)])
                parts.append(inside)
                at += len(inside)
            parts.append(part)
            at += len(part)
        text = "".join(parts)
        if begin[1:-1] in text.lower():
            raise BadLine(
                f"the template {self._path} must not change what its generation tags mark; got a filter of it; filter "
                "inside of the tags"
            )
        return text, ranges


def _kind(value):
    return {list: "a list", dict: "an object", str: "a text"}.get(type(value), json.dumps(value))


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise jinja2.TemplateError(message)


def turns(template, messages, line, roles, text):
    """Returns the ranges of characters of the messages of `roles`, by rendering the messages before each."""
    ranges = []
    for number, message in enumerate(messages):
        if message["role"] not in roles:
            continue
        before = ""
        if number > 0:
            before, _ = template.render(messages[:number], line, message["role"] == "assistant")
        whole, _ = template.render(messages[: number + 1], line)
        if not (text.startswith(whole) and whole.startswith(before)):
            raise BadLine(
                f"the template renders message {number} differently when others follow; "
                "mark what counts by {% generation %} in a template of your own"
            )
        ranges.append([len(before), len(whole)])
    return ranges


def is_messages(value):
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    )


def render_line(template, line, roles):
    """Returns the text of a line, and the ranges of its characters that count."""
    if is_messages(line.get("messages")):
        messages = line["messages"]
        text, ranges = template.render(messages, line)
        if not template.has_marks:
            return text, turns(template, messages, line, roles, text)
        others = turns(template, messages, line, roles - {"assistant"}, text)
        return text, sorted(others + (ranges if "assistant" in roles else []))
    prompt, completion = line.get("prompt"), line.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        begin = template.beginning + prompt
        text = begin + completion + template.tokens.get("eos_token", "")
        return text, [[len(begin), len(text)]]
    if is_messages(prompt) and is_messages(completion):
        before, _ = template.render(prompt, line, add_generation_prompt=True)
        text, _ = template.render(prompt + completion, line)
        if not text.startswith(before):
            raise BadLine("the template renders the prompt differently when a completion follows; give messages")
        return text, [[len(before), len(text)]]
    raise BadLine("it must have 'messages', or 'prompt' and 'completion'")


def _tokens_before(processor):
    """Returns the special tokens that a post_processor of tokenizer.json puts before a text."""
    kind = processor.get("type") if isinstance(processor, dict) else None
    if kind == "Sequence":
        return [token for part in processor.get("processors", []) for token in _tokens_before(part)]
    if kind in ("RobertaProcessing", "BertProcessing"):
        return list(processor.get("cls", []))[:1]
    tokens = []
    for part in processor.get("single", []) if kind == "TemplateProcessing" else []:
        if "SpecialToken" not in part:
            break
        tokens.append(part["SpecialToken"].get("id", ""))
    return tokens


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
    pattern = os.path.join(options.cwd, options.data)
    return sorted(glob.glob(pattern)) or [pattern]


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
        self.counts = False  # whether some text counts
        self.roles = set()  # of the messages
        self.skipped = 0
        self.first = None  # the first error


def convert(options, template, out):
    """Writes all lines, and returns their Tally."""
    roles = set(options.roles.split(","))
    tally = Tally()
    for path in files_of(options):
        for number, line in numbered_lines(path):
            if not line.strip():
                continue
            try:
                value = parse(line)
                text, ranges = render_line(template, value, roles)
                text = re.sub("[\ud800-\udfff]", "\ufffd", text)  # halves of pairs must not meet
            except BadLine as error:
                message = f"--data: {path}: line {number}: {error}"
                if options.bad_lines == "error":
                    raise SystemExit(f"error: {message}")
                tally.skipped, tally.first = tally.skipped + 1, tally.first or message
                continue
            if is_messages(value.get("messages")):
                tally.roles.update(message["role"] for message in value["messages"])
            tally.counts = tally.counts or any(begin < end for begin, end in ranges)
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
    except ValueError:
        return False
    return isinstance(row, dict) and row.keys() == {"text", "counted"}


def check_paths(options, template, path):
    """Refuses to write over a file that is read, or that is not a result of this program."""
    for file in [*files_of(options), *template.files]:
        for target in (path, path + ".part"):
            if os.path.exists(file) and os.path.exists(target) and os.path.samefile(file, target):
                raise SystemExit(f"error: --out: must not be a file that is read; got {path}; give another name")
    if os.path.isfile(path) and not is_rendered(path):
        raise SystemExit(
            f"error: --out: must be a new file or rendered chats; got {path}, which is another file; give another name"
        )


def check_counts(options, tally):
    """Refuses a result that nothing can be learned from."""
    if tally.counts:
        return
    if tally.written == 0:
        what = f"the first error is: {tally.first}" if tally.skipped > 0 else "give a file with chats"
        raise SystemExit(f"error: --data: must have a chat that can be rendered; got {options.data}; {what}")
    found = ", ".join(sorted(tally.roles)) or "none"
    raise SystemExit(
        f"error: --roles: must be roles of some messages that are not empty; got {options.roles}, and nothing counts; "
        f"give some of the roles in the data: {found}"
    )


def write(options, template, path):
    """Writes the result as a whole or not at all, and returns the Tally."""
    part = path + ".part"
    with open(part, "w", encoding="utf-8") as out:
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
    parser.add_argument("--out", required=True, help="Write lines with rendered texts to this file.")
    parser.add_argument("--roles", default="assistant", help="Count messages of these roles. Default: assistant.")
    parser.add_argument(
        "--bad_lines", choices=("error", "skip"), default="error",
        help="Stop at lines that cannot be rendered, or count them and go on. Default: error.",
    )
    options = parser.parse_args()
    options.cwd = os.environ.get("BUILD_WORKING_DIRECTORY", "")
    if not all(options.roles.split(",")):
        raise SystemExit(
            f"error: --roles: must be names of roles with commas between them; got '{options.roles}'; "
            "give --roles=assistant"
        )
    template = Template(pathlib.Path(options.cwd) / options.template)
    path = os.path.join(options.cwd, options.out)
    try:
        check_paths(options, template, path)
        tally = write(options, template, path)
    except OSError as error:
        raise SystemExit(f"error: --out: {error}")
    print(f"{tally.written:,} chats: {path}")
    if tally.skipped > 0:
        print(f"left out {tally.skipped:,} lines (--bad_lines=skip); the first: {tally.first}")


if __name__ == "__main__":
    sys.exit(main())
