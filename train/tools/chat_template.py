"""Renders messages by a model's chat template, as apply_chat_template of transformers does."""

import datetime
import json
import os
import secrets

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

# Names of what a model thought before it answered, the first choice first. Templates read one of the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")
# What a template gets from the line itself, so `chat_template_kwargs` must not have it.
OWN_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt")
TOKEN_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the second one wins


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
    """The chat templates of a model's folder, and the special tokens of its tokenizer.

    `path` is the folder, or a template's file. `tokenizer` is a folder with the files of the tokenizer; None: the
    template's folder.
    """

    def __init__(self, path, tokenizer=None):
        if tokenizer is not None and not tokenizer.is_dir():
            raise SystemExit(f"error: --tokenizer: must be a folder; got {tokenizer}; give the model's folder")
        self._path = path
        self._tokenizer = tokenizer or (path if path.is_dir() else path.parent)
        self.files = []  # that were read
        self.tokens = self._special_tokens()
        self.beginning = self._beginning()
        nonce = secrets.token_hex(16)  # texts cannot have the marks by chance
        self._marks = (f"<{nonce}>", f"</{nonce}>")
        self._time = datetime.datetime.now()  # one time for all texts
        self._templates = {name: self._compile(source) for name, source in self._sources(path).items()}

    def _compile(self, source):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationExtension, jinja2.ext.loopcontrols]
        )
        environment.has_marks = False  # until a tag is parsed
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = self._time.strftime
        try:
            template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except Exception as error:  # Jinja computes what is constant at once, which may fail by any
            raise SystemExit(f"error: --template: {self._path}: must be a Jinja template; got: {error}")
        for name in ("bos_token", "eos_token"):
            if name in names:
                self.check_tokens(f"the template reads {name}")
        return template

    def check_tokens(self, why):
        """Ends the program if no file names the special tokens, which are needed because of `why`."""
        if any((self._tokenizer / name).is_file() for name in TOKEN_FILES):
            return
        raise SystemExit(
            f"error: --template: {self._tokenizer} must have tokenizer_config.json, because {why}; got none; put the "
            "model's there, or give //train:chats --tokenizer=MODEL_DIR"
        )

    def _read(self, path):
        self.files.append(path)
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise SystemExit(f"error: --template: cannot read {path}: {error.strerror}")
        except UnicodeDecodeError as error:
            raise SystemExit(f"error: --template: {path}: must be UTF-8; got: {error}; save it as UTF-8")

    def _json(self, path):
        """Returns the object in a JSON file, or {} without the file."""
        if not path.is_file():
            return {}
        try:
            value = json.loads(self._read(path))
        except (ValueError, RecursionError) as error:
            raise SystemExit(f"error: --template: {path}: must be JSON; got: {error}; take the model's own file")
        if not isinstance(value, dict):
            raise SystemExit(
                f"error: --template: {path}: must be a JSON object; got {kind(value)}; take the model's own file"
            )
        return value

    def _sources(self, path):
        """Returns the texts of templates by name: of files, else of the configuration. A base model has none."""
        if not path.is_dir():
            if path.suffix == ".json":
                raise SystemExit(f"error: --template: must be a folder or a .jinja file; got {path}; give its folder")
            return {"default": self._read(path)}
        files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        if (path / "chat_template.jinja").is_file():
            files["default"] = path / "chat_template.jinja"
        if files:
            return {name: self._read(file) for name, file in files.items()}
        config = path / "tokenizer_config.json"
        found = self._json(config).get("chat_template")
        if found is None:
            return {}
        rows = found if isinstance(found, list) else [{"name": "default", "template": found}]
        if all(isinstance(row, dict) and isinstance(row.get("template"), str) for row in rows):
            return {row.get("name"): row["template"] for row in rows}
        raise SystemExit(
            f"error: --template: {config}: chat_template must be a text, or a list of names and texts; "
            f"got {kind(found)}; take the model's own file"
        )

    def _special_tokens(self):
        """Returns the texts of special tokens by name, such as eos_token. Models may have names of their own."""
        texts = {}
        for name in TOKEN_FILES:
            values = self._json(self._tokenizer / name)
            more = [values.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
            named = {key: value for key, value in values.items() if key.endswith("_token")}
            for tokens in [named, *more]:
                for key, token in tokens.items() if isinstance(tokens, dict) else ():
                    text = token.get("content") if isinstance(token, dict) else token
                    if isinstance(text, str):
                        texts[key] = text
        return texts

    def _beginning(self):
        """Returns the text of what the tokenizer puts before a text: tokenizer.json's tokens, else add_bos_token's."""
        path = self._tokenizer / "tokenizer.json"
        try:
            before = "".join(_tokens_before(self._json(path).get("post_processor")))
        except (AttributeError, LookupError, TypeError):
            raise SystemExit(
                f"error: --template: {path}: post_processor must be of the library tokenizers; got another form; take "
                "the model's own file"
            )
        adds_bos = self._json(self._tokenizer / "tokenizer_config.json").get("add_bos_token")
        return before or (self.tokens.get("bos_token", "") if adds_bos else "")

    def _choose(self, tools):
        """Returns the template of a chat, which is another one with tools if the model has two."""
        for name in ("tool_use", "default") if tools is not None else ("default",):
            if name in self._templates:
                return self._templates[name]
        if self._templates:
            raise BadLine(f"the template must be named default; got {', '.join(map(str, self._templates))}")
        raise SystemExit(
            f"error: --template: must be a folder with chat_template.jinja, or with chat_template in "
            f"tokenizer_config.json; got {self._path}; give the folder of an instruct model, or a template's file"
        )

    def render(self, messages, line, add_generation_prompt=False):
        """Returns the text, and the ranges of characters that the template marks; None if it has no marks."""
        tools = _objects(line, "tools")
        template = self._choose(tools)
        arguments = {
            **self.tokens,
            **_arguments(line),
            "messages": [_normalized(message) for message in messages],
            "tools": tools,
            "documents": _objects(line, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(template, arguments, ("", ""))
        if not template.environment.has_marks:
            return text, None
        begin, end = self._marks
        parts, ranges, at = [], [], 0
        for number, part in enumerate(self._render(template, arguments, self._marks).split(begin)):
            if number > 0:
                inside, _, part = part.partition(end)
                ranges.append([at, at + len(inside)])
                parts.append(inside)
                at += len(inside)
            parts.append(part)
            at += len(part)
        if "".join(parts) != text:
            raise BadLine(
                f"the template {self._path} must not change what its generation tags mark; got a filter or a test "
                "of it; filter inside of the tags"
            )
        return text, ranges

    def _render(self, template, arguments, marks):
        template.environment.marks = marks
        try:
            return template.render(arguments)
        except jinja2.TemplateError as error:
            raise BadLine(f"the template {self._path} cannot render it: {error}")
        except Exception as error:  # a template is a program, and may fail by any
            raise BadLine(f"the template {self._path} cannot render it: {type(error).__name__}: {error}")


def common_start(a, b):
    """Returns the length of what two texts have in common, up to the end of a tag, a word or a line."""
    length = len(os.path.commonprefix([a, b]))
    while 0 < length < min(len(a), len(b)) and a[length - 1] not in ">]: \n":
        length -= 1
    return length


def kind(value):
    """Names the kind of a JSON value, for errors."""
    return {list: "a list", dict: "an object", str: "a text"}.get(type(value), json.dumps(value))


def _normalized(message):
    """Returns a message without null values, with what the model thought under both names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    thought = next((message[name] for name in REASONING if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _objects(line, name):
    """Returns the list of objects that a line has under a name, also as a text of JSON; None if there is none."""
    value = line.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadLine(f"{name} must be a list of objects; got a text that is not JSON")
    if value is not None and not (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        raise BadLine(f"{name} must be a list of objects; got {kind(value)}")
    return value


def _arguments(line):
    """Returns the arguments of the template that a line has."""
    arguments = line.get("chat_template_kwargs")
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise BadLine(f"chat_template_kwargs must be an object; got {kind(arguments)}")
    for name in OWN_ARGUMENTS:
        if name in arguments:
            raise BadLine(f"chat_template_kwargs must not have {name}; give it outside of them")
    return arguments


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise jinja2.TemplateError(message)


def _tokens_before(processor):
    """Returns the special tokens that a post_processor of tokenizer.json puts before a text."""
    name = processor["type"] if processor else None
    if name == "Sequence":
        return [token for part in processor["processors"] for token in _tokens_before(part)]
    if name in ("RobertaProcessing", "BertProcessing"):
        return [processor["cls"][0]]
    tokens = []
    for part in processor["single"] if name == "TemplateProcessing" else []:
        if "SpecialToken" not in part:
            break
        tokens.append(part["SpecialToken"]["id"])
    return tokens
