"""What this rank waits in, where its groups are torch's own: the recorder's operations, the stack's waiting call."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch.distributed as dist

from axon_nb.engine.groups import flight
from axon_nb.engine.groups.gpu_wait import waits_in
from axon_nb.engine.groups.native import NativeGroups

__all__ = ["native_waits"]


def native_waits(
    native: NativeGroups, pending: list[dict[str, Any]], counts: dict[str, int], *, recorder: str = "nccl"
) -> dict[str, Any]:
    """The answer to ``axon_waits``: calls that have begun and not ended, collectives begun by group.

    It holds ``call`` too when the main thread is in a call that waits for the GPU while an operation is under way.

    Args:
        native: The groups.
        pending: Calls of other groups of this rank.
        counts: Collectives begun in those.
        recorder: As for `flight.dump`.
    """
    groups = {str(group.group_name): dist.get_process_group_ranks(group) for group in native.all()}
    seen = flight.parse(flight.dump(recorder), groups, since_ns=native.formed_at_ns)
    answer = {"pending": [*pending, *seen.pending], "counts": {**counts, **seen.counts}}
    if seen.pending and not pending:
        place = waits_in(sys._current_frames().get(threading.main_thread().ident or 0))
        if place:
            answer["call"] = f"{place}(), behind {seen.pending[0]['name']},"
    return answer
