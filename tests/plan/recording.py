"""Records every operation that mock ranks start; mock groups themselves record no spans."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.mock.group import MockGroup
from axon_nb.plan.traffic.plan import OPERATIONS

_calls: dict[int, list[tuple[str, str, int]]] = {}
_inside = threading.local()


def begin() -> None:
    """Clear this rank's record."""
    _calls[dist.get_rank()] = []


def calls_of(rank: int) -> list[tuple[str, str, int]]:
    """(group, operation, bytes of the whole tensor) since `begin`."""
    return list(_calls[rank])


@contextmanager
def recording() -> Iterator[None]:
    """Inside, operations of mock groups are recorded, each once."""
    originals = {name: vars(MockGroup)[name] for name in OPERATIONS if name in vars(MockGroup)}
    for name, original in originals.items():
        setattr(MockGroup, name, _watched(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(MockGroup, name, original)


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(self: MockGroup, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "deep", False):
            return original(self, *args, **kwargs)
        _inside.deep = True
        try:
            _calls.setdefault(dist.get_rank(), []).append(
                (self.group_name, name, _size(args["reduce_scatter" in name] if args else None))
            )
            return original(self, *args, **kwargs)
        finally:
            _inside.deep = False

    return watched


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, Sequence) and value:
        return _size(value[0]) if isinstance(value[0], Sequence) else sum(map(_size, value))
    return 0
