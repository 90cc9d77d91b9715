"""The storages of all tensors of this process that Python knows: found seldom, as it means a look at every object."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["LivingTensors", "storages_of"]

_SHARE = 0.001
"""At most this part of the time goes into looking."""


def storages_of(tensors: Iterable[Any], device_type: str) -> dict[int, int]:
    """Bytes of the storages of these tensors on a kind of device, each once, by where it is in memory."""
    found: dict[int, int] = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)
        try:
            storage = local.untyped_storage()
            if storage.device.type == device_type and storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError):  # sparse, fake, wrapped: it has none
            continue
    return found


class LivingTensors:
    """Looks again when enough time has passed for what a look costs."""

    def __init__(self) -> None:
        self._found: dict[int, int] = {}
        self._due = 0.0

    def storages(self, device_type: str, *, now: bool = False) -> dict[int, int]:
        """As `storages_of` of all tensors; those of the last look when it is too early for another, unless `now`."""
        began = time.monotonic()
        if now or began >= self._due:
            objects = gc.get_objects()
            # type() and not isinstance: lazy proxies answer the latter with side effects.
            kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
            self._found = storages_of((item for item in objects if type(item) in kinds), device_type)
            del objects
            end = time.monotonic()
            self._due = end + (end - began) / _SHARE
        return self._found
