"""Horovod's timeline: a rank's communication between two calls, as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from axon_nb.compat.horovod.runtime.state import current
from axon_nb.errors import UsageError
from axon_nb.records.spans import ring, write_chrome_trace

__all__ = ["start_timeline", "stop_timeline"]

_begun: list[tuple[str, int]] = []


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Start recording.

    Args:
        file_path: File to which `stop_timeline` writes the trace on rank 0, as Horovod does.
        mark_cycles: Ignored: there are no cycles here.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
        UsageError: a timeline is already being recorded.
    """
    current()
    if _begun:
        raise UsageError(f"a timeline is being recorded for {_begun[0][0]}: call hvd.stop_timeline() first.")
    _begun.append((str(file_path), ring.position))


def stop_timeline() -> None:
    """Stop recording and write the trace.

    Raises:
        NotInitializedError: `hvd.init()` was not called.
    """
    rank = current().rank
    if not _begun:
        return
    path, position = _begun.pop()
    if rank == 0:
        write_chrome_trace([span for span in ring.since(position, limit=1 << 20)[0] if span.rank == rank], path)
