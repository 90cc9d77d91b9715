"""Main of the worker process: reads a task from its pipe and answers there."""

from __future__ import annotations

import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["main"]

_NUM_FRAMES = 3


def main(number: int) -> None:
    """Answer one task.

    Args:
        number: File descriptor of the pipe.
    """
    with Connection(number) as pipe:
        path, function, task = pickle.loads(pipe.recv_bytes())
        sys.path[:] = path

        def report(share: float, text: str) -> None:
            pipe.send_bytes(pickle.dumps(("progress", (share, text))))

        pipe.send_bytes(pickle.dumps(_call(function, task, report)))


def _call(function: bytes, task: bytes, report: Any) -> tuple[str, Any]:
    from axon_nb.errors import UsageError

    try:
        return "value", pickle.loads(function)(_unpickled(task), report)
    except UsageError as error:
        return "refused", str(error)
    except BrokenPipeError:
        raise  # the answer is no longer wanted
    except Exception as error:
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
    main(int(sys.argv[1]))
