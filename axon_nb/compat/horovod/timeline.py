"""Horovod's timeline: what a rank communicated between two calls, as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from axon_nb.compat.horovod.state import current
from axon_nb.errors import UsageError
from axon_nb.records.chrome import write_chrome_trace
from axon_nb.records.trace import ring

__all__ = ["start_timeline", "stop_timeline"]

_begun: list[tuple[str, int]] = []


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record.

    Args:
        file_path: Where `stop_timeline` writes the trace on rank 0, as Horovod does.
        mark_cycles: Ignored: there are no cycles here.

    Raises:
        NotInitializedError: `hvd.init()` comes first.
        UsageError: a timeline has begun already.
    """
    current()
    if _begun:
        raise UsageError(f"a timeline is being recorded for {_begun[0][0]}: hvd.stop_timeline() comes first.")
    _begun.append((str(file_path), ring.position))


def stop_timeline() -> None:
    """Write what was recorded.

    Raises:
        NotInitializedError: `hvd.init()` comes first.
    """
    rank = current().rank
    if not _begun:
        return
    path, position = _begun.pop()
    if rank == 0:
        write_chrome_trace([span for span in ring.since(position, limit=1 << 20)[0] if span.rank == rank], path)
