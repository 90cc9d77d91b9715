"""Read the index of a checkpoint without running code that it may contain.

torch.distributed.checkpoint pickles its index, `.metadata`, and reads it with `pickle.load`, so an untrusted checkpoint
could run any code. Here only the records that make up an index are created.
"""

from __future__ import annotations

import enum
import importlib
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from axon_nb.parallel.checkpoint.errors import CorruptCheckpointError

_RECORDS = "torch.distributed.checkpoint.metadata"
_OTHERS = frozenset(
    {
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("collections", "OrderedDict"),
    }
)


def _member(kind: Any, name: Any) -> Any:
    """Stands for `getattr`, by which early versions of Python 3.11 pickle the members of an enumeration."""
    if isinstance(kind, enum.EnumType) and kind.__module__ == _RECORDS and isinstance(name, str):
        return kind[name]
    raise CorruptCheckpointError("it refers to builtins.getattr, which the index of a checkpoint never contains.")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a record, a dtype, or one of a few others; refuse the rest."""
        # From Python 3.13 on, pathlib is a package and names its classes after a file in it.
        module = "pathlib" if module.startswith("pathlib.") else module
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == _RECORDS or (module, name) in _OTHERS:
            value = getattr(importlib.import_module(module), name, None)
            if (module, name) in _OTHERS or (isinstance(value, type) and value.__module__ == _RECORDS):
                return value
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CorruptCheckpointError(f"it refers to {module}.{name}, which the index of a checkpoint never contains.")


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a checkpoint.

    Raises:
        CorruptCheckpointError: it is not the index of a checkpoint, or would run code.
        OSError: it cannot be read.
    """
    path = folder / ".metadata"
    with path.open("rb") as file:
        try:
            index = _Unpickler(file).load()
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path} was not read: {error}") from None
        except Exception as error:
            raise CorruptCheckpointError(f"{path} is damaged ({type(error).__name__}: {error}).") from error
    if not isinstance(index, Metadata):
        raise CorruptCheckpointError(f"{path} holds an object of type {type(index).__name__}, not the index.")
    return index
