"""A device that is not the CPU, for tests of code that moves tensors: torch's PrivateUse1, written in Python.

Its tensors keep their data in a tensor on the CPU that nobody else sees; reading their address as host memory fails.
`install` registers it in this process, as "standin". It has streams and events, as CUDA does: work takes its time, and
the host does not wait for it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "standin"
_ORIGIN_NS = 10**15
"""The device's clock is this far from the host's."""


class _Stream:
    """A queue of work."""

    def __init__(self, _: Any = None) -> None:
        self.free_ns = 0

    def reached(self) -> int:
        """When the device has done all that is queued now, on its clock."""
        self.free_ns = max(self.free_ns, time.monotonic_ns() + _ORIGIN_NS)
        return self.free_ns


class _Event:
    """A place in a queue."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.at_ns = 0

    def record(self, stream: _Stream) -> None:
        """Take the place behind the stream's work."""
        self.at_ns = stream.reached()

    def query(self) -> bool:
        """Whether the device is there."""
        return time.monotonic_ns() + _ORIGIN_NS >= self.at_ns

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds until another event; an error if one of them has not happened."""
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return (end.at_ns - self.at_ns) / 1e6


class StandInModule(_DummyBackendModule):  # type: ignore[misc]
    """What `torch.cuda` is for CUDA."""

    Event, Stream = _Event, _Stream

    def __init__(self) -> None:
        self._stream = _Stream()
        self.is_used, self.is_capturing = True, False

    def is_initialized(self) -> bool:
        """Whether the device has been used."""
        return self.is_used

    def is_current_stream_capturing(self) -> bool:
        """Whether work is recorded as a graph."""
        return self.is_capturing

    def current_stream(self, _: Any = None) -> _Stream:
        """Return the queue of all work."""
        return self._stream

    def work(self, milliseconds: float) -> None:
        """Queue work of this length."""
        self._stream.free_ns = self._stream.reached() + round(milliseconds * 1e6)


class StandInTensor(torch.Tensor):
    """A tensor on the device."""

    @staticmethod
    def __new__(cls, content: torch.Tensor) -> StandInTensor:
        made = torch._C._acc.create_empty_tensor(content.shape, content.dtype)
        made.__class__ = cls
        return made

    def __init__(self, content: torch.Tensor) -> None:
        self.content = content


def install() -> torch.device:
    """Register the device; return it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=StandInModule())
    library = torch.library.Library("aten", "IMPL")

    def empty(size: Any, dtype: torch.dtype | None = None, **_: Any) -> StandInTensor:
        return StandInTensor(torch.empty(size, dtype=dtype, device="cpu"))

    def empty_strided(size: Any, stride: Any, dtype: torch.dtype | None = None, **_: Any) -> StandInTensor:
        return empty(size, dtype)

    def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        _content(target).copy_(_content(source))
        return target

    for name, function in (
        ("empty.memory_format", empty),
        ("empty_strided", empty_strided),
        ("_copy_from", copy_from),
    ):
        library.impl(name, function, "PrivateUse1")
    _libraries.append(library)
    return torch.device(NAME, 0)


def _content(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.content if isinstance(tensor, StandInTensor) else tensor


_libraries: list[Any] = []
