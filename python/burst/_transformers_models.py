"""Which of transformers' models can have their sequences spread over ranks."""

import functools
import inspect
import sys

from ._graphs import constant

# A model's layer_types that mix tokens in the registered attention alone.
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", None)

# Fields of a config with which embeddings depend on other tokens of the sequence: of ESM and MobileBERT.
_WHOLE = ("token_dropout", "trigram_input")


def other_layers(config):
    """Returns the names of a model's layers that mix tokens outside of attention."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYERS))


@functools.lru_cache(maxsize=None)
def _classes(file):
    """Returns the models, and all classes, that the Python module `file` defines."""
    found = [x for x in list(vars(sys.modules.get(file, sys)).values()) if inspect.isclass(x) and x.__module__ == file]
    return [x for x in found if hasattr(x, "_from_config")], found


def _once(function):
    """Makes a function of texts compute each result once. A graph calls it while it is traced."""
    cached = functools.lru_cache(maxsize=None)(function)

    return constant(lambda *texts: cached(*texts))


@_once
def _refusal(file):
    models, _ = _classes(file)
    if any(getattr(model, "_is_stateful", False) for model in models):
        return "layers must be attention; got a model with a state, which needs the whole sequence on a rank"
    if models and not any("position_ids" in inspect.signature(model.forward).parameters for model in models):
        return "forward must take position_ids; got a model that counts tokens itself"
    return None


def check(module):
    """Raises ValueError if the model of an attention module needs the whole sequence on a rank."""
    config = getattr(module, "config", None)
    found, refusal = other_layers(config), _refusal(type(module).__module__)
    if found:
        refusal = "layers must be attention; got %s, which need the whole sequence on a rank" % ", ".join(found)
    for name in _WHOLE:
        if getattr(config, name, False):
            refusal = "%s must be False, because it needs the whole sequence on a rank; got True" % name
    if refusal is not None:
        raise ValueError("model: %s; use a group of one rank" % refusal)


@_once
def _counts_from_padding(file, kind):
    """Returns whether the embeddings of an attention's class, as RobertaEmbeddings of RobertaSelfAttention, do so."""
    name = "create_position_ids_from_input_ids"
    embeddings = [x for x in _classes(file)[1]
                  if x.__name__.endswith("Embeddings") and kind.startswith(x.__name__[:-len("Embeddings")])]
    return any(hasattr(x, name) or hasattr(sys.modules[file], name) for x in embeddings)


def first_position(module, config=None):
    """Returns the position of a sequence's first token: RoBERTa's embeddings begin after the padding's row."""
    config = config or getattr(module, "config", None)
    padding = getattr(config, "pad_token_id", None)
    kind = type(module)
    return padding + 1 if padding is not None and _counts_from_padding(kind.__module__, kind.__name__) else 0


def rope_limits(config):
    """Returns (kind, tokens) of each RoPE whose frequencies depend on whether a sequence is longer than that."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(given, dict):
        return []
    ropes = [rope for rope in given.values() if isinstance(rope, dict)] or [given]
    limits = []
    for rope in ropes:
        kind = rope.get("rope_type") or rope.get("type")
        if kind in ("dynamic", "longrope"):
            limit = (rope.get("original_max_position_embeddings") or
                     getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings)
            limits.append((kind, limit))
    return limits
