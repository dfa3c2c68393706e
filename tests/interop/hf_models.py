"""Makes small models of each family with transformers, for hf_parity.py and fixtures.py."""

import torch
import transformers


def _llama(**fields):
    return transformers.LlamaConfig(**{**_COMMON, **fields})


# The vocabulary is odd, heads are grouped, and the feed-forward's width is not round.
_COMMON = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


def _rope(kind, **fields):
    return dict(rope_scaling=dict(rope_type=kind, **fields), rope_theta=500.0)


_YARN = dict(factor=4.0, original_max_position_embeddings=32)
_PHI = dict(pad_token_id=None, rope_theta=500.0)


def _long(pairs, **fields):
    # LongRoPE's factors of short texts are small.
    return dict(
        rope_type="longrope",
        short_factor=[1 + 0.1 * i for i in range(pairs)],
        long_factor=[1 + 1.5 * i for i in range(pairs)],
        **fields,
    )


_QWEN2 = {**_COMMON, "use_sliding_window": False}
_WINDOW = dict(use_sliding_window=True, sliding_window=7, max_window_layers=0)

_GEMMA = {
    **_COMMON, "head_dim": 16, "sliding_window": 7, "tie_word_embeddings": True,
    "pad_token_id": None,  # its row would learn nothing as an input
}

_GEMMA1 = {key: value for key, value in _GEMMA.items() if key != "sliding_window"}


def _bases(theta, **full):
    return dict(
        full_attention=dict(rope_theta=theta, **full),
        sliding_attention=dict(rope_theta=50.0, rope_type="default"),
    )


CONFIGS = {
    "llama": lambda: _llama(),
    "llama-tied": lambda: _llama(tie_word_embeddings=True, rope_theta=500000.0),
    "llama-head_dim": lambda: _llama(head_dim=20),
    "llama-full_heads": lambda: _llama(num_key_value_heads=6, rms_norm_eps=1e-3),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: _llama(**_rope("linear", factor=2.5)),
    "llama-llama3": lambda: _llama(
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),
    "llama-yarn": lambda: _llama(**_rope("yarn", beta_fast=3.0, **_YARN)),
    "llama-yarn-factor": lambda: _llama(
        **_rope("yarn", attention_factor=1.3, truncate=False, beta_fast=3.0, **_YARN)
    ),
    "llama-yarn-mscale": lambda: _llama(
        **_rope("yarn", mscale=0.7, mscale_all_dim=1.4, beta_fast=3.0, **_YARN)
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=97, n_positions=64, n_embd=48, n_layer=3, n_head=4
    ),
    "gpt2-untied": lambda: transformers.GPT2Config(
        vocab_size=97,
        n_positions=64,
        n_embd=48,
        n_layer=2,
        n_head=3,
        n_inner=100,
        layer_norm_epsilon=1e-3,
        tie_word_embeddings=False,
    ),
    "mistral": lambda: transformers.MistralConfig(**{**_COMMON, "sliding_window": 7}),
    "mistral-no_window": lambda: transformers.MistralConfig(
        **{**_COMMON, "sliding_window": None, "head_dim": 12}
    ),
    "phi3": lambda: transformers.Phi3Config(**_COMMON, pad_token_id=None),
    "phi3-window": lambda: transformers.Phi3Config(
        **{**_COMMON, "num_key_value_heads": 6, "tie_word_embeddings": True},
        sliding_window=7, pad_token_id=None
    ),
    # 6 of 8 channels turn. hf_parity.py has texts of 60 tokens, which are long for 32.
    "phi3-partial": lambda: transformers.Phi3Config(
        **_COMMON, **_PHI, partial_rotary_factor=0.75
    ),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **_COMMON, **_PHI, original_max_position_embeddings=32, rope_scaling=_long(4)
    ),
    "phi3-longrope-short": lambda: transformers.Phi3Config(
        **_COMMON, **_PHI, original_max_position_embeddings=60, rope_scaling=_long(4)
    ),
    "phi4-mini": lambda: transformers.Phi3Config(
        **{**_COMMON, "tie_word_embeddings": True}, **_PHI, partial_rotary_factor=0.75,
        original_max_position_embeddings=32, rope_scaling=_long(3, attention_factor=1.1)
    ),
    "llama-longrope": lambda: _llama(
        rope_theta=500.0,
        rope_scaling=_long(4, factor=4.0, original_max_position_embeddings=32),
    ),
    "gemma": lambda: transformers.GemmaConfig(**_GEMMA1),
    "gemma-biases": lambda: transformers.GemmaConfig(
        **{**_GEMMA1, "tie_word_embeddings": False, "num_key_value_heads": 6},
        attention_bias=True, **_rope("linear", factor=2.5)
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_COMMON, pad_token_id=None),
    "olmo2-biases": lambda: transformers.Olmo2Config(
        **{**_COMMON, "tie_word_embeddings": True}, attention_bias=True, pad_token_id=None,
        **_rope("linear", factor=2.5)
    ),
    "gemma2": lambda: transformers.Gemma2Config(**_GEMMA, query_pre_attn_scalar=24),
    "gemma2-no_caps": lambda: transformers.Gemma2Config(
        **{**_GEMMA, "tie_word_embeddings": False},
        attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None,
        query_pre_attn_scalar=16,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_GEMMA, query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_bases(500.0, rope_type="linear", factor=4.0),
    ),
    "gemma3-full": lambda: transformers.Gemma3TextConfig(
        **_GEMMA, query_pre_attn_scalar=16, layer_types=["full_attention"] * 3,
        final_logit_softcapping=3.0, rope_parameters=_bases(700.0, rope_type="default"),
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_QWEN2),
    "qwen2-tied": lambda: transformers.Qwen2Config(**{**_QWEN2, "tie_word_embeddings": True}),
    "qwen2-window": lambda: transformers.Qwen2Config(**{**_QWEN2, **_WINDOW}),
    "qwen2-layers": lambda: transformers.Qwen2Config(
        **{**_QWEN2, **_WINDOW, "max_window_layers": 2}
    ),
    "qwen3": lambda: transformers.Qwen3Config(**{**_COMMON, "head_dim": 16}),
    "qwen3-layers": lambda: transformers.Qwen3Config(
        **{**_COMMON, **_WINDOW, "head_dim": 16},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "qwen3-biases": lambda: transformers.Qwen3Config(
        **{**_COMMON, "head_dim": 8, "attention_bias": True}
    ),
    "qwen3-tied": lambda: transformers.Qwen3Config(
        **{**_COMMON, "head_dim": 4, "tie_word_embeddings": True, **_rope("yarn", **_YARN)}
    ),
}


def make(name, seed=1):
    """Returns a model whose random weights are so large that errors show in its logits.

    Biases and normalization weights are random, too; by default they are all equal."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name](), attn_implementation="eager"
    ).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 1.5 / parameter.shape[-1] ** 0.5)
    return model.eval()
