"""What a front end asks while somebody types: completions, help on a name, and what names there are.

Answered from the control channel, so that the main thread is left to its cell. The work is done in a thread of its own
and waited for only briefly: what a completion runs into (a slow `__dir__`, a device that hangs) must not keep an
interrupt from coming through.

The names of this rank with their attributes and keys, small enough to be kept in the notebook after each cell.
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


_LIMIT_S = 0.08
_MAX_MATCHES = 1000
_MAX_TEXT = 200_000
_POLICY = {
    # Objects whose own `__getattr__` or `__getitem__` IPython may call for `model.layers[0].`: they only look up. Not
    # those of tensors: indexing a DTensor communicates.
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
    """Answers for one rank; one question at a time.

    Args:
        shell: The rank's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completer: Any = None
        self._thread: threading.Thread | None = None

    def handlers(self) -> dict[str, ControlHandler]:
        """The requests of the control channel, by message type."""
        return {"axon_complete": self._complete, "axon_inspect": self._inspect, "axon_names": self._names}

    def _complete(self, content: dict[str, Any]) -> dict[str, Any]:
        def work() -> dict[str, Any]:
            line, cursor = content["line"], content["cursor"]
            fragment, matches = self._own_completer().complete(line_buffer=line, cursor_pos=cursor)
            return {"fragment": fragment, "matches": list(matches)[:_MAX_MATCHES]}

        return self._briefly(work)

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

        return self._briefly(work)

    def _names(self, content: dict[str, Any]) -> dict[str, Any]:
        return self._briefly(lambda: names_snapshot(self._shell, known=set(content.get("known", ()))))

    def _own_completer(self) -> Any:
        if self._completer is None:
            shell = self._shell
            # Without jedi, which takes seconds at first and knows no more of living objects than they do.
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

    def _briefly(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer, or ``late`` when it takes more than a moment or the one before has not come back."""
        if self._thread is not None and self._thread.is_alive():
            return {"late": True}
        answers: list[dict[str, Any]] = []

        def run() -> None:
            try:
                answers.append(work())
            except BaseException as error:
                answers.append({"refused": type(error).__name__})

        self._thread = threading.Thread(target=run, name="axon_nb-assist", daemon=True)
        self._thread.start()
        self._thread.join(_LIMIT_S)
        return answers[0] if answers else {"late": True}
