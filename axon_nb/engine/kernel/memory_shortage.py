"""What a rank's memory held when its cell ran out of it, while the frames of the cell still hold their tensors."""

from __future__ import annotations

import contextlib
import re

from axon_nb.engine.session import RankSession
from axon_nb.records.memory import MemoryShortage

_NAMES = frozenset({"MemoryError", "OutOfMemoryError"})
_TEXT = re.compile(r"can't allocate memory|not enough memory")
"""In a RuntimeError of torch's allocator for CPUs."""


def memory_shortage(session: RankSession, name: str, text: str) -> MemoryShortage | None:
    """Measure what this rank's memory holds; None if its cell failed for another reason.

    Call it on the main thread, before the failed cell's frames are released.

    Args:
        session: This rank.
        name: Name of the error that ended the cell.
        text: Its text.
    """
    if name not in _NAMES and not (name == "RuntimeError" and _TEXT.search(text)):
        return None
    from axon_nb.engine.inspection.gradients import GradientReader
    from axon_nb.engine.inspection.memory import measure, modules_and_optimizers
    from axon_nb.engine.live_objects import LiveTensors

    modules, optimizers = modules_and_optimizers((), session)
    use = measure(modules, optimizers, session, gradients=GradientReader(session), live_tensors=LiveTensors())
    states = sharded = 0
    with contextlib.suppress(Exception):  # an unusual model, or no memory for the estimate: the measured part is enough
        from axon_nb.engine.inspection.memory_estimate import sharded_estimate  # takes seconds

        states, sharded = sharded_estimate(modules, optimizers, session)
    return MemoryShortage(use, states, sharded, session.config.world_size)
