"""burst.register: attention of transformers' models over a group."""

import copy
import inspect
import re
import weakref
from typing import Any, Optional

import torch

from . import _transformers_masks as masks
from . import _transformers_models as models
from ._attention import attention, cross_attention
from ._graphs import constant
from ._transformers_positions import (Positions, Seen, bounds_of, check_rising, is_compiling, refuse, rows_of, size_of,
                                      starts_again)
from ._types import Group
from .masks import Frozen

# Keywords that models pass to their attention and that do not change its result.
_HARMLESS = frozenset((
    "cache_position", "deterministic", "layer_idx", "max_length_k", "max_length_q", "num_items_in_batch",
    "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values",
    "position_embeddings", "return_dict", "target_dtype", "training", "use_cache", "use_top_left_mask",
    "logits_to_keep", "mm_token_type_ids", "shift_labels", "token_type_ids"))
_TAKEN = re.compile("[/|:]|flash")  # in names of kernels of the hub, of paged attentions and of flash-attention
_NOT_REGISTERED = ("q", "k", "v", "return_lse", "return_max_logit")


def register(group: Optional[Group] = None, layout: str = "zigzag", name: str = "burst",
             **arguments: Any) -> None:
    """Adds `name` to transformers' attention implementations, for

        model = AutoModelForCausalLM.from_pretrained(DIR, attn_implementation="burst")

    Every rank of the group has its part of each sequence and says which in position_ids:

        own = burst.positions(seqlen, group, device=...)
        model(input_ids=input_ids[:, own], position_ids=own[None], use_cache=False)

    On one rank the mask is transformers' own: padding, packed position_ids or cu_seq_lens, windows, chunks,
    blocks of images, 4D masks. Over a group it is causal or bidirectional, with a window, and documents= or
    cu_seq_lens. A model's sinks, dropout and capped logits are honored. docs/pytorch.md has the list.

    Models with other layers than attention, and RoPEs whose frequencies differ between the ranks' parts, are refused
    over a group. A model that does not call attn_implementation never comes here: its ranks see their own parts only.
    This is so in Falcon, Bloom and MPT, where transformers warns, and in FNet and Mamba, where it does not.

    Under autocast q, k and v take its dtype, as in torch's own attention. With gradient checkpointing, a backward
    repeats each forward with the documents that were registered for it, if each batch has its own position_ids.

    Args:
        group (ProcessGroup or one-dimensional DeviceMesh): None: one rank.
        layout (str): as for burst.attention.
        name (str): the attn_implementation.
        arguments: other arguments of burst.attention, such as documents and strategy. Tensors and lists are read now.
            Where they have dropout_p, weights are dropped in training only, as a model's own dropout.

    Raises:
        ImportError: transformers is missing, or older than 4.53.
        ValueError: an argument is not one of burst.attention's. The registered attention raises it, too, for
            a mask or a keyword that it does not serve, and names it.
    """
    if not isinstance(name, str) or not name or _TAKEN.search(name):
        raise ValueError("name: must be a text without / | : and \"flash\", by which transformers finds other "
                         "attentions; got %r; leave it out" % (name,))
    check_version("register")
    check_arguments("register", arguments)
    put(name, Served(group, layout, arguments))


def check_version(caller):
    """Raises an ImportError without a transformers that tells attentions their masks."""
    try:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: F401
    except ImportError as error:
        raise ImportError("%s: transformers must be 4.53 or newer, which tells an attention its mask; upgrade it" %
                          caller) from error


def check_arguments(caller, arguments):
    """Raises a ValueError for an argument that attention() lacks or that changes what it returns."""
    known = inspect.signature(attention).parameters
    for argument in arguments:
        if argument not in known or argument in _NOT_REGISTERED:
            raise ValueError("%s: %s must be an argument of burst.attention that does not change what "
                             "it returns; got %r" % (caller, argument, arguments[argument]))


def put(name, served):
    """Registers a Served under a name of transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    served.registered = name
    ALL_ATTENTION_FUNCTIONS.register(name, served.forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, masks.mask_function(lambda: served.ranks))


def _meet(a, b):
    """Returns rows of document starts that divide tokens where either of two such rows (or None) does."""
    if a is None or b is None:
        return a or b
    rows = max(len(a), len(b))
    if {len(a), len(b)} - {1, rows}:
        raise ValueError("documents: %d rows were registered, the model's mask has %d" % (len(b), len(a)))
    return tuple(tuple(sorted({*a[row % len(a)], *b[row % len(b)]})) for row in range(rows))


def _are_within(slices, starts):
    """Returns whether each slice is within one document, so that documents do not change it."""
    of = lambda token: sum(start <= token for start in starts)
    return all(of(a) == of(b - 1) == of(c) == of(d - 1) for row in slices for a, b, c, d, _ in row)


_MOST_FORWARDS = 64  # that are kept before those of freed tensors are removed
_backward = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # the number of the running backward; -1: none
_forwards = {}  # by id(position_ids) and name: a weak reference to these, and the Served as it was in their forward


def _recomputed(served, position_ids):
    """Returns the Served as it was in the forward that gradient checkpointing repeats: update() may have come since."""
    key = id(position_ids), served.registered
    of, then = _forwards.get(key, (lambda: None, None))
    is_known = of() is position_ids
    if _backward() != -1:
        return then if is_known else served
    if is_known and then.version is served.version:
        return served
    if len(_forwards) >= _MOST_FORWARDS:
        for other, (tensor, _) in list(_forwards.items()):
            if tensor() is None:
                _forwards.pop(other, None)  # another thread may have removed it
    then = copy.copy(served)
    then._positions = copy.copy(served._positions)
    _forwards[key] = weakref.ref(position_ids), then
    return served


_used = set()  # names of Served that a model has called


@constant
def _note_use(name):
    """Remembers the name. A graph does so while it is traced, because it may not change what is outside of it."""
    _used.add(name)


class Served:
    """A registered attention. Models call its forward.

    registered: the attention's name in transformers, which put() sets. version: an object that update() replaces.
    own: the positions of this rank's tokens, int64 [tokens], where the caller has cut the batch itself. They are then
    not checked. windows: those of layers whose masks of padding graphs will need."""

    def __init__(self, group, layout, arguments, name=None):
        self.group, self._layout, self._arguments = group, layout, arguments
        self.ranks = size_of(group)  # here, because torch 2.11 does not trace it
        self.own, self._name, self.registered, self.windows = None, name, None, (0,)
        self._positions = Positions(group, layout, arguments)
        self._masks, self._lengths, self._packings, self._ends = Seen(), Seen(), Seen(), Seen()
        self.update()

    @property
    def used(self):
        """Whether a model has called forward of a Served with a name."""
        return self._name in _used

    def set_cu_seqlens(self, bounds):
        """Takes the bounds of the whole sequence's documents for the calls that follow."""
        self.update(cu_seqlens=tuple(bounds))

    def update(self, kept=None, **given):
        """Takes arguments for the calls that follow. A graph does not keep them as constants.

        kept: bool [rows, tokens of the whole sequence] on the CPU, false at keys that are padding, or None."""
        self._arguments, self.version = {**self._arguments, **given}, object()
        for name in ("documents", "cu_seqlens"):  # here, because a GPU would wait in each layer, and lists may change
            value = self._arguments.get(name)
            if isinstance(value, (list, torch.Tensor)):
                self._arguments[name] = value.tolist() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        seqlen = self._arguments.get("seqlen")
        self._seqlen = None if seqlen is None else Frozen([seqlen])
        try:
            rows, self._is_read = rows_of(self._arguments), True
        except ValueError:  # forward raises it, on all ranks
            rows, self._is_read = None, False
        self._packed = None if rows is None else Frozen(rows)
        self._positions.arguments = self._arguments
        self._kept, self._shown = kept, {}
        for window in () if kept is None else self.windows:  # here, because a graph cannot compute it
            self._without_padding(True, window, 0, rows)

    def forward(self, module, query, key, value, attention_mask, *more, position_ids=None, **given):
        """Computes a layer's attention, with the arguments of transformers' attention functions."""
        served = self if position_ids is None or is_compiling() else _recomputed(self, position_ids)
        return served._forward(module, query, key, value, attention_mask, *more, position_ids=position_ids, **given)

    def _forward(self, module, query, key, value, attention_mask, scaling=None, dropout=0.0,
                 sliding_window=None, is_causal=None, softcap=None, s_aux=None, position_ids=None,
                 cu_seq_lens_q=None, cu_seq_lens_k=None, **others):
        ranks = self.ranks
        if self._name is not None:
            _note_use(self._name)
        lengths = query.shape[2], key.shape[2]
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        try:
            _check_others(others)
            mask = self._mask(attention_mask, lengths, is_causal, sliding_window, ranks)
            documents = self._documents(mask, cu_seq_lens_q, cu_seq_lens_k, query, ranks)
            if ranks > 1:
                at = mask.positions if position_ids is None else position_ids
                models.check(module)
                if self.own is None:
                    self._positions.check(at, lengths[0], documents, mask.causal, mask.window,
                                          models.first_position(module))
                self._check_rope(module, at, lengths[0], documents, ranks)
            if self._kept is not None:
                mask = self._without_padding(mask.causal, mask.window, mask.chunk, documents)
                documents = mask.packed
            elif mask.chunk:
                documents = self._chunks(documents, mask.chunk)
            elif ranks == 1 and documents is None and mask.slices is None and mask.window != 1:
                self._check_packing(position_ids)  # a window of one token keeps all documents apart
        except ValueError as error:
            refuse(self.group, query, "seqlen" in self._arguments, error)
        given = dict(softmax_scale=scaling, sinks=s_aux, group=self.group, layout=self._layout)
        if ranks > 1:
            query = self._tuned(module, query)
        tensors = tuple(x.transpose(1, 2) for x in _autocast(query, key, value))
        if lengths[0] != lengths[1]:
            return self._cross(tensors, given, softcap, dropout), None
        given.update(causal=mask.causal, window=mask.window, softcap=softcap or 0.0, dropout_p=dropout)
        if mask.slices is not None:
            given["slices"] = mask.frozen
        left_out = ("documents", "cu_seqlens") + (() if getattr(module, "training", True) else ("dropout_p",))
        given.update((name, value) for name, value in self._arguments.items() if name not in left_out)
        if self._seqlen is not None and is_compiling():
            given["seqlen"] = self._seqlen
        return attention(*tensors, documents=documents, **given), None

    def _mask(self, given, lengths, is_causal, sliding_window, ranks):
        """Returns the Mask of transformers' attention_mask. Without one, is_causal alone decides."""
        if isinstance(given, masks.Mask):
            mask = given
        elif given is None:
            mask = masks.Mask(lengths, bool(is_causal))
            if lengths[0] != lengths[1] and is_causal:
                mask = masks.Mask(lengths, refusal=masks.CACHE % lengths)
        elif not isinstance(given, torch.Tensor):
            raise ValueError("attention_mask: it must be a tensor or None; got a %s%s" %
                             (type(given).__name__, masks.INSTEAD))
        elif ranks > 1:
            raise ValueError("attention_mask: a tensor of the shape %s is not served over a group of ranks; "
                             "leave it out, and pack sequences with burst.register(group, documents=...)" %
                             (list(given.shape),))
        elif is_compiling():
            raise ValueError(masks.TRACED)
        else:
            mask = self._masks.of(masks.of_tensor, given, *lengths)
        if mask.refusal is not None:
            raise ValueError(mask.refusal)
        if mask.lengths != lengths:
            raise ValueError("attention_mask: the mask is for %d queries and %d keys, the attention has %d and "
                             "%d%s" % (*mask.lengths, *lengths, masks.INSTEAD))
        widest = (sliding_window or 0) + (not mask.causal)  # a mask to both sides may include both ends (T5Gemma)
        if (sliding_window and mask.slices is None and mask.window not in (sliding_window, widest) and
                (ranks > 1 or not _is_within(mask, widest))):
            raise ValueError("sliding_window: the layer has a window of %d, the mask that its model has made "
                             "one of %d%s" % (sliding_window, mask.window, masks.INSTEAD))
        plain = mask.slices is None and mask.documents is None and self._kept is None
        for name in ("causal", "window", "spans", "slices"):
            if self._arguments.get(name) is not None and not plain:
                raise ValueError("%s: it was registered, and the model's mask has padding, documents or "
                                 "blocks; leave one of them out" % name)
        return mask

    def _documents(self, mask, cu_seq_lens_q, cu_seq_lens_k, query, ranks):
        """Returns rows of document starts from the mask, the keywords and the registered arguments together."""
        bounds = self._bounds(cu_seq_lens_q, cu_seq_lens_k)
        if is_compiling() and self._is_read and mask.slices is None and not mask.chunk:
            if self._packed is None:
                return mask.packed
            if mask.packed is None and (ranks > 1 or self._arguments.get("cu_seqlens") is None):
                return self._packed
        registered = rows_of(self._arguments, query.shape[2] if ranks == 1 else None)
        if bounds is not None:
            if query.shape[0] != 1:
                raise ValueError("cu_seq_lens_q: packed sequences must be a batch of 1; got %d rows" %
                                 query.shape[0])
            if ranks == 1 and bounds[-1] != query.shape[2]:
                raise ValueError("cu_seq_lens_q: it must end with the number of tokens, %d; got %d" %
                                 (query.shape[2], bounds[-1]))
            registered = _meet(registered, rows_of({"cu_seqlens": bounds}))
        if mask.slices is None:
            return _meet(mask.documents, registered)
        if registered is not None and not all(_are_within(mask.slices, row) for row in registered):
            raise ValueError("documents: must be left out with a mask that has padding or blocks")
        return None

    def _check_rope(self, module, position_ids, n, documents, ranks):
        """Checks that this rank's part has the frequencies of the whole sequence, where they depend on its length."""
        for kind, limit in models.rope_limits(getattr(module, "config", None)):
            whole = self._arguments.get("seqlen") or n * ranks
            if position_ids is None:
                position_ids = self.own if self.own is not None else self._positions.own(n)
            restarts = (documents is not None and position_ids is not None and position_ids.dim() == 2 and
                        not is_compiling() and self._packings.of(starts_again, position_ids))
            if restarts:
                whole = max(end - begin for row in documents for begin, end in zip(row, (*row[1:], whole)))
            if whole <= limit:
                continue
            text = ("rope_type: must not depend on the length over a group, unless each rank's part gives the same "
                    "frequencies; got %s with %d tokens, above %d; use a group of one rank" % (kind, whole, limit))
            if position_ids is None:
                raise ValueError(text)
            least = limit + 1 if kind == "longrope" else whole
            if is_compiling():
                masks.require_in_graph(position_ids.max() + 1 >= least, text)
            elif self._ends.of(_end_of, position_ids) < least:
                raise ValueError(text)

    def _without_padding(self, causal, window, chunk, documents):
        """Returns the Mask that one process has: padding's keys are hidden, and chunks begin after left padding."""
        key = causal, window, chunk
        if key not in self._shown:
            if is_compiling():
                raise ValueError(masks.TRACED)
            if chunk:
                documents = self._chunks(documents, chunk, self._kept.long().argmax(1).tolist())
            self._shown[key] = masks.of_padding(causal, window, documents, self._kept)
        if self._shown[key].refusal is not None:
            raise ValueError(self._shown[key].refusal)
        return self._shown[key]

    def _chunks(self, documents, chunk, firsts=(0,)):
        """Returns documents that start at every chunk of the sequence, or of each of its documents (Llama 4).

        firsts: the tokens, by row, from which the chunks of a sequence are counted."""
        seqlen = self._arguments.get("seqlen")
        if seqlen is None and self._arguments.get("cu_seqlens") is not None:
            seqlen = bounds_of(self._arguments["cu_seqlens"])[-1]
        if seqlen is None:
            raise ValueError("seqlen: must be registered for chunked attention over a group; got None; pass "
                             "burst.register(group, seqlen=...)")
        restarts = masks.chunks_restart()
        rows, documents = [], documents or ((0,),)
        for i in range(max(len(documents), len(firsts))):
            first = firsts[i % len(firsts)]
            starts = sorted({0, *documents[i % len(documents)], *([first] if restarts else [])})
            cuts = [range(begin if restarts else begin + (first - begin) % chunk, end, chunk)
                    for begin, end in zip(starts, starts[1:] + [seqlen])]
            rows.append(tuple(sorted({*starts}.union(*cuts))))
        return tuple(rows)

    def _tuned(self, module, query):
        """Returns Llama 4's queries, whose scale depends on their positions, where the model took a rank's tokens for
        the first ones of a sequence."""
        if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
            return query
        own = self.own if self.own is not None else self._positions.own(query.shape[2])
        if own is None:
            raise ValueError("seqlen: must be registered for this model over a group, because its queries' scale depends "
                             "on positions; got None; pass burst.register(group, seqlen=...)")

        def scale(at):
            return torch.log1p(torch.floor((at.float() + 1) / module.floor_scale)) * module.attn_scale + 1

        at = torch.arange(query.shape[2], device=query.device)
        return (query * (scale(own.to(query.device)) / scale(at))[:, None]).to(query.dtype)

    def _bounds(self, of_queries, of_keys):
        if of_queries is None and of_keys is None:
            return None
        if of_queries is None or of_keys is None:
            raise ValueError("cu_seq_lens_q: it must be given with cu_seq_lens_k; got one of them")
        if is_compiling():
            raise ValueError("cu_seq_lens_q: must be left out where a model or its layers are compiled; pass packed "
                             "position_ids to compiled layers")

        def read(given):
            return self._lengths.of(bounds_of, given) if isinstance(given, torch.Tensor) else bounds_of(given)

        bounds = read(of_queries)
        if of_keys is not of_queries and bounds != read(of_keys):
            raise ValueError("cu_seq_lens_k: it must be equal to cu_seq_lens_q" + masks.INSTEAD)
        if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in zip(bounds, bounds[1:])):
            raise ValueError("cu_seq_lens_q: it must begin with 0 and not decrease; got %s" % (bounds,))
        return bounds

    def _check_packing(self, position_ids):
        """Checks that the mask knows of all packed documents, because some models do not tell it."""
        if position_ids is not None and position_ids.dim() == 2:
            check_rising(position_ids)

    def _cross(self, tensors, given, softcap, dropout):
        """Computes attention of one sequence's queries to all keys of another."""
        for name, value in (("softcap", softcap), ("dropout", dropout)):
            if value:
                raise ValueError("%s: it must be 0 in a cross-attention; got %s%s" %
                                 (name, value, masks.INSTEAD))
        known = set(inspect.signature(cross_attention).parameters) - {"causal", "window", "cu_seqlens", "slices"}
        for name, value in self._arguments.items():
            if name not in known:
                raise ValueError("%s: it was registered, and a cross-attention does not have it" % name)
        return cross_attention(*tensors, **{**given, **self._arguments})


def _autocast(*tensors):
    """Returns the tensors in autocast's dtype, as torch's own attention does. RoPE leaves q and k in float32."""
    kind = tensors[0].device.type
    if hasattr(torch, "get_autocast_dtype"):
        is_on, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    elif kind == "cuda":  # before torch 2.4
        is_on, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
    else:
        is_on, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
    if not is_on:
        return tensors
    return tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)


def _is_within(mask, window):
    """Returns whether a layer's window hides nothing that a model's mask shows."""
    if mask.window:
        return mask.window <= window
    n = mask.lengths[0]
    return all(end - begin <= window for row in mask.documents or ((0,),) for begin, end in zip(row, (*row[1:], n)))


def _end_of(position_ids):
    return int(position_ids.max()) + 1 if position_ids.numel() else 0


def _check_others(others):
    for name, value in others.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        if name == "position_bias":
            raise ValueError("position_bias: nothing is added to logits here" + masks.INSTEAD)
        if name == "output_attentions":
            raise ValueError("output_attentions: weights are not kept; use attn_implementation='eager'")
        raise ValueError("%s: this keyword of the model's attention is not known here, and might change "
                         "what it computes%s" % (name, masks.INSTEAD))
