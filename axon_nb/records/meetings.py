"""One collective on all ranks of its group: who came last, and how long each other rank waited for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from axon_nb.records.span import Span

__all__ = ["Late", "Meetings"]

_MAX_OPEN = 8192
"""Collectives that are kept while spans of some ranks have not come; the oldest is given up then."""


@dataclass(frozen=True, slots=True)
class Late:
    """What one rank's call of a collective tells once all ranks' are known."""

    number: int
    """The call's running number, as given to `add`."""
    waited_ns: int
    """For how long the rank was in the call before the last one began it, in nanoseconds."""
    by: int
    """The rank that began it last."""


@dataclass(slots=True)
class _Meeting:
    name: str
    calls: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """By rank: number, start and end in nanoseconds."""


class Meetings:
    """Puts together the calls that belong together, by group and running number in the group.

    Spans of ranks on several hosts have to be on one clock.
    """

    def __init__(self) -> None:
        self._members: dict[str, frozenset[int]] = {}
        self._open: dict[tuple[str, int], _Meeting] = {}

    def know(self, group: str, ranks: tuple[int, ...]) -> None:
        """The ranks of a group; calls in groups that are not known are left aside."""
        self._members[group] = frozenset(ranks)

    def add(self, number: int, span: Span) -> list[Late]:
        """A finished call, numbered by the caller; what is known of the whole collective when it was the last one."""
        members = self._members.get(span.group)
        if members is None or span.rank not in members or len(members) < 2 or not span.sequence:
            return []
        key = (span.group, span.sequence)
        meeting = self._open.get(key)
        # Numbers begin anew when a group is formed anew: what was left open is no part of it.
        if meeting is None or meeting.name != span.name or span.rank in meeting.calls:
            self._open.pop(key, None)
            meeting = self._open[key] = _Meeting(span.name)
            if len(self._open) > _MAX_OPEN:
                del self._open[next(iter(self._open))]
        meeting.calls[span.rank] = (number, span.start_ns, span.end_ns)
        if len(meeting.calls) < len(members):
            return []
        del self._open[key]
        last = max(meeting.calls, key=lambda rank: meeting.calls[rank][1])
        latest = meeting.calls[last][1]
        # Who sends in a broadcast may leave before the others come: it has waited for nobody any longer than that.
        return [Late(own, max(0, min(latest, end) - start), last) for own, start, end in meeting.calls.values()]
