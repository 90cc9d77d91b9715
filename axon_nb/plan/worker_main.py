"""The process of a calculation: reads a task from the pipe it is given, and answers there."""

from __future__ import annotations

import importlib
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["main"]

_SHOWN = 3


def main(number: int) -> None:
    """Answer one task.

    Args:
        number: File descriptor of the pipe.
    """
    with Connection(number) as pipe:
        entry, path, task = pickle.loads(pipe.recv_bytes())
        sys.path[:] = path

        def report(share: float, text: str) -> None:
            pipe.send_bytes(pickle.dumps(("progress", (share, text))))

        pipe.send_bytes(pickle.dumps(_called(entry, task, report)))


def _called(entry: str, task: bytes, report: Any) -> tuple[str, Any]:
    from axon_nb.errors import UsageError

    module, _, name = entry.partition(":")
    try:
        return "value", getattr(importlib.import_module(module), name)(_unpickled(task), report)
    except UsageError as error:
        return "refused", str(error)
    except BrokenPipeError:
        raise  # nobody waits for the answer
    except Exception as error:
        frames = "".join(traceback.format_tb(error.__traceback__)[-_SHOWN:])
        return "failed", f"The simulator failed: {type(error).__name__}: {error}\n{frames}"


def _unpickled(task: bytes) -> Any:
    from axon_nb.plan.errors import PlanError

    try:
        return pickle.loads(task)
    except Exception as error:
        raise PlanError(
            f"what was asked for cannot be read in another process ({type(error).__name__}: {error}): what the model, "
            "its inputs and its loss use is importable there, or defined in the notebook."
        ) from error


if __name__ == "__main__":
    main(int(sys.argv[1]))
