#!/usr/bin/env python3
"""Writes tests/train/testdata/chats.json, the tokens that //tests/train:chats_test expects.

    pip install transformers jinja2
    tests/interop/make_chat_fixture.py

The file has chat templates in the form of several families, with marks of what an assistant writes. For each template
it has the tokens and masks of transformers' apply_chat_template, with the tokenizer of tests/train/tokenizers/tiny and
the family's special tokens.
"""

import json
import pathlib
import tempfile

import transformers

TRAIN = pathlib.Path(__file__).resolve().parents[1] / "train"
OUT = TRAIN / "testdata" / "chats.json"
TURN = "{%% for message in messages %%}%s{%% endfor %%}"
ASSISTANT = "{%% if message['role'] == 'assistant' %%}{%% generation %%}%s{%% endgeneration %%}"
TEMPLATES = {
    "chatml": TURN
    % (
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        + ASSISTANT % "{{ message['content'] + '<|im_end|>\\n' }}"
        + "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    )
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{{ bos_token }}"
    + TURN
    % (
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
        + ASSISTANT % "{{ message['content'] | trim + '<|eot_id|>' }}"
        + "{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}"
    )
    + "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "mistral": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\\n\\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}"
    + TURN
    % (
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
        + ASSISTANT % "{{ ' ' + message['content'] + eos_token }}"
        + "{% else %}{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}{% endif %}"
    ),
    "gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + TURN
    % (
        "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
        "{{ '<start_of_turn>' + role + '\\n' }}"
        + ASSISTANT % "{{ message['content'] | trim + '<end_of_turn>\\n' }}"
        + "{% else %}{{ message['content'] | trim + '<end_of_turn>\\n' }}{% endif %}"
    )
    + "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
}
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>",
]
TALK = [
    {"role": "user", "content": "What is a ring? Cafe\u0301!"},
    {"role": "assistant", "content": "A ring of ranks.\nIt goes around \U0001f600"},
    {"role": "user", "content": "And the end <|endoftext|> of it?"},
    {"role": "assistant", "content": "\nThere is none, e\u0301tude  "},
]
CHATS = [
    TALK,
    TALK[:2],
    [{"role": "system", "content": "You are terse."}] + TALK,
]


def main():
    tokenizer_json = json.loads((TRAIN / "tokenizers" / "tiny" / "tokenizer.json").read_text())
    first = 1 + max(token["id"] for token in tokenizer_json["added_tokens"])
    for number, text in enumerate(SPECIAL):
        tokenizer_json["added_tokens"].append(
            dict(id=first + number, content=text, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
        )
    families = {}
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(tokenizer_json))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path), bos_token="<bos>", eos_token="<eos>")
        for name, template in TEMPLATES.items():
            rows = []
            for chat in CHATS:
                if name == "gemma" and chat[0]["role"] == "system":
                    continue
                result = tokenizer.apply_chat_template(
                    chat, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
                )
                rows.append(dict(messages=chat, tokens=result["input_ids"], mask=result["assistant_masks"]))
            families[name] = dict(template=template, chats=rows)
    added = tokenizer_json["added_tokens"][-len(SPECIAL) :]
    OUT.write_text(json.dumps(dict(added_tokens=added, families=families)) + "\n")


if __name__ == "__main__":
    main()
