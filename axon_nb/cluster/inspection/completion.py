"""Completions and help from a rank, fast enough for typing; if it is too slow, from its last known names."""

from __future__ import annotations

import builtins
import contextlib
import keyword
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from axon_nb.cluster.rpc import Answer
from axon_nb.records.protocol import cells as protocol
from axon_nb.records.protocol.wire import Request

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

R = TypeVar("R")

_ATTRIBUTE = re.compile(r"(?<![\w.\])])([A-Za-z_]\w*)\.(\w*)$")
_KEY = re.compile(r"(?<![\w.\])])([A-Za-z_]\w*)\[((['\"])?[^'\"\[\]]*)$")
_NAME = re.compile(r"(?<![\w.])([A-Za-z_]\w*)?$")
_WORDS = (*keyword.kwlist, *(name for name in dir(builtins) if not name.startswith("_")))
_COMPLETE_TIMEOUT_S = 0.1
"""Kernel and front end add some time; completions appear within 0.15 s in total."""
_INSPECT_TIMEOUT_S = 0.3
_ABANDON_S = 10.0
"""After this time without a reply a request counts as lost, and the rank may get another one."""


class NameSnapshot:
    """A rank's names with their attributes and keys, after its last cell; see `axon_nb.engine.kernel.control`."""

    def __init__(self) -> None:
        self._names: Mapping[str, protocol.KnownName] = {}
        self._types: dict[str, Sequence[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def update(self, names: Mapping[str, protocol.KnownName], types: Mapping[str, Sequence[str]]) -> None:
        """Replace the names with those that the rank reported; callable from any thread."""
        self._types = {**self._types, **types}
        self._names = names

    def names(self) -> list[str]:
        """Return the names."""
        return list(self._names)

    def types(self) -> list[str]:
        """Return the names of the types whose attributes are known."""
        return list(self._types)

    def complete(self, before: str) -> tuple[str, list[str]]:
        """Complete the end of the line `before`: return the text to replace there, and the candidates."""
        if match := _KEY.search(before):
            name, fragment, quote = match.groups()
            return self._keys(name, fragment, quote)
        if match := _ATTRIBUTE.search(before):
            name, fragment = match.groups()
            entry = self._names.get(name, protocol.KnownName())
            attributes = {*entry.own, *self._types.get(entry.type, ())}
            return fragment, _with_prefix(attributes, fragment)
        match = _NAME.search(before)
        fragment = (match.group(1) or "") if match else ""
        if match is None or _in_string(before):
            return "", []
        return fragment, _with_prefix({*self._names, *_WORDS}, fragment)

    def _keys(self, name: str, fragment: str, quote: str | None) -> tuple[str, list[str]]:
        keys = self._names.get(name, protocol.KnownName()).keys
        if quote is None:
            return fragment, [key for key in keys if key.startswith(fragment)]
        inner = fragment[1:]
        return inner, [key[1:-1] for key in keys if key[0] in "'\"" and key[1:].startswith(inner)]


def _with_prefix(words: Iterable[str], prefix: str) -> list[str]:
    """Return the words with this prefix; private ones only if the prefix is private."""
    private = prefix.startswith("_")
    return sorted(word for word in words if word.startswith(prefix) and (private or not word.startswith("_")))


def _in_string(before: str) -> bool:
    return before.count('"') % 2 == 1 or before.count("'") % 2 == 1


class CompletionClient:
    """Requests completions and help from a cluster's ranks over the control channel.

    A rank has at most one open request of each kind.
    """

    def __init__(self, state: ClusterState) -> None:
        self._client = state.connection.client
        self._health = state.health
        self._snapshots: dict[int, NameSnapshot] = {}
        self._open: dict[tuple[int, type[Request[Any]]], tuple[Answer[Any], float]] = {}

    def complete(self, rank: int, line: str, cursor: int) -> tuple[str, list[str]]:
        """Complete `line` at column `cursor`: return the text before the cursor to replace, and the candidates."""
        self._snapshots.setdefault(rank, NameSnapshot())
        reply = self._request(rank, protocol.CompleteRequest(line, cursor), _COMPLETE_TIMEOUT_S)
        if reply is not None:
            return reply.fragment, list(reply.matches)
        known = self._snapshots[rank] or self._snapshots.get(0) or NameSnapshot()
        return known.complete(line[:cursor])

    def names(self, rank: int = 0) -> list[str]:
        """Return the names that the rank had at the last refresh; the first time, ask for them."""
        if rank not in self._snapshots:
            self._snapshots[rank] = NameSnapshot()
            if (reply := self._request(rank, protocol.NamesRequest(()), _COMPLETE_TIMEOUT_S)) is not None:
                self._snapshots[rank].update(reply.names, reply.types)
        return self._snapshots[rank].names()

    def inspect(self, rank: int, name: str, *, detail: int, omit: tuple[str, ...] = ()) -> dict[str, str] | None:
        """Return help on a name as a mime bundle; empty if the rank has no such name, None if it does not answer."""
        reply = self._request(rank, protocol.InspectRequest(name, detail, omit), _INSPECT_TIMEOUT_S)
        return None if reply is None else dict(reply.data)

    @property
    def is_used(self) -> bool:
        """Whether anything was completed yet, so that it is worth fetching names after each cell."""
        return bool(self._snapshots)

    def refresh(self) -> None:
        """Request the names of rank 0 and of all ranks completed on before; does not wait for the replies."""
        for rank in {0, *self._snapshots}:
            snapshot = self._snapshots.setdefault(rank, NameSnapshot())
            answer = self._send(rank, protocol.NamesRequest(tuple(snapshot.types())))
            if answer is not None:
                answer.add_done_callback(lambda done, snapshot=snapshot: _update(snapshot, done))  # type: ignore[misc]

    def _request(self, rank: int, request: Request[R], timeout_s: float) -> R | None:
        answer = self._send(rank, request)
        if answer is None or not answer.wait(timeout_s):
            return None
        try:
            return answer.reply()
        except Exception:  # the rank died in the meantime
            return None

    def _send(self, rank: int, request: Request[R]) -> Answer[R] | None:
        """Send a request; None if the rank is gone or has not replied to the previous request of this kind."""
        kind, answer = type(request), None
        previous, sent_at = self._open.get((rank, kind), (None, 0.0))
        is_open = previous is not None and not previous.done() and time.monotonic() - sent_at < _ABANDON_S
        if rank in self._health.dead or is_open:
            return None
        # The user is typing: a lost rank or cluster is reported where cells run, not here.
        with contextlib.suppress(Exception):
            answer = self._client.request(rank, request)
            self._open[rank, kind] = (answer, time.monotonic())
        return answer


def _update(snapshot: NameSnapshot, answer: Answer[protocol.NamesReply]) -> None:
    with contextlib.suppress(Exception):  # runs on the client's thread; on failure the previous names stay
        reply = answer.result()
        snapshot.update(reply.names, reply.types)
