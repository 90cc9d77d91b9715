"""Kernels whose views wait for every rank.

A view leaves out the ranks that do not answer within a second or so, and shows what they have to tell the next time. A
test that looks once has to wait for all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.kernel import Kernel

__all__ = ["patient"]

_PATIENT = """
import contextlib
from unittest import mock
from axon_nb.cluster.session import current
from axon_nb.cluster.inspection.span_feed import SpanFeed, span_feed
patience, patience_collect = contextlib.ExitStack(), SpanFeed.collect
def patience_collect_all(self, *, timeout_s=2.0, watch_s=0.0):
    patience_collect(self, timeout_s=60.0, watch_s=600.0 if watch_s else 0.0)
patience.enter_context(mock.patch.object(SpanFeed, "collect", patience_collect_all))
for patience_limit, patience_s in {
    "status._TIMEOUT_S": 60.0, "job._TIMEOUT_S": 60.0, "shards._TIMEOUT_S": 60.0, "memory._TIMEOUT_S": 60.0,
    "memory._PLANNER_TIMEOUT_S": 60.0, "span_feed._WATCH_S": 600.0,
}.items():
    patience.enter_context(mock.patch(f"axon_nb.cluster.inspection.{patience_limit}", patience_s))
"""
_AS_BEFORE = "patience.close()\nspan_feed(current.require('test').state).collect(timeout_s=60.0, watch_s=0.01)"


@contextlib.contextmanager
def patient(kernel: Kernel) -> Iterator[None]:
    """Within it the views of the kernel wait for a minute, and ranks record for ten once they were asked to."""
    kernel.ok(_PATIENT)
    try:
        yield
    finally:
        kernel.ok(_AS_BEFORE)
