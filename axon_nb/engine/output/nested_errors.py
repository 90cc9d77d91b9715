"""Errors that IPython shows and swallows: of `%run`, of `get_ipython().run_cell(…)`, and of its callbacks.

In a notebook they appear where they happen, and front ends that run notebooks stop there. On a rank they are written
to standard error at once, and the cell fails when it ends.

IPython prints the arguments of a callback that fails, among them the metadata of our request; here only its name is
shown.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from axon_nb.engine.groups.abort import AbortedError
from axon_nb.records.protocol.cells import AbortLocation
from axon_nb.shell.user_frame import user_frame

_ABORTS = (AbortedError, KeyboardInterrupt, asyncio.CancelledError)
_NOTE = "The traceback is above: what the cell had called failed, and the cell continued."
_EXIT_NOTE = "The cell counts as failed; the rank keeps running with its state."


@dataclass(frozen=True, slots=True)
class NestedError:
    """The first error of a cell that was shown and swallowed."""

    name: str
    text: str
    aborted_at: AbortLocation | None
    """Where the cell was if it was aborted or interrupted."""
    exit: str | None = None
    """The line that describes a `sys.exit()`; None for other errors."""

    def fail(self, reply: dict[str, Any]) -> None:
        """Make a cell's reply an error."""
        if self.exit is not None:
            traceback = [self.exit, _EXIT_NOTE]
        else:
            traceback = [f"{self.name}: {self.text}", *([] if self.aborted_at else [_NOTE])]
        reply.update(status="error", ename=self.name, evalue=self.text, traceback=traceback)


class NestedErrors:
    """The errors of the running cell that were shown and swallowed."""

    def __init__(self) -> None:
        self._first: NestedError | None = None
        self._in_callback = False
        """Whether IPython shows the error of a callback."""

    def install(self, shell: Any) -> None:
        """Have IPython's events show the errors of their callbacks without the arguments."""
        events = shell.events

        def trigger(event: str, *args: Any, **kwargs: Any) -> None:
            for function in list(events.callbacks[event]):
                try:
                    function(*args, **kwargs)
                except KeyboardInterrupt:
                    shell.showtraceback()
                except Exception:
                    name = getattr(function, "__qualname__", type(function).__name__)
                    sys.stderr.write(f"Error in the callback {name} of IPython's event {event}:\n")
                    before, self._in_callback = self._in_callback, True
                    try:
                        shell.showtraceback()
                    finally:
                        self._in_callback = before

        events.trigger = trigger

    def is_nested(self, shell: Any) -> bool:
        """Whether the error that IPython is about to show is not the one with which the cell ends."""
        if getattr(shell.displayhook, "msg", None) is not None:
            return False  # a value that cannot be shown: ipykernel's reply has its error
        return self._in_callback or user_frame(inspect.currentframe()) is not None

    def note(self, error: BaseException, text: str, rendered: list[str], inner: AbortLocation) -> None:
        """Show an error that IPython will swallow, and remember that the cell has failed.

        Args:
            error: The error.
            text: What `str` gives for it.
            rendered: Its traceback; empty if it has been shown.
            inner: Where it was raised, in what the cell had called.
        """
        if sys.exc_info()[1] is None:  # `%tb` shows an earlier error
            sys.stderr.write("\n".join(rendered) + "\n")
            return
        where = exit_line = None
        frame: FrameType | None = user_frame(inspect.currentframe())
        line = None if frame is None else frame.f_lineno
        if isinstance(error, _ABORTS):
            where = replace(inner, line=line)
        elif isinstance(error, SystemExit):  # IPython's text hides the status in a hint to `%tb`
            exit_line = f"SystemExit at line {line}{inner.within}: sys.exit({error.code!r})"
        elif rendered:
            sys.stderr.write("\n".join(rendered) + "\n")
        if self._first is None:
            self._first = NestedError(type(error).__name__, text, where, exit_line)

    def fail(self, reply: dict[str, Any], aborted_at: AbortLocation | None) -> AbortLocation | None:
        """Make the reply of a cell that has ended an error if there was one; return where the cell was aborted."""
        first, self._first = self._first, None
        if first is None:
            return aborted_at
        if reply["status"] == "ok":
            first.fail(reply)
        return aborted_at or first.aborted_at
