"""Modules that take seconds to import, for threads that answer at once: imported beside, there the next time."""

from __future__ import annotations

import importlib
import threading
from typing import Any

__all__ = ["loaded"]

_lock = threading.Lock()
_wanted: dict[str, threading.Thread] = {}
_there: dict[str, Any] = {}


def loaded(name: str) -> Any:
    """The module; None as long as it is being imported.

    Raises:
        ImportError: it could not be imported.
    """
    with _lock:
        if name not in _wanted:
            _wanted[name] = threading.Thread(target=_load, args=(name,), name=f"axon_nb-import-{name}", daemon=True)
            _wanted[name].start()
    found = _there.get(name)
    if isinstance(found, Exception):
        raise ImportError(f"{name} cannot be imported: {found}") from found
    return found


def _load(name: str) -> None:
    try:
        _there[name] = importlib.import_module(name)
    except Exception as error:
        _there[name] = error
