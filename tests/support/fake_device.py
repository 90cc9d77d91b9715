"""A device that is not the CPU, for tests of code that moves tensors: torch's PrivateUse1, written in Python.

Its tensors keep their data in a tensor on the CPU that nobody else sees; reading their address as host memory fails.
`install` registers it in this process, as "standin".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

__all__ = ["NAME", "StandInTensor", "install"]

NAME = "standin"


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
    _setup_privateuseone_for_python_backend(NAME)
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
