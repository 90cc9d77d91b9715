"""What the notebook is told when it asks for spans; asking while somebody looks also keeps the finer ones recorded."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch.distributed as dist

from axon_nb.engine.collective_functions import PUBLIC_NAMES
from axon_nb.engine.groups.install import all_groups
from axon_nb.engine.session import RankSession, current
from axon_nb.engine.step_spans import StepSpans
from axon_nb.records.span import Span
from axon_nb.records.trace import ring

__all__ = ["SpanReader", "span_reader"]

_COMMUNICATION = frozenset({"collective", "p2p", "wait"})


class SpanReader:
    """Reads this rank's ring for one notebook.

    Args:
        session: The rank.
    """

    def __init__(self, session: RankSession) -> None:
        self._steps = StepSpans(session)
        self._members: dict[str, list[int]] = {}

    def read(self, *, since: int, watch_s: float) -> dict[str, Any]:
        """What has been recorded.

        Args:
            since: Number of the first span that is wanted, as the last answer said; 0: as old as are kept.
            watch_s: For how many seconds forwards, backwards and steps are recorded besides, from now; 0: as before.

        Returns:
            ``spans`` (rows of `Span`), ``next``, ``lost`` (spans that came too fast), ``groups`` (ranks by name of
            the groups in them), ``now_ns`` (this host's clock), ``process`` (another one begins to count anew).
        """
        if watch_s > 0:
            self._steps.watch(watch_s)
        asked = since if since <= ring.position else 0
        spans, position, lost = ring.since(asked)
        rows = [_named(span) for span in spans]
        groups = {row[5] for row in rows if row[5]}
        return {
            "spans": rows,
            "next": position,
            "lost": lost if asked else 0,
            "groups": {name: members for name in groups if (members := self._ranks_of(name))},
            "now_ns": time.monotonic_ns(),
            "process": os.getpid(),
        }

    def _ranks_of(self, name: str) -> list[int]:
        if name not in self._members:
            self._members = {str(group.group_name): dist.get_process_group_ranks(group) for group in list(all_groups())}
        return self._members.get(name, [])


def _named(span: Span) -> list[Any]:
    """By the name that users know."""
    row = list(span)
    if span.kind in _COMMUNICATION:
        row[2] = PUBLIC_NAMES.get(span.name, span.name)
    return row


@functools.cache
def span_reader() -> SpanReader:
    """The one of this rank."""
    return SpanReader(current())
