"""NCCL by itself: version, unique ids, and worlds over GPUs that are made by hand.

Experimental: training does not need this module, as `World.init()` chooses NCCL where possible. Use it for worlds that
no launcher created: all GPUs in one process, or processes that exchange a unique id themselves. It can be imported
anywhere; what needs NCCL or a GPU raises `NcclError` with the reason if there is none.

torch's process group API stands over one communicator and uses the functions of `torch.cuda.nccl`. They enqueue on the
device's current stream, so later computation is ordered after them and `wait` does nothing. What `torch.cuda.nccl`
lacks is called in the library that torch has loaded: sends, receives, and a way in. `torch.cuda.nccl.init_rank` raises
`SystemError` in Python 3.10 and later (torch 2.11; its arguments' format needs PY_SSIZE_T_CLEAN, which python_nccl.cpp
does not define).
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from torch._C._distributed_c10d import Work

from axon_nb.comm.errors import InvalidRankError, NcclError
from axon_nb.comm.torch_group import PythonProcessGroup, forget_group, register_group

_CAPSULE = b"torch.cuda.nccl.Communicator"
_LIBRARY = "libnccl.so.2"
_UINT8 = 1
"""ncclUint8, in nccl.h: all dtypes travel as bytes."""
Message = tuple[torch.Tensor, int]
"""A contiguous tensor and the rank that it goes to, or comes from."""
# ncclRedOp_t, in nccl.h
_NCCL_OPS = (
    (dist.ReduceOp.SUM, 0),
    (dist.ReduceOp.PRODUCT, 1),
    (dist.ReduceOp.MAX, 2),
    (dist.ReduceOp.MIN, 3),
)
Tensors = Sequence[torch.Tensor]


def unavailable_reason() -> str:
    """Return why NCCL cannot be used here; empty if it can."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} is built without NCCL; install a CUDA build, or use Backend.GLOO"
    if not torch.cuda.is_available():
        return "no CUDA device is visible; check CUDA_VISIBLE_DEVICES, or use Backend.GLOO"
    return ""


def is_available() -> bool:
    """Whether NCCL can be used here."""
    return not unavailable_reason()


def _require_nccl() -> None:
    if reason := unavailable_reason():
        raise NcclError(f"NCCL is unavailable: {reason}.")


def nccl_version() -> tuple[int, int, int]:
    """Return NCCL's version: major, minor, patch.

    Raises:
        NcclError: NCCL is unavailable.
    """
    _require_nccl()
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major), int(minor), int(patch)


def devices() -> list[str]:
    """Return the names of the visible CUDA devices, by index.

    Raises:
        NcclError: NCCL is unavailable.
    """
    _require_nccl()
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


class NcclUniqueId(Struct, frozen=True):
    """The id that all ranks of one NCCL world share; one rank generates it and sends it to the others."""

    data: bytes

    def to_text(self) -> str:
        """Encode as text, for an environment variable or a file."""
        return base64.b64encode(self.data).decode()

    @classmethod
    def from_text(cls, text: str) -> NcclUniqueId:
        """Decode the output of `to_text`.

        Raises:
            NcclError: `text` is not a unique id.
        """
        try:
            return cls(base64.b64decode(text, validate=True))
        except ValueError:
            raise NcclError(f"{text[:40]!r} is not a unique id; create one with `NcclUniqueId.to_text()`.") from None


class NcclBackend:
    """One rank of a hand-made NCCL world; pass it to `ProcessGroup.from_backend`.

    Args:
        unique_id: The same on all ranks.
        rank: This rank.
        world_size: Number of ranks.
        device: Index of the rank's CUDA device; each rank needs its own.
        threaded: Whether other ranks of the world are in this process.

    The constructor returns when all ranks have joined.

    Raises:
        NcclError: NCCL is unavailable or reported an error.
        InvalidRankError: `rank` is not in the world.
    """

    kind = "nccl"

    def __init__(
        self, unique_id: NcclUniqueId, rank: int, world_size: int, device: int, *, threaded: bool = False
    ) -> None:
        _require_nccl()
        if not 0 <= rank < world_size:
            raise InvalidRankError(f"rank must be 0 to {world_size - 1}; got {rank}.")
        if not 0 <= device < torch.cuda.device_count():
            raise NcclError(f"device must be 0 to {torch.cuda.device_count() - 1}; got {device}.")
        self.device = torch.device("cuda", device)
        try:
            with torch.cuda.device(self.device):
                communicator = join_world(world_size, unique_id.data, rank)
        except NcclError as error:
            raise NcclError(f"rank {rank} of {world_size} failed to join: {error}") from None
        self.group = NcclGroup(communicator, rank, world_size, self.device, threaded=threaded)
        register_group(self.group, "cuda")

    @staticmethod
    def generate_unique_id() -> NcclUniqueId:
        """Generate the id of a new world.

        Raises:
            NcclError: NCCL is unavailable.
        """
        _require_nccl()
        return NcclUniqueId(bytes(torch.cuda.nccl.unique_id()))

    @classmethod
    def create_world(cls, devices: Sequence[int]) -> list[NcclBackend]:
        """Create a world over GPUs of this host in this process, with one rank per device.

        Make each call on every rank's group with `async_op=True` before waiting for one.

        Raises:
            NcclError: NCCL is unavailable, or a device does not exist or is listed twice.
        """
        _require_nccl()
        if len(set(devices)) < len(devices) or not devices:
            raise NcclError(f"devices must list at least one GPU, each once; got {list(devices)}.")
        unique_id, size = cls.generate_unique_id(), len(devices)
        made: dict[int, Any] = {}

        def join(rank: int) -> None:
            try:
                made[rank] = cls(unique_id, rank, size, devices[rank], threaded=size > 1)
            except NcclError as error:
                made[rank] = error

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank in range(size):
            if isinstance(made[rank], NcclError):
                raise made[rank]
        return [made[rank] for rank in range(size)]

    def rank(self) -> int:
        """Return this rank."""
        return self.group.rank()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.group.size()

    @staticmethod
    def nccl_version() -> tuple[int, int, int]:
        """Return NCCL's version: major, minor, patch."""
        return nccl_version()

    def synchronize(self) -> None:
        """Wait until all work on this rank's device has finished."""
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Leave the world, once its work is done; call it on every rank. Its group then raises `NcclError`."""
        self.group.close()


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * 128),)


def join_world(size: int, unique_id: bytes, rank: int, library: Any = None) -> Any:
    """Return a communicator on the current device, as `torch.cuda.nccl` keeps it, once all ranks have joined.

    Args:
        size: Number of ranks.
        unique_id: Of the world: 128 bytes.
        rank: This rank.
        library: NCCL; None: the one that torch has loaded.

    Raises:
        NcclError: the id is too short, NCCL reported an error, or it is linked into torch, so that its functions
            cannot be found.
    """
    if len(unique_id) != ctypes.sizeof(_UniqueId):
        raise NcclError(f"a unique id has {ctypes.sizeof(_UniqueId)} bytes; got {len(unique_id)}.")
    library = library or _load()
    communicator = ctypes.c_void_p()
    copy = _UniqueId.from_buffer_copy(unique_id)
    _check(library, library.ncclCommInitRank(ctypes.byref(communicator), size, copy, rank))
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return capsule(communicator, _CAPSULE, None)


def _load() -> Any:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NcclError(f"hand-made NCCL worlds need {_LIBRARY}: {error}.") from None


def _check(library: Any, code: int) -> None:
    if code:
        describe = library.ncclGetErrorString
        describe.restype = ctypes.c_char_p
        raise NcclError(f"NCCL: {describe(code).decode()}.")


class Messages:
    """Sends and receives over one communicator.

    Args:
        communicator: The address of NCCL's communicator.
        library: NCCL.
    """

    def __init__(self, communicator: int, library: Any) -> None:
        self._communicator = ctypes.c_void_p(communicator)
        self._library = library

    @classmethod
    def of(cls, capsule: Any) -> Messages:
        """Return those over a communicator of `join_world`.

        Raises:
            NcclError: NCCL is linked into torch, so that its functions cannot be found.
        """
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        library = _load()
        return cls(address(capsule, _CAPSULE), library)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], stream: int) -> None:
        """Enqueue messages that NCCL carries together, so that no order of theirs can deadlock.

        Args:
            sends: What this rank sends; to itself, too, if it also receives it.
            receives: What it receives.
            stream: Address of the CUDA stream.

        Raises:
            NcclError: NCCL reported an error.
        """
        with self._grouped():
            for call, messages in ((self._library.ncclSend, sends), (self._library.ncclRecv, receives)):
                for tensor, peer in messages:
                    size = ctypes.c_size_t(tensor.nbytes)
                    place, queue = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_void_p(stream)
                    _check(self._library, call(place, size, _UINT8, peer, self._communicator, queue))

    def leave(self) -> None:
        """Destroy the communicator; torch's capsule does not.

        Raises:
            NcclError: NCCL reported an error.
        """
        _check(self._library, self._library.ncclCommDestroy(self._communicator))

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        _check(self._library, self._library.ncclGroupStart())
        try:
            yield
        finally:
            code = self._library.ncclGroupEnd()
        _check(self._library, code)


class _EnqueuedWork(Work):
    """Work enqueued on the device's stream."""

    def __init__(self, device: torch.device, output: Any) -> None:
        super().__init__()
        self._output = output
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Do nothing: the stream keeps the order."""
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return bool(self._event.query())

    def synchronize(self) -> None:
        """Block until the device has finished it."""
        self._event.synchronize()

    def result(self) -> Any:
        """Return the output tensors."""
        return self._output


class _AwaitedWork(Work):
    """Work that another thread enqueues on the stream that was current here."""

    def __init__(self, enqueued: Future[Work]) -> None:
        super().__init__()
        self._enqueued = enqueued

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is enqueued; from then on the stream keeps the order."""
        return bool(self._enqueued.result(None if not timeout else timeout.total_seconds()).wait())

    def is_completed(self) -> bool:
        """Whether the device has finished it."""
        return self._enqueued.done() and bool(self._enqueued.result().is_completed())

    def synchronize(self) -> None:
        """Block until the device has finished it."""
        self._enqueued.result().synchronize()

    def result(self) -> Any:
        """Return the output tensors."""
        return self._enqueued.result().result()


class NcclGroup(PythonProcessGroup):
    """One rank of a hand-made NCCL world.

    Args:
        communicator: NCCL's, from `join_world`.
        rank: This rank.
        size: Number of ranks.
        device: Its GPU.
        threaded: Whether other ranks are in this process. NCCL connects in the first operation and waits there for the
            others, so each rank then enqueues in a thread of its own.
    """

    def __init__(
        self, communicator: Any, rank: int, size: int, device: torch.device, *, threaded: bool = False
    ) -> None:
        # A name that is not that of a C++ class, which DDP's logger would look for.
        super().__init__(rank, size, f"axon_nccl_{uuid.uuid4().hex}", backend="axon_nccl")
        self._thread = ThreadPoolExecutor(1, f"axon_nb-nccl-{rank}") if threaded else None
        self._communicator = communicator
        self._messages: Messages | None = None
        self._device = device

    def _enqueue(self, call: Any, output: Any) -> Work:
        if self._communicator is None:
            raise NcclError("this NCCL world is closed; create another one.")
        if self._thread is None:
            return self._enqueue_now(call, output)
        stream = torch.cuda.current_stream(self._device)  # a setting per thread

        def work() -> Work:
            with torch.cuda.stream(stream):
                return self._enqueue_now(call, output)

        return _AwaitedWork(self._thread.submit(work))

    def _enqueue_now(self, call: Any, output: Any) -> Work:
        try:
            with torch.cuda.device(self._device):
                call([self._communicator])
                return _EnqueuedWork(self._device, output)
        except RuntimeError as error:
            raise NcclError(f"NCCL: {error}.") from None

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        """Reduce over ranks, in place."""
        op = _nccl_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        buffers = [tensors[0]]
        return self._enqueue(lambda comms: torch.cuda.nccl.all_reduce(buffers, buffers, op, None, comms), buffers)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        """Copy one rank's tensor to all ranks."""
        buffers, root = [tensors[0]], opts.rootRank
        return self._enqueue(lambda comms: torch.cuda.nccl.broadcast(buffers, root, None, comms), buffers)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Gather all ranks' tensors on every rank."""
        return self._enqueue(lambda comms: torch.cuda.nccl.all_gather([tensor], [output], None, comms), [output])

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        """Reduce over ranks and give each rank one part."""
        op = _nccl_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        return self._enqueue(
            lambda comms: torch.cuda.nccl.reduce_scatter([tensor], [output], op, None, comms), [output]
        )

    _reduce_scatter_base = reduce_scatter_single

    def _exchange(self, sends: Sequence[Message], receives: Sequence[Message], output: Any) -> Work:
        sends = [(tensor.contiguous(), peer) for tensor, peer in sends]
        if not all(tensor.is_contiguous() for tensor, _ in receives):
            raise NcclError("hand-made NCCL worlds receive into contiguous tensors only; pass `tensor.contiguous()`.")

        def call(comms: list[Any]) -> None:
            if self._messages is None:
                self._messages = self._messages_of(comms[0])
            self._messages.exchange(sends, receives, self._stream())

        return self._enqueue(call, output)

    _messages_of = staticmethod(Messages.of)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        """Send a tensor; NCCL has no tags: messages to a rank arrive in their order."""
        return self._exchange([(tensors[0], peer)], [], tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank."""
        return self._exchange([], [(tensors[0], source)], tensors)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Gather all ranks' tensors on one."""
        is_root = opts.rootRank == self._own_rank
        receives = [(tensor, rank) for rank, tensor in enumerate(outputs[0])] if is_root else []
        return self._exchange([(inputs[0], opts.rootRank)], receives, outputs)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Work:
        """Give each rank one of the tensors that one rank has."""
        is_root = opts.rootRank == self._own_rank
        sends = [(tensor, rank) for rank, tensor in enumerate(inputs[0])] if is_root else []
        return self._exchange(sends, [(outputs[0], opts.rootRank)], outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send one tensor to each rank, and receive one from each."""
        sends, receives = ([(tensor, rank) for rank, tensor in enumerate(each)] for each in (inputs, outputs))
        return self._exchange(sends, receives, outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Like `alltoall`, with one tensor that is split along dim 0; without sizes, evenly."""
        outputs, inputs = (
            whole.split(list(sizes) or len(whole) // self._size)
            for whole, sizes in ((output, output_sizes), (tensor, input_sizes))
        )
        return self.alltoall(outputs, inputs, opts)

    alltoall_base = all_to_all_single

    def close(self) -> None:
        """Destroy the communicator once the device has finished; later calls raise `NcclError`. On all ranks."""
        if self._communicator is None:
            return
        if self._thread is not None:
            self._thread.shutdown()
        self._synchronize()
        (self._messages or self._messages_of(self._communicator)).leave()
        self._communicator = self._messages = None
        forget_group(self)

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks, on the device."""
        return self.allreduce([torch.zeros(1, device=self._device)])


def _nccl_op(op: Any) -> int:
    code = next((number for known, number in _NCCL_OPS if op == known), None)
    if code is None:
        names = ", ".join(str(known).rpartition(".")[2] for known, _ in _NCCL_OPS)
        raise NcclError(f"hand-made NCCL worlds support {names}; got {op}.")
    return code
