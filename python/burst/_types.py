"""Types of arguments that several functions share, for annotations."""

from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple, TypedDict, Union

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from .masks import Frozen

    Group = Union[ProcessGroup, DeviceMesh]  # a mesh has one dimension
    Slices = Union[Frozen, Sequence["Slice"], Sequence[Sequence["Slice"]]]
else:  # torch may lack both classes of groups, and masks.py imports this file
    Group = Slices = Any

Integers = Union[Sequence[int], Tensor]
Numbers = Union[Sequence[float], Tensor]
Documents = Union[Integers, Sequence[Integers]]  # one list of starts, or one for each row of the batch
Span = Tuple[int, int]  # (begin, end)
Spans = Union[Sequence[Span], Sequence[Sequence[Span]]]
Slice = Tuple[int, int, int, int, str]  # (q_begin, q_end, k_begin, k_end, kind)


class CrossOptions(TypedDict, total=False):
    """The keywords of cross_attention() that do not change the type of its result."""

    softmax_scale: Optional[float]
    group: Optional[Group]
    layout: str
    key_layout: Optional[str]
    ring_grad_dtype: Optional[torch.dtype]
    deterministic: bool
    strategy: str
    ulysses_size: int
    ranks_per_node: int
    backward: str
    sinks: Optional[Tensor]
    seqlen: Optional[int]
    causal: bool
    window: int
    cu_seqlens: Optional[Integers]
    key_cu_seqlens: Optional[Integers]
    slices: Optional[Slices]


class Options(TypedDict, total=False):
    """The keywords of attention() that do not change the type of its result."""

    causal: bool
    softmax_scale: Optional[float]
    window: int
    documents: Optional[Documents]
    cu_seqlens: Optional[Integers]
    group: Optional[Group]
    layout: str
    ring_grad_dtype: Optional[torch.dtype]
    deterministic: bool
    strategy: str
    ulysses_size: int
    ranks_per_node: int
    backward: str
    sinks: Optional[Tensor]
    seqlen: Optional[int]
    spans: Optional[Spans]
    slices: Optional[Slices]
    fp8: bool
    softcap: float
    alibi_slopes: Optional[Numbers]
    dropout_p: float
    dropout_seed: Union[int, Tensor, None]
