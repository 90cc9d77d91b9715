"""What this rank waits in, where its groups are torch's own: the recorder's operations, and what the stack proves.

On NCCL a collective is only put into the GPU's queue, and the thread stops later, where it needs a value. Which of the
queued operations that value depends on cannot be seen from outside: an `irecv` for the next step may wait for long and
nobody for it. So a wait counts in two places only: `torch.cuda.synchronize`, which needs all of them, and a blocking
function of torch.distributed, such as `barrier`, which needs the one begun last.
"""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

import torch.distributed as dist

from axon_nb.engine.frames import main_frame
from axon_nb.engine.groups.flight import dump, parse
from axon_nb.engine.groups.native import NativeGroups

__all__ = ["native_waits", "synchronizes"]

_CUDA_FILE = os.path.join("torch", "cuda", "__init__.py")


def native_waits(
    native: NativeGroups, pending: list[dict[str, Any]], counts: dict[str, int], *, recorder: str = "nccl"
) -> dict[str, Any]:
    """The answer to ``axon_waits``: calls that have begun and not ended, collectives begun by group.

    It holds ``call`` too while the main thread is in `torch.cuda.synchronize` and an operation is under way.

    Args:
        native: The groups.
        pending: Calls of other groups of this rank.
        counts: Collectives begun in those.
        recorder: As for `dump`.
    """
    groups = {str(group.group_name): dist.get_process_group_ranks(group) for group in native.all()}
    seen = parse(dump(recorder), groups, since_ns=native.formed_at_ns)
    own = list(seen.pending)
    counts = {**counts, **seen.counts}
    if own and not pending and synchronizes(main_frame()):
        return {"pending": own, "counts": counts, "call": f"torch.cuda.synchronize() behind {own[0]['name']}"}
    newest = [call for call in own if call["sequence"]][-1:]
    return {"pending": [*pending, *newest], "counts": counts}


def synchronizes(frame: FrameType | None) -> bool:
    """Whether the innermost `frame` waits for all that its GPU has been asked to do."""
    if frame is None:
        return False
    return frame.f_code.co_name == "synchronize" and frame.f_code.co_filename.endswith(_CUDA_FILE)
