"""The names of this rank with their attributes and keys, small enough to be kept in the notebook after each cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

__all__ = ["names_snapshot"]

_BUDGET_S = 0.04
"""After so long the rest of the names go without their attributes."""
_MAX_NAMES = 1000
_MAX_OWN = 500
_MAX_KEYS = 200
_MAX_KEY = 80


def names_snapshot(shell: Any, *, known: set[str]) -> dict[str, Any]:
    """What can be completed without asking again.

    Args:
        shell: The rank's IPython shell.
        known: Names of types whose attributes the asker has.

    Returns:
        ``names``: by name of a variable its ``type``, ``own`` attributes (those that its type does not have) and
        ``keys`` as Python source; ``types``: by name of a type its attributes.
    """
    end = time.monotonic() + _BUDGET_S
    names: dict[str, Any] = {}
    types: dict[str, list[str]] = {}
    for name, value in list(shell.user_ns.items())[-_MAX_NAMES:]:
        if name.startswith("_"):
            continue
        entry: dict[str, Any] = {"type": "", "own": [], "keys": []}
        names[name] = entry
        if time.monotonic() > end:
            continue
        try:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            if kind not in known and kind not in types:
                types[kind] = [attribute for attribute in dir(type(value)) if not attribute.startswith("__")]
            entry.update(type=kind, own=_own(value), keys=_keys(value))
        except Exception:  # an odd object of the user: its name is enough
            continue
    return {"names": names, "types": types}


def _own(value: Any) -> list[str]:
    found: list[Any] = []
    if isinstance(value, ModuleType):
        found = dir(value)
    else:
        found += getattr(value, "__dict__", ())
    if isinstance(value, torch.nn.Module):
        found += [name for part in (value._modules, value._parameters, value._buffers) for name in part]
    elif _is_frame(value):
        found += _plain(value.columns, identifiers=True)
    return [name for name in found if isinstance(name, str) and not name.startswith("__")][:_MAX_OWN]


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [repr(key) for key in _plain(value)]
    return [repr(key) for key in _plain(value.columns)] if _is_frame(value) else []


def _is_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _plain(keys: Iterable[Any], *, identifiers: bool = False) -> list[str | int]:
    found = [key for key, _ in zip(list(keys), range(_MAX_KEYS), strict=False) if type(key) in (str, int)]
    return [
        key
        for key in found
        if len(str(key)) <= _MAX_KEY and (not identifiers or (isinstance(key, str) and key.isidentifier()))
    ]
