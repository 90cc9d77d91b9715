"""What `torch.cuda.nccl` lacks of NCCL: a way in, and sends and receives, called in the library that torch has loaded.

`torch.cuda.nccl.init_rank` raises `SystemError` in Python 3.10 and later (torch 2.11; its arguments' format needs
PY_SSIZE_T_CLEAN, which python_nccl.cpp does not define).

`torch.cuda.nccl` keeps a communicator in a capsule of this name: python_nccl.cpp in torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from axon_nb.comm.errors import NcclError

_CAPSULE = b"torch.cuda.nccl.Communicator"
_LIBRARY = "libnccl.so.2"
_UINT8 = 1
"""ncclUint8, in nccl.h: all dtypes travel as bytes."""

Message = tuple[torch.Tensor, int]
"""A contiguous tensor and the rank that it goes to, or comes from."""


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
