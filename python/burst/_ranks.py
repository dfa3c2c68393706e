"""Devices, and the ranks of a torch.distributed group as Burst's own communicator."""

import atexit
import ctypes
import os
import socket
import threading
from typing import Optional, Union

import torch

from . import _library
from ._cache import Bounded
from ._library import UniqueId, check, create, library
from ._types import Group

_ATTENTIONS = 64  # objects of the library for a group, one for each set of options
_SCHEDULE_BYTES = 8 << 20
_AGREED_BYTES = 1 << 20
# Whether torch.compile traces. Older versions of torch do not tell.
is_compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


def _raw_stream(index):
    """Returns torch's current stream of a GPU as a number, without making an object of it if torch can."""
    try:
        return torch._C._cuda_getCurrentRawStream(index)
    except AttributeError:
        return torch.cuda.current_stream(index).cuda_stream


def refuse_capture():
    """Raises a BurstError while a CUDA graph is captured, before anything breaks the capture and leaves torch's
    generators in it."""
    if torch.cuda.is_current_stream_capturing():
        raise _library.BurstError(
            "attention cannot be captured in a CUDA graph: its ranks talk through the host, and its memory "
            "comes and goes; leave it out of the graph")


class _TorchMemory:
    """Memory of a GPU from torch's caching allocator, for the library's workspace.

    `used` is the stream of the library's last work. A block goes back when this work is done."""

    def __init__(self, device):
        self._device, self._blocks, self.used = device, {}, 0
        options = _library.ContextOptions
        self.allocate, self.release = options.ALLOCATE(self._take), options.RELEASE(self._free)

    def _take(self, size, _):
        try:
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
        except Exception:  # out of memory: the library says so
            return None
        data = block.data_ptr()
        self._blocks[data] = (block, _raw_stream(self._device.index))
        return data

    def _free(self, data, _):
        block, stream = self._blocks.pop(data)
        if self.used != stream:
            block.record_stream(torch.cuda.ExternalStream(self.used, device=self._device))


class Device:
    """A context of the library, bound to a torch.device and to its current stream. Each group has one,
    because threads that work for different groups must not wait for each other."""

    def __init__(self, device):
        if device is None:
            raise TypeError("none of q, k and v is a torch.Tensor")
        if device.type not in ("cpu", "cuda"):
            raise ValueError("q is on %s; Burst knows cpu and cuda" % device)
        self.device, self._stream, self._threads, self._memory = device, None, None, None
        options = _library.ContextOptions(struct_bytes=ctypes.sizeof(_library.ContextOptions))
        if device.type == "cuda":
            self._memory = memory = _TorchMemory(device)
            options.device, options.index = 1, device.index
            options.allocate, options.release = memory.allocate, memory.release
        self.handle = create("context", ctypes.byref(options), keeps=self._memory)
        self.lock = threading.RLock()

    def enter(self):
        """Prepares a call: its work goes to torch's current stream, or to torch's number of threads."""
        if self.device.type == "cuda":
            stream = _raw_stream(self.device.index)
            if stream != self._stream:
                check(library().burst_context_set_stream(self.handle.value, stream))
                self._stream = self._memory.used = stream
        else:
            threads = torch.get_num_threads()
            if threads != self._threads:
                check(library().burst_context_set_threads(self.handle.value, threads))
                self._threads = threads


class Ranks:
    """The ranks that share a sequence; one rank has no communicator."""

    def __init__(self, device, group=None, timeout=None):
        self.group, self.rank, self.size, self.comm = group, 0, 1, None
        self.is_forked = False  # in the process that made it, not in a fork's child
        if group is not None:
            self.rank, self.size = torch.distributed.get_rank(group), _size(group)
        if self.size > 1:
            self._connect(device, timeout)
        else:
            self.device = Device(device)
        self._forget()
        self._buffers = {}  # of exchange, by length

    def _forget(self):
        # All ranks have the same entries here, because only calls of all ranks change them.
        self.attentions, self.agreed = Bounded(_ATTENTIONS), Bounded(_AGREED_BYTES)
        self.schedules = Bounded(_SCHEDULE_BYTES)

    def _connect(self, device, timeout):
        group, dist = self.group, torch.distributed
        error = None
        try:
            self.device = Device(device)
        except Exception as raised:  # the others are told
            error = raised
        place = (socket.gethostname(), _network(), None if error else device.type, error and str(error))
        places = [None] * self.size
        dist.all_gather_object(places, place, group=group)
        if error is not None:
            raise error
        for rank, (_, _, _, text) in enumerate(places):
            if text is not None:
                raise ValueError("rank %d: %s" % (rank, text))
        kinds = sorted({kind for _, _, kind, _ in places})
        if len(kinds) > 1:
            raise ValueError("q is on %s; the ranks of the group must use one kind of device" %
                             " on one rank and on ".join(kinds))
        one_host = len({(host, network) for host, network, _, _ in places}) == 1
        unique_id = self._unique_id(None if one_host else _own_address)
        seconds = _timeout(group) if timeout is None else timeout
        with self.device.lock:
            self.device.enter()
            self.comm = create("comm", self.device.handle.value, ctypes.byref(unique_id),
                               self.rank, self.size, seconds, keeps=self.device.handle)

    def _unique_id(self, address):
        """Returns the id that rank 0 makes. address is a function that finds rank 0's address, or None on one host."""
        message, unique_id = [None], UniqueId()
        if self.rank == 0:
            try:
                check(library().burst_unique_id_create(address and address().encode(),
                                                       ctypes.byref(unique_id)))
                message[0] = bytes(unique_id)
            except Exception as error:  # the others must not wait for an id
                message[0] = str(error)
        torch.distributed.broadcast_object_list(message, src=_global_rank(self.group, 0), group=self.group)
        if isinstance(message[0], str):
            raise _library.BurstError("rank 0 cannot listen: " + message[0])
        return UniqueId.from_buffer_copy(message[0])

    def exchange(self, mine):
        """Returns the bytes of all ranks, in order of rank. All have the same length. Collective."""
        length = len(mine)
        if length not in self._buffers:  # the buffers of the last length are kept
            self._buffers = {length: (ctypes.create_string_buffer(length),
                                      ctypes.create_string_buffer(length * self.size))}
        sent, received = self._buffers[length]
        sent.raw = mine
        check(library().burst_comm_all_gather(self.comm.value, sent, length, received))
        everything = received.raw
        return [everything[rank * length:(rank + 1) * length] for rank in range(self.size)]

    def check_not_forked(self):
        if self.is_forked:
            raise _library.BurstError(
                "this process was forked from a rank of the group, and is not a rank itself: call "
                "attention in the parent, or in a process that was spawned")

    def fail(self, reason):
        """Tells the other ranks that this one cannot go on."""
        if self.comm is not None:
            library().burst_comm_abort(self.comm.value, str(reason).encode(errors="replace"))

    def close(self):
        if self.comm is not None and not self.is_forked:
            with self.device.lock:  # at once, even if a graph or a traceback still holds an attention
                library().burst_comm_finish(self.comm.value)
        self._forget()
        self.comm = None


def _size(group):
    return torch.distributed.get_world_size(group)


def _global_rank(group, rank):
    if group is torch.distributed.group.WORLD:
        return rank
    if hasattr(torch.distributed, "get_global_rank"):
        return torch.distributed.get_global_rank(group, rank)
    return torch.distributed.distributed_c10d._get_global_rank(group, rank)


def _network():
    """Returns a text that differs for hosts and containers with different loopbacks."""
    try:
        # Ranks of one host meet in a folder, which both must see.
        spaces = [os.readlink("/proc/self/ns/" + kind) for kind in ("net", "mnt")]
        return "".join(spaces) + open("/proc/sys/kernel/random/boot_id").read()
    except OSError:
        return ""


def _own_address():
    """Returns the address at which others reach this host: $BURST_ADDRESS, or the one that leads to the master."""
    if os.environ.get("BURST_ADDRESS"):
        return os.environ["BURST_ADDRESS"]
    master = os.environ.get("MASTER_ADDR", "")
    for target in (master, "192.0.2.1"):  # the second is any address outside
        try:
            family, _, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:  # connecting sends nothing
                probe.connect(place)
                address = probe.getsockname()[0]
            if not address.startswith("127.") and address != "::1":
                return address
        except OSError:
            continue
    raise _library.BurstError(
        "this host's address is not known; set BURST_ADDRESS to one that the other hosts reach")


def _timeout(group):
    """Returns the group's own timeout in seconds, or torch's default of half an hour."""
    candidates = [lambda: group._get_backend(torch.device("cpu")).options._timeout,
                  lambda: group._get_backend(torch.device("cuda")).options._timeout,
                  lambda: group.options._timeout]
    for candidate in candidates:
        try:
            return candidate().total_seconds()
        except Exception:  # another version of torch keeps it elsewhere
            continue
    return 1800.0


_ranks = {}  # by the process group (None: alone) and the device


def ranks_of(group, device, timeout=None):
    """Returns the Ranks of a process group, or of None, for a torch.device. The first call with a group is
    collective. With device None it returns any Ranks of the group, to tell them of an error."""
    key = (group, device and device.type, device and device.index)
    found = _ranks.get(key)
    if found is None and device is None:
        found = next((ranks for ranks in list(_ranks.values()) if ranks.group is group), None)
    if found is None:  # no lock: threads that connect different groups must not wait for each other
        found = _ranks.setdefault(key, Ranks(device, group, timeout))
    elif timeout is not None:
        raise ValueError("group: its ranks are connected already; burst.disconnect(group) comes first")
    if found.is_forked:
        found.check_not_forked()
    return found


def _after_fork_in_child():
    """Tells groups that their ranks are in the parent. A child alone works like any process."""
    for key, ranks in list(_ranks.items()):
        ranks.is_forked = True
        if ranks.size == 1:
            del _ranks[key]


os.register_at_fork(after_in_child=_after_fork_in_child)


def process_group(group):
    """Returns the ProcessGroup of a group, which may be a one-dimensional DeviceMesh, or None."""
    if group is None:
        return None
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError("group: a mesh of %d dimensions; take one of them" % group.ndim)
        group = group.get_group()
    if not torch.distributed.is_initialized():
        raise ValueError("group: torch.distributed is not initialized")
    if torch.distributed.get_rank(group) < 0:
        raise ValueError("group: this process is not in it")
    return group


def size_of(group):
    """Returns the number of ranks of a group or a DeviceMesh. None has one."""
    return 1 if group is None else _size(process_group(group))


def name_of(group):
    """Returns the name by which torch's processes know a group (torch >= 2.4)."""
    return torch.distributed.distributed_c10d._get_process_group_name(group)


def group_of_name(name):
    try:
        return process_group(torch.distributed.distributed_c10d._resolve_process_group(name))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError("group: the program was made for the group %r, which this process does not have "
                         "(%s)" % (name, error)) from None


def connect(group: Optional[Group], device: Union[torch.device, str],
            timeout: Optional[float] = None) -> None:
    """Connects the ranks of a group now instead of in the first call. Collective.

    Args:
        group (ProcessGroup or DeviceMesh): the ranks.
        device (torch.device): the device of the tensors.
        timeout (float): seconds that ranks wait for one another, then and later. Default: the group's
            own timeout.

    Raises:
        ValueError: the ranks are connected already, or use different kinds of devices.
        BurstError: a rank could not connect. RankLostError: a rank did not come in time.
    """
    ranks_of(process_group(group), torch.empty(0, dtype=torch.uint8, device=device).device, timeout)


def disconnect(group: Optional[Group] = None) -> None:
    """Frees what Burst keeps for a group. The group itself is not changed.

    Backward passes of earlier calls are then refused. A program does it automatically at its end.

    Args:
        group (ProcessGroup or DeviceMesh): None: all groups.
    """
    group = process_group(group)
    for key in list(_ranks):
        if group is None or _ranks[key].group is group:
            _ranks.pop(key).close()


atexit.register(disconnect)
