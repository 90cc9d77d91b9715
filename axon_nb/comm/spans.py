"""Record communication as spans, for groups that do not do so themselves."""

from __future__ import annotations

import time

from axon_nb.comm.calls import report_payload
from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.types import Backend
from axon_nb.records.spans import Span, emit

now = time.monotonic_ns
"""The clock of spans, in nanoseconds."""


def record(group: ProcessGroup, name: str, start_ns: int, size: int, *, kind: str = "collective") -> None:
    """Record the span of a finished call.

    Args:
        group: The group of the call.
        name: Name of the operation.
        start_ns: Start of the call, by `now`.
        size: Payload on this rank, in bytes.
        kind: ``collective`` or ``p2p``.
    """
    info = group.info
    if not info.emits_spans:
        emit(Span(info.ranks[info.rank], kind, name, start_ns, now(), info.name, size))
        if info.backend is not Backend.MOCK:  # mock groups report their calls
            report_payload(info.ranks[info.rank], name, size, len(info.ranks))
