"""What memory tensors take: all that live, and the most that a block has at a time."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PeakBytes", "live_storages"]


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that this thread makes in the block; `bytes` is the most that lived at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it has made."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and StorageWeakRef(tensor.untyped_storage()).cdata not in self._known:
                self._given.add(StorageWeakRef(tensor.untyped_storage()).cdata)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if StorageWeakRef(storage).cdata not in self._given:
                    self._known[StorageWeakRef(storage).cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._known.values()))
        return result


def live_storages() -> dict[int, int]:
    """Return the bytes of the storages of all live tensors of this process, by the storage's address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages}
