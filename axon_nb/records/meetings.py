"""Matches the calls of a collective on all ranks: which rank was last, and how long the others waited."""

from __future__ import annotations

from dataclasses import dataclass, field

from axon_nb.records.span import Span

__all__ = ["CollectiveMatcher", "CollectiveWait"]

_MAX_OPEN = 8192
"""Maximum number of incomplete collectives; beyond it the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """How long one rank's call of a collective waited; known once all ranks' calls are."""

    number: int
    """The call's number, as given to `add`."""
    waited_ns: int
    """Nanoseconds that the rank was in the call before the last rank started it."""
    last_rank: int
    """The rank that started it last."""


@dataclass(slots=True)
class _OpenCollective:
    name: str
    calls: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By rank: number, start and end in nanoseconds."""


class CollectiveMatcher:
    """Matches calls by group and sequence number in the group.

    Spans of ranks on several hosts must be on a common clock.
    """

    def __init__(self) -> None:
        self._members: dict[str, frozenset[int]] = {}
        self._open: dict[tuple[str, int], _OpenCollective] = {}

    def set_members(self, group: str, ranks: tuple[int, ...]) -> None:
        """Set the ranks of a group; calls in unknown groups are ignored."""
        self._members[group] = frozenset(ranks)

    def add(self, number: int, span: Span) -> list[CollectiveWait]:
        """Add a finished call; if it completes the collective, return the waits of all its calls."""
        members = self._members.get(span.group)
        if members is None or span.rank not in members or len(members) < 2 or not span.sequence:
            return []
        key = (span.group, span.sequence)
        collective = self._open.get(key)
        # Sequence numbers restart when a group is rebuilt: incomplete calls from before do not belong to it.
        if collective is None or collective.name != span.name or span.rank in collective.calls:
            self._open.pop(key, None)
            collective = self._open[key] = _OpenCollective(span.name)
            if len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        collective.calls[span.rank] = (number, span.start_ns, span.end_ns)
        if len(collective.calls) < len(members):
            return []
        del self._open[key]
        last = max(collective.calls, key=lambda rank: collective.calls[rank][1])
        latest = collective.calls[last][1]
        # The source of a broadcast may leave before the others arrive: it has waited no longer than until then.
        return [
            CollectiveWait(own, max(0, min(latest, end) - start), last) for own, start, end in collective.calls.values()
        ]
