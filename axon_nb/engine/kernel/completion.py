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
from typing import Any, TypeVar

import torch
from IPython.core.completer import IPCompleter

from axon_nb.engine.kernel.hooks import ControlHandlers
from axon_nb.errors import UsageError
from axon_nb.records.protocol.completion import (
    CompleteReply,
    CompleteRequest,
    InspectReply,
    InspectRequest,
    KnownName,
    NamesReply,
    NamesRequest,
)

__all__ = ["Assistant", "names_snapshot"]

Reply = TypeVar("Reply")

_BUDGET_S = 0.04
"""After so long the rest of the names go without their attributes."""
_MAX_NAMES = 1000
_MAX_OWN = 500
_MAX_KEYS = 200
_MAX_KEY = 80


def names_snapshot(shell: Any, *, known: set[str]) -> NamesReply:
    """What can be completed without asking again.

    Args:
        shell: The rank's IPython shell.
        known: Names of types whose attributes the asker has.
    """
    end = time.monotonic() + _BUDGET_S
    names: dict[str, KnownName] = {}
    types: dict[str, tuple[str, ...]] = {}
    for name, value in list(shell.user_ns.items())[-_MAX_NAMES:]:
        if name.startswith("_"):
            continue
        names[name] = KnownName()
        if time.monotonic() > end:
            continue
        try:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            if kind not in known and kind not in types:
                types[kind] = tuple(attribute for attribute in dir(type(value)) if not attribute.startswith("__"))
            names[name] = KnownName(kind, tuple(_own(value)), tuple(_keys(value)))
        except Exception:  # an odd object of the user: its name is enough
            continue
    return NamesReply(names, types)


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
_LATE = "no answer within a moment"
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


class Assistant:
    """Answers for one rank; one question at a time.

    Args:
        shell: The rank's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completer: Any = None
        self._thread: threading.Thread | None = None

    def handlers(self) -> ControlHandlers:
        """The requests of the control channel, by their kind."""
        return {CompleteRequest: self._complete, InspectRequest: self._inspect, NamesRequest: self._names}

    def _complete(self, asked: CompleteRequest) -> CompleteReply:
        def work() -> CompleteReply:
            fragment, matches = self._own_completer().complete(line_buffer=asked.line, cursor_pos=asked.cursor)
            return CompleteReply(fragment, tuple(matches)[:_MAX_MATCHES])

        return self._briefly(work)

    def _inspect(self, asked: InspectRequest) -> InspectReply:
        def work() -> InspectReply:
            try:
                bundle = self._shell.object_inspect_mime(
                    asked.name, detail_level=asked.detail, omit_sections=asked.omit
                )
            except KeyError:
                return InspectReply(False, {})
            if not self._shell.enable_html_pager:
                bundle.pop("text/html", None)
            return InspectReply(True, {mime: text[:_MAX_TEXT] for mime, text in bundle.items()})

        return self._briefly(work)

    def _names(self, asked: NamesRequest) -> NamesReply:
        return self._briefly(lambda: names_snapshot(self._shell, known=set(asked.known)))

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

    def _briefly(self, work: Callable[[], Reply]) -> Reply:
        """The answer; refused when it takes more than a moment, or the one before has not come back.

        Raises:
            UsageError: it is refused.
        """
        if self._thread is not None and self._thread.is_alive():
            raise UsageError(_LATE)
        answers: list[Reply] = []
        failures: list[str] = []

        def run() -> None:
            try:
                answers.append(work())
            except BaseException as error:
                failures.append(type(error).__name__)

        self._thread = threading.Thread(target=run, name="axon_nb-assist", daemon=True)
        self._thread.start()
        self._thread.join(_LIMIT_S)
        if not answers:
            raise UsageError(failures[0] if failures else _LATE)
        return answers[0]
