"""NCCL's sends and receives, for which `torch.cuda.nccl` has no functions: called in the library that torch has loaded.

`torch.cuda.nccl` keeps a communicator in a capsule of this name: python_nccl.cpp in torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from axon_nb.comm.errors import NcclError

__all__ = ["Message", "Messages"]

_CAPSULE = b"torch.cuda.nccl.Communicator"
_LIBRARY = "libnccl.so.2"
_UINT8 = 1
"""ncclUint8, in nccl.h: all dtypes travel as bytes."""

Message = tuple[torch.Tensor, int]
"""A contiguous tensor and the rank that it goes to, or comes from."""


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
        """Return those over a communicator of `torch.cuda.nccl.init_rank`.

        Raises:
            NcclError: NCCL is linked into torch, so that its functions cannot be found; or torch keeps communicators
                in another way.
        """
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        try:
            return cls(address(capsule, _CAPSULE), ctypes.CDLL(_LIBRARY))
        except (OSError, TypeError, ValueError) as error:
            raise NcclError(f"point-to-point calls of hand-made NCCL worlds need {_LIBRARY}: {error}.") from None

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
                    self._check(call(place, size, _UINT8, peer, self._communicator, queue))

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        self._check(self._library.ncclGroupStart())
        try:
            yield
        finally:
            code = self._library.ncclGroupEnd()
        self._check(code)

    def _check(self, code: int) -> None:
        if code:
            describe = self._library.ncclGetErrorString
            describe.restype = ctypes.c_char_p
            raise NcclError(f"NCCL: {describe(code).decode()}.")
