"""Types of arguments that several functions share, for annotations."""

from typing import TYPE_CHECKING, Any, Sequence, Tuple, Union

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
