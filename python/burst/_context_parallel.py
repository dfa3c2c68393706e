"""burst.context_parallel: sequences of a Trainer (transformers, TRL) or of an Accelerator spread over ranks."""

import contextlib
import inspect
from typing import Any, Dict, Mapping, Optional

import torch
from torch import Tensor

from . import _ranks
from . import _transformers_models as models
from ._arguments import shown
from ._transformers import Served, check_arguments, check_version, put
from ._transformers_positions import check_rising, rows_of
from .layout import positions

_LAYOUTS = ("zigzag", "contiguous", "striped")  # in which tokens do not depend on a layer's mask
_IGNORED = -100  # the label of a token without a loss
_OF_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
# The keywords that have a value for each token, with what to do where a value has another form.
_OF_TOKENS = {"input_ids": "pass whole rows as a tensor", "inputs_embeds": "pass whole rows as a tensor",
              "labels": "pass whole rows as a tensor", "shift_labels": "pass whole rows as a tensor",
              "attention_mask": "leave it out, and pack documents",
              "position_ids": "leave it out, because positions of images (mRoPE) are not served"}
_NUMBER = 0  # of implementations that were registered


class ContextParallel:
    """What burst.context_parallel returns. group (ProcessGroup): the ranks that share sequences, or None."""

    def __init__(self, group: Any, layout: str, arguments: Dict[str, Any]) -> None:
        global _NUMBER
        self.group, self._layout, self._arguments = group, layout, dict(arguments)
        _NUMBER += 1
        self.name = "burst_context_parallel_%d" % _NUMBER
        self._served, self._checked = Served(group, layout, self._arguments, self.name), False
        put(self.name, self._served)

    def attach(self, model: torch.nn.Module) -> None:
        """Makes a model of transformers attend over the group.

        Raises ValueError for a model whose layers or whose loss need the whole sequence on a rank.
        """
        base = _base(model)
        _check_model(base)
        self._served.windows = {0, getattr(base.config.get_text_config(), "sliding_window", None) or 0}
        base.set_attn_implementation(self.name)

    def shard(self, batch: Mapping[str, Any], factor: float = 1.0) -> Dict[str, Any]:
        """Returns this rank's part of a batch of whole sequences, equal on all ranks of the group.

        Args:
            batch (dict): input_ids [rows, tokens]; optional: labels, attention_mask, position_ids, cu_seq_lens_q and
                others of transformers' keywords. Without a mask, positions that do not follow one another are packed
                documents, as in one process; so are the bounds in cu_seq_lens_q.
            factor (float): what the caller multiplies the model's loss by before DDP or FSDP take the mean.

        Returns:
            dict: keywords of the model. shift_labels has the labels, shifted. With num_items_in_batch, the mean of the
            ranks' losses is the mean over all labels.

        Raises:
            ValueError: the batch is not served, and the text names what; or it differs between ranks.
        """
        batch = dict(batch)
        first = _checked(batch)
        rows, n = first.shape[:2]
        documents, kept = (None, None) if self.group is None else _documents(batch)  # one rank has the model's own mask
        at = batch.get("position_ids")
        if at is None:
            batch["position_ids"] = torch.arange(n, device=first.device).expand(rows, n)
        if batch.get("labels") is not None and batch.get("shift_labels") is None:
            batch["shift_labels"] = torch.nn.functional.pad(batch["labels"], (0, 1), value=_IGNORED)[:, 1:]
        if batch.get("shift_labels") is not None and batch.get("num_items_in_batch") is None:
            count = (batch["shift_labels"] != _IGNORED).sum().clamp(min=1)
            batch["num_items_in_batch"] = count * factor / _ranks.size_of(self.group)
        self._check_equal(first)
        own = positions(n, self.group, self._layout, first.device)
        self._served.update(kept, seqlen=n, documents=documents)
        self._served.own = own
        batch.setdefault("use_cache", False)
        return {name: value[:, own] if _is_of_tokens(value, rows, n) else value for name, value in batch.items()}

    def check_used(self) -> None:
        """Raises ValueError if the model has not called this attention since it was attached."""
        if not self._served.used:
            raise ValueError("model: must use transformers' attention interface; its layers did not call the "
                             "implementation %r; use a model with _supports_attention_backend" % self.name)

    def _check_equal(self, first):
        """Raises ValueError on all ranks if their first batches differ, because their loader does not know the group."""
        if self._checked or self.group is None:
            return
        weights = torch.arange(1, first.numel() + 1, device=first.device, dtype=torch.float64)
        total = torch.stack([(first.flatten().double() * weights).sum(), torch.tensor(first.numel()).to(weights)])
        least, most = total.clone(), total.clone()
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=self.group)
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=self.group)
        if not torch.equal(least, most):
            raise ValueError("batch: must be equal on all ranks of the group; got others; prepare the DataLoader with "
                             "the Accelerator, after burst.context_parallel")
        self._checked = True


def _is_of_tokens(value, rows, n):
    return isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] in (1, rows) and value.shape[1] == n


def _checked(batch):
    """Returns the tensor of a batch's tokens. Raises ValueError for a batch that cannot be cut."""
    first = next((name for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None), None)
    if first is None:
        raise ValueError("input_ids: must be in the batch; got %s" % sorted(batch))
    whole = getattr(batch[first], "shape", ())[:2]
    for name, instead in _OF_TOKENS.items():
        value, dims = batch.get(name), 3 if name == "inputs_embeds" else 2
        allowed = (whole, (1, *whole[1:])) if name == "position_ids" else (whole,)
        if value is not None and not (isinstance(value, Tensor) and value.dim() == dims and value.shape[:2] in allowed):
            raise ValueError("%s: must be a tensor [rows, tokens%s] like %s; got %s; %s" % (
                name, ", hidden" if dims == 3 else "", first, shown(value), instead))
    for name, value in batch.items():
        if name.startswith("pixel_values") and value is not None:
            raise ValueError("%s: must be left out, because the tokens of an image may be on several ranks; got %s; "
                             "pass inputs_embeds, with the images in them" % (name, shown(value)))
    return batch[first]


def _documents(batch):
    """Takes the keywords of whole sequences out of a batch. Returns rows of document starts, and bool [rows, tokens]
    that is false at padding; each may be None. As in one process, a mask decides before positions do."""
    mask, bounds, at = batch.pop("attention_mask", None), batch.get("cu_seq_lens_q"), batch.get("position_ids")
    for name in _OF_WHOLE:
        batch.pop(name, None)
    found = None if bounds is None else rows_of({"cu_seqlens": bounds})
    if mask is None:
        starts = None if at is None or found is not None else (at[:, 1:] != at[:, :-1] + 1).cpu()
        if starts is not None and bool(starts.any()):
            found = tuple((0, *(row.nonzero()[:, 0] + 1).tolist()) for row in starts)
        return found, None
    if not bool(mask.all()):
        return found, mask.bool().cpu()
    if at is not None and found is None:
        check_rising(at)
    return found, None


def _base(model):
    """Returns the model of transformers inside adapters and wrappers."""
    while not hasattr(model, "set_attn_implementation"):
        inner = next((getattr(model, name) for name in ("module", "_orig_mod", "base_model", "model")
                      if isinstance(getattr(model, name, None), torch.nn.Module)), None)
        if inner is None:
            raise ValueError("model: must be one of transformers; got a %s" % type(model).__name__)
        model = inner
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_model(model):
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    config = model.config.get_text_config()
    name, others = type(model).__name__, models.other_layers(config)
    if others or getattr(model, "_is_stateful", False):
        raise ValueError("model: layers must be attention; got %s with %s, which need the whole sequence on a rank" %
                         (name, ", ".join(others) or "a state"))
    is_known = (getattr(model, "loss_type", None) in LOSS_MAPPING or  # without a type, transformers' default is called
                "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names)
    if not is_known or model.loss_function is not ForCausalLMLoss:
        raise ValueError("model: must have transformers' loss of causal language models; got %s" % name)
    if getattr(config, "output_router_logits", False):
        raise ValueError("output_router_logits: must be False, because the routers' loss is not a sum over tokens; got "
                         "True; set it in the model's config")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError("model: must take position_ids; got %s, which counts tokens itself" % name)
    if models.first_position(model, config):
        raise ValueError("model: its positions must begin at 0; got %s, whose positions begin at %d; use burst.register" %
                         (name, models.first_position(model, config)))


def context_parallel(trainer: Any, size: Optional[int] = None, layout: str = "zigzag",
                     **arguments: Any) -> ContextParallel:
    """Spreads every sequence of a Trainer over ranks, for models that accelerate's context parallelism refuses, too:

        trainer = Trainer(model, args, train_dataset=...)      # or TRL's SFTTrainer
        burst.context_parallel(trainer)
        trainer.train()

    Sinks (gpt-oss), windows (Mistral, Gemma 3), chunks (Llama 4), packed documents and padding keep their meaning.
    Batches, positions, labels and the loss are cut inside. Ranks of a group get the same batches; other groups get
    others. Losses and gradients equal one process's, under DDP and FSDP2.

    Args:
        trainer (Trainer or Accelerator): before train(), or before prepare(). With an Accelerator, the caller passes
            each batch through the result's shard().
        size (int): ranks that share a sequence. Default: accelerate's cp_size, else all ranks.
        layout (str): "zigzag", "contiguous" or "striped".
        arguments: other arguments of burst.attention, such as strategy and deterministic.

    Raises:
        ImportError: transformers is older than 4.57, or accelerate is missing.
        ValueError: an argument, a model or an option of the trainer is not served; the text names it.
    """
    check_version("context_parallel")
    check_arguments("context_parallel", arguments)
    for name in ("documents", "cu_seqlens", "seqlen"):
        if name in arguments:
            raise ValueError("%s: must be left out of context_parallel, which finds it in each batch" % name)
    if layout not in _LAYOUTS:
        raise ValueError("layout: must be one of %s; got %r" % (", ".join(_LAYOUTS), layout))
    accelerator = getattr(trainer, "accelerator", trainer)
    if not hasattr(accelerator, "parallelism_config"):
        raise ImportError("context_parallel: accelerate must be 1.10 or newer and transformers 4.57 or newer; upgrade "
                          "them") if hasattr(accelerator, "prepare") else TypeError(
                              "trainer: must be a Trainer or an Accelerator; got a %s" % type(trainer).__name__)
    parallel = ContextParallel(_group_of(accelerator, size), layout, arguments)
    accelerator._prepare_cp = lambda *objects: _prepared(parallel, objects)
    accelerator.maybe_context_parallel = _refuse_buffers
    if trainer is not accelerator and parallel.group is not None:
        _take_over(trainer, parallel)
    return parallel


def _prepared(parallel, objects):
    for model in objects:
        if isinstance(model, torch.nn.Module):
            parallel.attach(model)
    return objects


def _refuse_buffers(*_, **__):
    raise ValueError("maybe_context_parallel: must not be used with burst.context_parallel; pass the batch through its "
                     "result's shard()")


def _group_of(accelerator, size):
    """Returns the ProcessGroup of the ranks that share a sequence, or None for one process. Tells accelerate of them."""
    ranks, config = accelerator.num_processes, accelerator.parallelism_config
    given = config.cp_size if config is not None and config.cp_size > 1 else None
    size = size or given or ranks
    if given not in (None, size) or ranks % size:
        raise ValueError("size: must divide the %d processes and be accelerate's cp_size, if it has one; got %d%s" %
                         (ranks, size, "" if given is None else " with cp_size=%d" % given))
    if size == 1:
        return None
    if given is None:
        if config is not None and config.tp_size * config.sp_size > 1:
            raise ValueError("parallelism_config: must have cp_size with tp_size or sp_size; got %s" % config)
        from accelerate.utils import ParallelismConfig
        config = ParallelismConfig(cp_size=size)
        for name in ("tp_size", "sp_size"):
            setattr(config, name, 1)
        config._set_size("dp_shard" if accelerator.is_fsdp2 else "dp_replicate", ranks // size)
        accelerator.state.parallelism_config = config
        accelerator.state.device_mesh = config.get_device_mesh(accelerator.device.type)
    config.cp_backend = "burst"
    return accelerator.torch_device_mesh["cp"].get_group()


_NOT_SERVED = {"label_smoother": "label_smoothing_factor: must be 0", "compute_loss_func": "compute_loss_func: must be None",
               "compute_metrics": "compute_metrics: must be None"}


def _gather_of_groups(accelerator, group):
    """Returns accelerate's gather_for_metrics for values that are equal on the ranks of a group: one of each group."""
    first = torch.tensor([torch.distributed.get_process_group_ranks(group)[0]], device=accelerator.device)
    firsts = sorted(set(accelerator.gather(first).tolist()))

    def gather_for_metrics(input_data, use_gather_object=False):
        values = accelerator.gather(input_data)
        values = values.unflatten(0, (accelerator.num_processes, -1))[firsts].flatten(0, 1)
        state = accelerator.gradient_state
        return values[:state.remainder] if state.end_of_dataloader and state.remainder > 0 else values

    return gather_for_metrics


def _take_over(trainer, parallel):
    """Makes a Trainer compute its loss of this rank's part of each batch."""
    for name, rule in _NOT_SERVED.items():
        if getattr(trainer, name, None) is not None:
            raise ValueError("%s, because it needs the logits of whole sequences; got %r; leave it out" %
                             (rule, getattr(trainer, name)))
    if not trainer.model_accepts_loss_kwargs:
        raise ValueError("trainer: its model must take num_items_in_batch; got %s" % type(trainer.model).__name__)
    parallel.attach(trainer.model)
    compute = trainer.compute_loss

    def compute_loss(model, inputs, return_outputs=False, num_items_in_batch=None):
        scaled = getattr(trainer.args, "average_tokens_across_devices", False)
        local = parallel.shard(inputs, trainer.accelerator.num_processes if scaled else 1.0)
        own_count = local.pop("num_items_in_batch", None)
        found = compute(model, local, return_outputs=return_outputs,
                        num_items_in_batch=own_count if num_items_in_batch is None else num_items_in_batch)
        parallel.check_used()
        if torch.is_grad_enabled():
            return found
        loss = (found[0] if return_outputs else found).detach().clone()  # of an evaluation, which takes it as it is
        torch.distributed.all_reduce(loss, group=parallel.group)
        loss /= _ranks.size_of(parallel.group)
        return (loss, *found[1:]) if return_outputs else loss

    predict = trainer.prediction_step

    def prediction_step(model, inputs, prediction_loss_only, *more, **others):
        if not prediction_loss_only:
            raise ValueError("prediction_loss_only: must be True, because a rank has the logits of its tokens only; got "
                             "%r; set it in the trainer's arguments, and do not call predict()" % prediction_loss_only)
        return predict(model, inputs, prediction_loss_only, *more, **others)

    trainer.compute_loss, trainer.prediction_step = compute_loss, prediction_step
    trainer.accelerator.gather_for_metrics = trainer.gather_function = _gather_of_groups(trainer.accelerator, parallel.group)
    trainer._prepare_context_parallel_inputs = lambda model, inputs: (contextlib.nullcontext, inputs)
