"""Recording communication as spans, where the group does not do so itself."""

from __future__ import annotations

import time

from axon_nb.comm.group import ProcessGroup
from axon_nb.records.span import Span
from axon_nb.records.trace import emit

__all__ = ["now", "record"]

now = time.monotonic_ns
"""The clock of spans, in nanoseconds."""


def record(group: ProcessGroup, name: str, start_ns: int, size: int, *, kind: str = "collective") -> None:
    """One call is over.

    Args:
        group: Where it was made.
        name: The operation.
        start_ns: When it began, by `now`.
        size: Payload on this rank, in bytes.
        kind: ``collective`` or ``p2p``.
    """
    facts = group.facts
    if not facts.emits_spans:
        emit(Span(facts.ranks[facts.rank], kind, name, start_ns, now(), facts.name, size))
