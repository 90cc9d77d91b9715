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

Reply = TypeVar("Reply")

_BUDGET_S = 0.04
"""After this time, the remaining names are sent without attributes."""
_MAX_NAMES = 1000
_MAX_ATTRIBUTES = 500
_MAX_KEYS = 200
_MAX_KEY = 80
_TIMEOUT_S = 0.08
_TIMED_OUT = "no answer in time"
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


def names_snapshot(shell: Any, *, known: set[str]) -> NamesReply:
    """Snapshot for completion without another request.

    Args:
        shell: The rank's IPython shell.
        known: Names of types whose attributes the caller already has.
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
            names[name] = KnownName(kind, tuple(_instance_attributes(value)), tuple(_keys(value)))
        except Exception:  # an unusual object: its name is enough
            continue
    return NamesReply(names, types)


def _instance_attributes(value: Any) -> list[str]:
    names: list[Any] = []
    if isinstance(value, ModuleType):
        names = dir(value)
    else:
        names += getattr(value, "__dict__", ())
    if isinstance(value, torch.nn.Module):
        names += [name for part in (value._modules, value._parameters, value._buffers) for name in part]
    elif _is_data_frame(value):
        names += _simple_keys(value.columns, identifiers=True)
    return [name for name in names if isinstance(name, str) and not name.startswith("__")][:_MAX_ATTRIBUTES]


def _keys(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [repr(key) for key in _simple_keys(value)]
    return [repr(key) for key in _simple_keys(value.columns)] if _is_data_frame(value) else []


def _is_data_frame(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _simple_keys(keys: Iterable[Any], *, identifiers: bool = False) -> list[str | int]:
    simple = [key for key, _ in zip(list(keys), range(_MAX_KEYS), strict=False) if type(key) in (str, int)]
    return [
        key
        for key in simple
        if len(str(key)) <= _MAX_KEY and (not identifiers or (isinstance(key, str) and key.isidentifier()))
    ]


class CompletionService:
    """Answers completion requests on one rank, one at a time.

    Args:
        shell: The rank's IPython shell.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._completer: Any = None
        self._thread: threading.Thread | None = None

    def handlers(self) -> ControlHandlers:
        """Handlers for the control channel, by request class."""
        return {CompleteRequest: self._complete, InspectRequest: self._inspect, NamesRequest: self._names}

    def _complete(self, request: CompleteRequest) -> CompleteReply:
        def work() -> CompleteReply:
            fragment, matches = self._own_completer().complete(line_buffer=request.line, cursor_pos=request.cursor)
            return CompleteReply(fragment, tuple(matches)[:_MAX_MATCHES])

        return self._run_with_timeout(work)

    def _inspect(self, request: InspectRequest) -> InspectReply:
        def work() -> InspectReply:
            try:
                bundle = self._shell.object_inspect_mime(
                    request.name, detail_level=request.detail, omit_sections=request.omit
                )
            except KeyError:
                return InspectReply(False, {})
            if not self._shell.enable_html_pager:
                bundle.pop("text/html", None)
            return InspectReply(True, {mime: text[:_MAX_TEXT] for mime, text in bundle.items()})

        return self._run_with_timeout(work)

    def _names(self, request: NamesRequest) -> NamesReply:
        return self._run_with_timeout(lambda: names_snapshot(self._shell, known=set(request.known)))

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

    def _run_with_timeout(self, work: Callable[[], Reply]) -> Reply:
        """Run `work` and return its result; refuse if it takes too long or the previous request has not finished.

        Raises:
            UsageError: it is refused.
        """
        if self._thread is not None and self._thread.is_alive():
            raise UsageError(_TIMED_OUT)
        results: list[Reply] = []
        failures: list[str] = []

        def run() -> None:
            try:
                results.append(work())
            except BaseException as error:
                failures.append(type(error).__name__)

        self._thread = threading.Thread(target=run, name="axon_nb-completion", daemon=True)
        self._thread.start()
        self._thread.join(_TIMEOUT_S)
        if not results:
            raise UsageError(failures[0] if failures else _TIMED_OUT)
        return results[0]
