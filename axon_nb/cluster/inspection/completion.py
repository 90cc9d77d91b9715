"""Completions and help from a rank, within the time that somebody who types has; else from what was known of it.

The names of a rank as of the end of its last cell: completions while it does not answer.
"""

from __future__ import annotations

import builtins
import contextlib
import keyword
import re
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from axon_nb.cluster.rpc.answers import Answer
from axon_nb.records.protocol.completion import (
    CompleteRequest,
    InspectRequest,
    KnownName,
    NamesReply,
    NamesRequest,
)
from axon_nb.records.protocol.messages import Request

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["Assistance", "NameSnapshot", "of"]

R = TypeVar("R")

_ATTRIBUTE = re.compile(r"(?<![\w.\])])([A-Za-z_]\w*)\.(\w*)$")
_KEY = re.compile(r"(?<![\w.\])])([A-Za-z_]\w*)\[((['\"])?[^'\"\[\]]*)$")
_NAME = re.compile(r"(?<![\w.])([A-Za-z_]\w*)?$")
_WORDS = (*keyword.kwlist, *(name for name in dir(builtins) if not name.startswith("_")))


class NameSnapshot:
    """Names with their attributes and keys; see `axon_nb.engine.kernel.completion`."""

    def __init__(self) -> None:
        self._names: Mapping[str, KnownName] = {}
        self._types: dict[str, Sequence[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def update(self, names: Mapping[str, KnownName], types: Mapping[str, Sequence[str]]) -> None:
        """Take in what the rank has told; from any thread."""
        self._types = {**self._types, **types}
        self._names = names

    def names(self) -> list[str]:
        """The names."""
        return list(self._names)

    def types(self) -> list[str]:
        """Names of the types whose attributes are known."""
        return list(self._types)

    def complete(self, before: str) -> tuple[str, list[str]]:
        """What may stand at the end of the line `before`: the text there that is replaced, and by what."""
        if match := _KEY.search(before):
            name, fragment, quote = match.groups()
            return self._keys(name, fragment, quote)
        if match := _ATTRIBUTE.search(before):
            name, fragment = match.groups()
            entry = self._names.get(name, KnownName())
            found = {*entry.own, *self._types.get(entry.type, ())}
            return fragment, _beginning(found, fragment)
        match = _NAME.search(before)
        fragment = (match.group(1) or "") if match else ""
        if match is None or _in_text(before):
            return "", []
        return fragment, _beginning({*self._names, *_WORDS}, fragment)

    def _keys(self, name: str, fragment: str, quote: str | None) -> tuple[str, list[str]]:
        keys = self._names.get(name, KnownName()).keys
        if quote is None:
            return fragment, [key for key in keys if key.startswith(fragment)]
        inner = fragment[1:]
        return inner, [key[1:-1] for key in keys if key[0] in "'\"" and key[1:].startswith(inner)]


def _beginning(words: Iterable[str], fragment: str) -> list[str]:
    """Those that begin so; private ones only when asked for."""
    private = fragment.startswith("_")
    return sorted(word for word in words if word.startswith(fragment) and (private or not word.startswith("_")))


def _in_text(before: str) -> bool:
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1


_COMPLETE_S = 0.1
"""With what the kernel and the front end take, completions are there within 0.15 s."""
_INSPECT_S = 0.3
_FORGOTTEN_S = 10.0
"""A question that has not been answered after so long will not be: another may be asked."""


class Assistance:
    """Asks the ranks of one cluster, over the control channel, one question a rank at a time.

    Args:
        state: The cluster.
    """

    def __init__(self, state: ClusterState) -> None:
        self._client = state.connection.client
        self._dead = state.health.dead
        self._snapshots: dict[int, NameSnapshot] = {}
        self._open: dict[tuple[int, type[Request[Any]]], tuple[Answer[Any], float]] = {}

    def complete(self, rank: int, line: str, cursor: int) -> tuple[str, list[str]]:
        """What may stand at `cursor` (a column of `line`): the text before it that is replaced, and by what."""
        self._snapshots.setdefault(rank, NameSnapshot())
        answer = self._ask(rank, CompleteRequest(line, cursor), _COMPLETE_S)
        if answer is not None:
            return answer.fragment, list(answer.matches)
        known = self._snapshots[rank] or self._snapshots.get(0) or NameSnapshot()
        return known.complete(line[:cursor])

    def names(self, rank: int = 0) -> list[str]:
        """The names that the rank had when it was last looked at."""
        snapshot = self._snapshots.get(rank)
        return snapshot.names() if snapshot is not None else []

    def inspect(self, rank: int, name: str, *, detail: int, omit: tuple[str, ...] = ()) -> dict[str, str] | None:
        """Help on a name as a mime bundle, empty when the rank has no such name; None when it does not answer."""
        answer = self._ask(rank, InspectRequest(name, detail, omit), _INSPECT_S)
        return None if answer is None else dict(answer.data)

    def refresh(self) -> None:
        """Ask rank 0, and the ranks that were asked before, what names they have; the answers are not waited for."""
        for rank in {0, *self._snapshots}:
            snapshot = self._snapshots.setdefault(rank, NameSnapshot())
            answer = self._send(rank, NamesRequest(tuple(snapshot.types())))
            if answer is not None:
                answer.when_done(lambda done, snapshot=snapshot: _take(done, snapshot))  # type: ignore[misc]

    def _ask(self, rank: int, request: Request[R], limit_s: float) -> R | None:
        answer = self._send(rank, request)
        if answer is None or not answer.wait(limit_s):
            return None
        try:
            return answer.reply()
        except Exception:  # the rank has died meanwhile
            return None

    def _send(self, rank: int, request: Request[R]) -> Answer[R] | None:
        """The answer to come; None when the rank is gone, or owes one to the question before."""
        kind, sent = type(request), None
        before, asked_at = self._open.get((rank, kind), (None, 0.0))
        owed = before is not None and not before.done() and time.monotonic() - asked_at < _FORGOTTEN_S
        if rank in self._dead or owed:
            return None
        # Somebody types: what goes wrong here (the rank is gone, or the whole cluster) is told where cells run.
        with contextlib.suppress(Exception):
            sent = self._client.request(rank, request)
            self._open[rank, kind] = (sent, time.monotonic())
        return sent


def _take(done: Answer[NamesReply], snapshot: NameSnapshot) -> None:
    with contextlib.suppress(Exception):  # on the client's thread; the names of before stay
        reply = done.result()
        snapshot.update(reply.names, reply.types)


_known: weakref.WeakKeyDictionary[ClusterState, Assistance] = weakref.WeakKeyDictionary()


def of(state: ClusterState) -> Assistance:
    """The assistance of a cluster; the same one each time."""
    if state not in _known:
        _known[state] = Assistance(state)
    return _known[state]
