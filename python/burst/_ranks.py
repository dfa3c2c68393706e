"""Devices, and the ranks of a torch.distributed group as Burst's own communicator."""

import atexit
import ctypes
import os
import socket
import threading

import torch

from . import _library
from ._library import UniqueId, check, create, library

_MESSAGE_BYTES = 768  # what ranks tell each other before a call


def _raw_stream(index):
    """torch's current stream of a GPU, a number; without making an object of it where torch can."""
    try:
        return torch._C._cuda_getCurrentRawStream(index)
    except AttributeError:
        return torch.cuda.current_stream(index).cuda_stream


class _TorchMemory:
    """Memory of a GPU from torch's caching allocator, for the library's workspace.

    `used` is the stream on which the library has worked last: a block goes back when that is done."""

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
    """A context of the library, bound to a torch.device and to its current stream. One for each group:
    threads that work for different groups must not wait for each other."""

    def __init__(self, device):
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
        self.tensors = {count: _library.Tensors(count) for count in (1, 5, 9, 10)}  # of a call

    def enter(self):
        """Before a call: work goes to torch's current stream, or to torch's number of threads."""
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
        self.device, self.group = Device(device), group
        self.rank, self.size, self.comm = 0, 1, None
        if group is not None:
            self.rank, self.size = torch.distributed.get_rank(group), _size(group)
        if self.size > 1:
            self._connect(timeout)
        self.attentions, self.states, self.agreed = {}, {}, {}
        self._mine = ctypes.create_string_buffer(_MESSAGE_BYTES)
        self._all = ctypes.create_string_buffer(_MESSAGE_BYTES * self.size)

    def _connect(self, timeout):
        group, dist = self.group, torch.distributed
        place = (socket.gethostname(), _network(), self.device.device.type)
        places = [None] * self.size
        dist.all_gather_object(places, place, group=group)
        kinds = sorted({kind for _, _, kind in places})
        if len(kinds) > 1:
            raise ValueError("q is on %s; the ranks of the group must use one kind of device" %
                             " on one rank and on ".join(kinds))
        one_host = len({(host, network) for host, network, _ in places}) == 1
        message, unique_id = [None], UniqueId()
        if self.rank == 0:
            address = None if one_host else _own_address().encode()
            try:
                check(library().burst_unique_id_create(address, ctypes.byref(unique_id)))
                message[0] = bytes(unique_id)
            except Exception as error:  # the others must not wait for an id
                message[0] = str(error)
        dist.broadcast_object_list(message, src=_global_rank(group, 0), group=group)
        if isinstance(message[0], str):
            raise _library.BurstError("rank 0 cannot listen: " + message[0])
        unique_id = UniqueId.from_buffer_copy(message[0])
        seconds = _timeout(group) if timeout is None else timeout
        with self.device.lock:
            self.device.enter()
            self.comm = create("comm", self.device.handle.value, ctypes.byref(unique_id),
                               self.rank, self.size, seconds, keeps=self.device.handle)

    def exchange(self, text):
        """The texts of all ranks, in order of rank. Collective."""
        if self.size == 1:
            return [text]
        raw = text.encode(errors="replace")[:_MESSAGE_BYTES - 1]
        self._mine.raw = raw.ljust(_MESSAGE_BYTES, b"\0")
        check(library().burst_comm_all_gather(self.comm.value, self._mine, _MESSAGE_BYTES,
                                              self._all))
        return [self._all.raw[r * _MESSAGE_BYTES:(r + 1) * _MESSAGE_BYTES].rstrip(b"\0")
                .decode(errors="replace") for r in range(self.size)]

    def fail(self, reason):
        """Tells the other ranks that this one cannot go on."""
        if self.comm is not None:
            library().burst_comm_abort(self.comm.value, str(reason).encode(errors="replace"))

    def close(self):
        if self.comm is not None:  # at once, whoever still holds an attention: a graph, a traceback
            with self.device.lock:
                library().burst_comm_finish(self.comm.value)
        self.attentions, self.states, self.agreed, self.comm = {}, {}, {}, None


def _size(group):
    return torch.distributed.get_world_size(group)


def _global_rank(group, rank):
    if group is torch.distributed.group.WORLD:
        return rank
    if hasattr(torch.distributed, "get_global_rank"):
        return torch.distributed.get_global_rank(group, rank)
    return torch.distributed.distributed_c10d._get_global_rank(group, rank)


def _network():
    """Tells apart hosts, and containers, whose loopback is not the same."""
    try:
        return os.readlink("/proc/self/ns/net") + open("/proc/sys/kernel/random/boot_id").read()
    except OSError:
        return ""


def _own_address():
    """This host's address, as others reach it: $BURST_ADDRESS, or the one that leads to the master."""
    if os.environ.get("BURST_ADDRESS"):
        return os.environ["BURST_ADDRESS"]
    master = os.environ.get("MASTER_ADDR", "")
    for target in (master, "192.0.2.1"):  # the second: any address outside
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
    """The group's own timeout in seconds, or torch's default of half an hour."""
    candidates = [lambda: group._get_backend(torch.device("cpu")).options._timeout,
                  lambda: group._get_backend(torch.device("cuda")).options._timeout,
                  lambda: group.options._timeout]
    for candidate in candidates:
        try:
            return candidate().total_seconds()
        except Exception:  # another version of torch keeps it elsewhere
            continue
    return 1800.0


def size_of(group):
    return 1 if group is None else _size(_process_group(group))


_ranks = {}  # by the group's id (None: alone) and the device


def ranks_of(group, tensor, timeout=None):
    """The Ranks of a group (None, a ProcessGroup or a one-dimensional DeviceMesh) for a tensor's
    device. The first call with a group is collective."""
    if group is not None:
        group = _process_group(group)
    device = tensor.device
    key = (group and id(group), device.type, device.index)  # the group is kept, so its id is its own
    found = _ranks.get(key)
    if found is None:  # no lock: threads that connect different groups must not wait for each other
        found = _ranks.setdefault(key, Ranks(device, group, timeout))
    elif timeout is not None:
        raise ValueError("group: its ranks are connected already; burst.disconnect(group) comes first")
    return found


def _process_group(group):
    if hasattr(group, "get_group"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError("group: a mesh of %d dimensions; take one of them" % group.ndim)
        group = group.get_group()
    if not torch.distributed.is_initialized():
        raise ValueError("group: torch.distributed is not initialized")
    if torch.distributed.get_rank(group) < 0:
        raise ValueError("group: this process is not in it")
    return group


def connect(group, device, timeout=None):
    """Connects the ranks of a group now and not in the first call; collective.

    device: the torch.device of the tensors. timeout: seconds that ranks wait for one another, then
    and later; default: the group's own timeout.
    """
    ranks_of(group, torch.empty(0, device=device), timeout)


def disconnect(group=None):
    """Frees what Burst keeps for a group (None: for all of them). The group itself is not touched.
    Backwards of earlier calls are refused then. Done at the end of a program by itself."""
    if group is not None:
        group = _process_group(group)
    for key in list(_ranks):
        if group is None or _ranks[key].group is group:
            _ranks.pop(key).close()


atexit.register(disconnect)
