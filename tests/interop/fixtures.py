#!/usr/bin/env python3
"""Writes tests/train/testdata/huggingface.json, the results that //tests/train:huggingface_test expects.

    pip install torch transformers numpy
    tests/interop/fixtures.py

For each model the file has its config.json as transformers saves it, and the names and shapes of its tensors. It
also has a row of tokens, and the logits that transformers computes in float64. A model with LongRoPE has the text that
it generates greedily after the first tokens, while the text becomes long. The file does not have the weights: element
i of tensor number t, in order of name, is a function of (t, i) that is exact in float32. The function is `numbers`
here and Numbers in the test.
"""

import json
import pathlib

import numpy
import torch
import transformers

OUT = pathlib.Path(__file__).resolve().parents[1] / "train" / "testdata" / "huggingface.json"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 10, 5, 8, 7]


def numbers(tensor, count):
    """Returns [count] numbers from -1 to 1, each a multiple of 2^-15."""
    h = numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(tensor) * numpy.uint64(1000003)
    mask = numpy.uint64(0xFFFFFFFF)
    for shift, factor in (15, 2246822519), (13, 3266489917), (16, 1):
        h = (h * numpy.uint64(2654435761)) & mask
        h = ((h ^ (h >> numpy.uint64(shift))) * numpy.uint64(factor)) & mask
    return (h >> numpy.uint64(16)).astype(numpy.float64) / 32768 - 1


_COMMON = dict(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
_LLAMA3 = dict(
    rope_type="llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
_YARN = dict(rope_type="yarn", factor=4.0, beta_fast=2.0, original_max_position_embeddings=16)


def _long(short, long):
    return dict(rope_type="longrope", short_factor=short, long_factor=long)


_GEMMA1 = {**_COMMON, "head_dim": 8, "tie_word_embeddings": True}
_GEMMA = {**_COMMON, "head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True}

CONFIGS = {
    "llama": transformers.LlamaConfig(**_COMMON),
    "llama_biases": transformers.LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True),
    "llama3": transformers.LlamaConfig(**_COMMON, rope_theta=50.0, rope_scaling=_LLAMA3),
    "mistral": transformers.MistralConfig(**_COMMON, sliding_window=5, head_dim=6),
    "phi3": transformers.Phi3Config(**_COMMON, sliding_window=5, pad_token_id=None),
    # The text has 12 tokens. 6 of 8 channels turn in phi4.
    "phi3_long": transformers.Phi3Config(
        **_COMMON, original_max_position_embeddings=8, rope_theta=50.0, pad_token_id=None,
        rope_scaling=_long([1.0, 1.25], [1.5, 4.0]),
    ),
    "phi3_short": transformers.Phi3Config(
        **_COMMON, original_max_position_embeddings=12, rope_theta=50.0, pad_token_id=None,
        rope_scaling=_long([1.0, 1.25], [1.5, 4.0]),
    ),
    "phi4": transformers.Phi3Config(
        **{**_COMMON, "num_attention_heads": 2, "num_key_value_heads": 1}, partial_rotary_factor=0.75,
        original_max_position_embeddings=8, pad_token_id=None,
        rope_scaling=_long([1.0, 1.5, 2.0], [1.0, 3.0, 5.0]),
    ),
    "qwen2": transformers.Qwen2Config(**{**_COMMON, "tie_word_embeddings": True}),
    "qwen2_layers": transformers.Qwen2Config(
        **_COMMON, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(
        **_COMMON, head_dim=8, rope_theta=50.0, rope_scaling=_YARN
    ),
    "qwen3_layers": transformers.Qwen3Config(
        **{**_COMMON, "num_hidden_layers": 3}, head_dim=8, use_sliding_window=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_biases": transformers.Qwen3Config(**_COMMON, head_dim=4, attention_bias=True),
    "olmo2": transformers.Olmo2Config(**_COMMON, rope_theta=50.0),
    "gemma": transformers.GemmaConfig(**_GEMMA1),
    "gemma2": transformers.Gemma2Config(**_GEMMA, query_pre_attn_scalar=9, rope_theta=50.0),
    "gemma3": transformers.Gemma3TextConfig(
        **_GEMMA,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=30.0),
            full_attention=dict(rope_type="linear", rope_theta=50.0, factor=2.0),
        ),
    ),
    "gpt2": transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=2, n_head=3),
}


def fixture(config):
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.double().eval()
    tensors = {
        name: value
        for name, value in sorted(model.state_dict().items())
        if not (name == "lm_head.weight" and config.tie_word_embeddings)
    }
    with torch.no_grad():
        for number, value in enumerate(tensors.values()):
            value.copy_(torch.from_numpy(numbers(number, value.numel())).view(value.shape))
        model.tie_weights()
        logits = model(torch.tensor([TOKENS])).logits[0]
    config.architectures = [type(model).__name__]
    fields = {k: v for k, v in config.to_diff_dict().items() if k != "transformers_version"}
    made = dict(
        config=fields,
        tensors=[[name, list(value.shape)] for name, value in tensors.items()],
        logits=[[float(f"{x:.9g}") for x in row] for row in logits.tolist()],
    )
    if (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope":
        prompt = torch.tensor([TOKENS[:5]])
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12,
            eos_token_id=None, pad_token_id=0,
        )
        made["generated"] = tokens[0].tolist()
    return made


def main():
    models = {name: fixture(config) for name, config in CONFIGS.items()}
    text = json.dumps(dict(transformers=transformers.__version__, tokens=TOKENS, models=models))
    for key in "config", "tensors", "logits":
        text = text.replace(f'"{key}": ', f'\n"{key}": ')
    OUT.write_text(text + "\n")


if __name__ == "__main__":
    main()
