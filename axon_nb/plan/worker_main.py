"""The child process that simulates: `python -m axon_nb.plan.worker_main`."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from axon_nb.host.children import set_parent_death_signal

_NUM_FRAMES = 3
_MAX_BYTES = 4 * 1024**3
"""A plan needs a fraction of this; a model that is built with its values needs more."""
_TORCH_OUT_OF_MEMORY = "can't allocate memory"


def main(number: int, parent: int) -> None:
    """Answer one task.

    Args:
        number: File descriptor of the pipe.
        parent: Pid of the process that asks.
    """
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return  # it died before that
    _bound_memory()
    with Connection(number) as pipe:
        path, function, task = pickle.loads(pipe.recv_bytes())
        sys.path[:] = path

        def report(share: float, text: str) -> None:
            pipe.send_bytes(pickle.dumps(("progress", (share, text))))

        pipe.send_bytes(pickle.dumps(_call(function, task, report)))


def _memory_limit() -> int:
    """Bytes that this process and each of its forks may use."""
    return min(_MAX_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def _bound_memory() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _memory_limit()
    if most == resource.RLIM_INFINITY or limit < most:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def _call(function: bytes, task: bytes, report: Any) -> tuple[str, Any]:
    from axon_nb.errors import UsageError

    try:
        return "value", pickle.loads(function)(_unpickled(task), report)
    except UsageError as error:
        return "refused", str(error)
    except BrokenPipeError:
        raise  # the answer is no longer wanted
    except Exception as error:
        if isinstance(error, MemoryError) or _TORCH_OUT_OF_MEMORY in str(error):
            return "refused", (
                f"The simulator needs more than its limit of {_memory_limit() / 1024**3:.1f} GiB of memory: make the "
                "model and its inputs without data, for example without loading weights."
            )
        frames = "".join(traceback.format_tb(error.__traceback__)[-_NUM_FRAMES:])
        return "failed", f"The simulator failed: {type(error).__name__}: {error}\n{frames}"


def _unpickled(task: bytes) -> Any:
    from axon_nb.plan.errors import PlanError

    try:
        return pickle.loads(task)
    except Exception as error:
        raise PlanError(
            f"The request cannot be unpickled in another process ({type(error).__name__}: {error}): everything that "
            "the model, its inputs and its loss use must be importable, or defined in the notebook."
        ) from error


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
