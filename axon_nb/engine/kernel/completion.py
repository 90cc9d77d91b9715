"""Answers completion requests: completions, help on a name, and a snapshot of all names.

Requests arrive on the control channel, so the main thread stays free for its cell. A separate thread does the work, and
the control thread waits for it only briefly: whatever a completion runs into (a slow `__dir__`, a device that hangs)
must not block an interrupt.

The snapshot of names with their attributes and keys is small enough to be stored in the notebook after each cell.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from IPython.core.completer import IPCompleter

from axon_nb.engine.kernel.hooks import ControlHandler

__all__ = ["CompletionService", "names_snapshot"]

_BUDGET_S = 0.04
"""After this time, the remaining names are sent without attributes."""
_MAX_NAMES = 1000
_MAX_ATTRIBUTES = 500
_MAX_KEYS = 200
_MAX_KEY = 80


def names_snapshot(shell: Any, *, known: set[str]) -> dict[str, Any]:
    """Snapshot for completion without another request.

    Args:
        shell: The rank's IPython shell.
        known: Names of types whose attributes the caller already has.

    Returns:
        ``names``: for each variable its ``type``, its ``own`` attributes (those that its type lacks) and its ``keys``
        as Python source; ``types``: the attributes of each type by name.
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
            entry.update(type=kind, own=_instance_attributes(value), keys=_keys(value))
        except Exception:  # an unusual object: its name is enough
            continue
    return {"names": names, "types": types}


def _instance_attributes(value: Any) -> list[str]:
    found: list[Any] = []
    if isinstance(value, ModuleType):
        found = dir(value)
    else:
        found += getattr(value, "__dict__", ())
    if isinstance(value, torch.nn.Module):
        found += [name for part in (value._modules, value._parameters, value._buffers) for name in part]
    elif _is_data_frame(value):
        found += _simple_keys(value.columns, identifiers=True)
    return [name for name in found if isinstance(name, str) and not name.startswith("__")][:_MAX_ATTRIBUTES]


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [repr(key) for key in _simple_keys(value)]
    return [repr(key) for key in _simple_keys(value.columns)] if _is_data_frame(value) else []


def _is_data_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _simple_keys(keys: Iterable[Any], *, identifiers: bool = False) -> list[str | int]:
    found = [key for key, _ in zip(list(keys), range(_MAX_KEYS), strict=False) if type(key) in (str, int)]
    return [
        key
        for key in found
        if len(str(key)) <= _MAX_KEY and (not identifiers or (isinstance(key, str) and key.isidentifier()))
    ]


_TIMEOUT_S = 0.08
_MAX_MATCHES = 1000
_MAX_TEXT = 200_000
_POLICY = {
    # IPython may call the `__getattr__` or `__getitem__` of these types for `model.layers[0].`: they only look up.
    # Tensors are excluded: indexing a DTensor communicates.
    "allowed_getattr_external": {("pandas", "DataFrame"), ("pandas", "Series"), ("torch", "nn", "Module")},
    "allowed_getitem_external": {
        ("numpy", "ndarray"),
        ("numpy", "void"),
        ("pandas", "DataFrame"),
        ("pandas", "Series"),
        ("pandas", "core", "indexing", "_LocIndexer"),
        ("pandas", "core", "indexing", "_iLocIndexer"),
        ("torch", "nn", "ModuleDict"),
        ("torch", "nn", "ModuleList"),
        ("torch", "nn", "Sequential"),
    },
}


class CompletionService:
    """Answers completion requests on one rank, one at a time.

    Args:
        shell: The rank's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completer: Any = None
        self._thread: threading.Thread | None = None

    def handlers(self) -> dict[str, ControlHandler]:
        """Handlers for the control channel, by message type."""
        return {"axon_complete": self._complete, "axon_inspect": self._inspect, "axon_names": self._names}

    def _complete(self, content: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            line, cursor = content["line"], content["cursor"]
            fragment, matches = self._own_completer().complete(line_buffer=line, cursor_pos=cursor)
            return {"fragment": fragment, "matches": list(matches)[:_MAX_MATCHES]}

        return self._run_with_timeout(work)

    def _inspect(self, content: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            try:
                bundle = self._shell.object_inspect_mime(
                    content["name"], detail_level=content["detail"], omit_sections=tuple(content.get("omit", ()))
                )
            except KeyError:
                return {"found": False}
            if not self._shell.enable_html_pager:
                bundle.pop("text/html", None)
            return {"found": True, "data": {mime: text[:_MAX_TEXT] for mime, text in bundle.items()}}

        return self._run_with_timeout(work)

    def _names(self, content: dict[str, Any]) -> dict[str, Any]:
        return self._run_with_timeout(lambda: names_snapshot(self._shell, known=set(content.get("known", ()))))

    def _own_completer(self) -> Any:
        if self._completer is None:
            shell = self._shell
            # Without jedi, which takes seconds to start and knows no more about live objects.
            self._completer = IPCompleter(
                shell=shell,
                namespace=shell.user_ns,
                global_namespace=shell.user_global_ns,
                parent=shell,
                use_jedi=False,
                policy_overrides=_POLICY,
            )
            self._completer.custom_completers = shell.Completer.custom_completers
        return self._completer

    def _run_with_timeout(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run `work`; return ``timed_out`` if it takes too long or the previous request has not finished."""
        if self._thread is not None and self._thread.is_alive():
            return {"timed_out": True}
        results: list[dict[str, Any]] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                results.append({"refused": type(error).__name__})

        self._thread = threading.Thread(target=run, name="axon_nb-completion", daemon=True)
        self._thread.start()
        self._thread.join(_TIMEOUT_S)
        return results[0] if results else {"timed_out": True}
