"""Recording communication as spans, where the group does not do so itself."""

from __future__ import annotations

import time
from typing import Any

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
    torch_group: Any = group.torch_group
    if getattr(torch_group, "emits_spans", False):
        return
    emit(Span(group.ranks[torch_group.rank()], kind, name, start_ns, now(), torch_group.group_name, size))
