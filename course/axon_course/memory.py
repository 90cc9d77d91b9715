"""What memory tensors take: all that live, the most that a block has at a time, what it keeps for backward."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of tensors that this thread makes in the block; `bytes` is the most that lived at a time."""

    history: list[int]
    """Bytes alive after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: set[int] = set()
        self.history = []

    @property
    def bytes(self) -> int:
        """The most that lived at a time."""
        return max(self.history, default=0)

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
        self.history.append(sum(size for _, size in self._known.values()))
        return result


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Sees what this thread keeps for backward in the block: ``with SavedBytes(model.parameters()) as saved: …``.

    Args:
        known: Tensors that are there anyway, such as parameters, and do not count.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self._known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in known}
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def __enter__(self) -> SavedBytes:  # type: ignore[override]
        """Begin to look."""
        super().__enter__()
        return self

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        if reference.cdata not in self._known:
            self._kept[reference.cdata] = (reference, storage.nbytes())
        return tensor

    @property
    def bytes(self) -> int:
        """Bytes of what was kept and is still alive."""
        return sum(size for reference, size in self._kept.values() if not reference.expired())


def live_storages() -> dict[int, int]:
    """Return the bytes of the storages of all live tensors of this process, by the storage's address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return {StorageWeakRef(storage).cdata: storage.nbytes() for storage in storages}
