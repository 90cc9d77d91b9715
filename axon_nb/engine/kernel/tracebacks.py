"""Shortens tracebacks: one line for aborted cells, and a bounded number of calls for all others.

Rendering the traceback of an aborted rank takes 100-400 ms, on every rank at once, and shows only where torch waits.

IPython looks up the module of every frame among all loaded ones: 7 ms each with torch, and a recursion error has a
thousand frames. On a busy machine the notebook considered the rank dead meanwhile. So tracebacks are shortened before
they are rendered. ipykernel also publishes each error in full on the output channel, where nobody reads it: the reply
has it.

Private hooks: `showtraceback`'s `_showtraceback` and the `structured_traceback` of `InteractiveTB`. Without them
IPython's own behaviour stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType, TracebackType
from typing import Any

from axon_nb.engine.collective_names import is_public_call
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.user_frame import RUN_CODE
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.cells import AbortLocation

__all__ = [
    "bound_traceback",
    "find_location",
    "install_bounded_traceback",
    "install_short_traceback",
    "shorten_traceback",
    "take_abort_location",
]

_location: list[AbortLocation] = []


def install_short_traceback(shell: Any) -> None:
    """Have `shell` show one line for a cell that was aborted or interrupted."""

    def show(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> Any:
        line, call = find_location(trace)
        _location[:] = [AbortLocation(line, call)]
        text = [f"{kind.__name__} at line {line}: {error}"]
        shell._showtraceback(kind, error, text)
        return text

    shell.set_custom_exc((AbortedError, KeyboardInterrupt, asyncio.CancelledError), show)


def take_abort_location() -> AbortLocation | None:
    """Remove and return where the last cell was; None if it was not aborted."""
    return _location.pop() if _location else None


def find_location(trace: TracebackType | None) -> tuple[int | None, str]:
    """The cell's line and the torch.distributed function that it called, from a traceback."""
    line, call = None, ""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_back is not None and frame.f_back.f_code is RUN_CODE:
            line = trace.tb_lineno
        code = frame.f_code
        if not call and is_public_call(code):
            call = code.co_name
        trace = trace.tb_next
    return line, call


_MAX_REPEATS = 10
"""Calls of one function shown from each end of a traceback."""
_FIRST_CALLS, _LAST_CALLS = 60, 30
"""Calls of all functions shown from each end."""


def install_bounded_traceback(shell: Any) -> None:
    """Have `shell` render only the ends of long tracebacks, and only for the reply."""
    if not missing_hooks("kernel.failures", shell=shell):
        shell._showtraceback = _save_without_publishing(shell)
    if not missing_hooks("kernel.tracebacks", shell=shell):
        shell.InteractiveTB.structured_traceback = bound_traceback(shell.InteractiveTB.structured_traceback)


def _save_without_publishing(shell: Any) -> Any:
    def save(kind: type[BaseException], error: BaseException, rendered: list[str]) -> None:
        sys.stdout.flush()  # earlier output belongs above the traceback
        sys.stderr.flush()
        str(error)  # a failing `__str__` fails here, where IPython can still report it
        if getattr(shell.displayhook, "msg", None) is not None:
            shell._last_traceback_during_displayhook = True
        shell._last_traceback = rendered

    return save


def bound_traceback(render: Any) -> Any:
    """Wrap IPython's `structured_traceback` to render only the ends of long tracebacks."""

    def rendered(kind: Any, error: Any, trace: Any = None, tb_offset: int | None = None, context: int = 5) -> list[str]:
        if kind is None:
            kind, error, trace = sys.exc_info()
        with _short_chain(error) as left_out:
            if isinstance(trace, TracebackType):
                trace, _ = shorten_traceback(trace)
            try:
                lines: list[str] = render(kind, error, trace, tb_offset, context)
            except Exception:  # what IPython needs for it, such as `open`, was replaced by the cell
                lines = [f"{kind.__name__}: {error} (line {find_location(trace)[0]})"]
        if left_out:
            lines.append(f"({left_out:,} calls are not shown.)")
        return lines

    return rendered


def shorten_traceback(trace: TracebackType) -> tuple[TracebackType, int]:
    """Shorten a traceback to its outermost and innermost calls; return it and the number of omitted calls."""
    calls: list[TracebackType] = []
    inner: TracebackType | None = trace
    while inner is not None:
        calls.append(inner)
        inner = inner.tb_next
    remaining = _without_repeats(calls)
    if len(remaining) > _FIRST_CALLS + _LAST_CALLS:
        remaining = remaining[:_FIRST_CALLS] + remaining[-_LAST_CALLS:]
    if len(remaining) == len(calls):
        return trace, 0
    chain: TracebackType | None = None
    for call in reversed(remaining):
        chain = TracebackType(chain, call.tb_frame, call.tb_lasti, call.tb_lineno)
    assert chain is not None
    return chain, len(calls) - len(remaining)


def _without_repeats(calls: Sequence[TracebackType]) -> list[TracebackType]:
    """Keep the first and last calls of each recursive function."""
    total = Counter(call.tb_frame.f_code for call in calls)
    seen: Counter[CodeType] = Counter()
    remaining = []
    for call in calls:
        code = call.tb_frame.f_code
        seen[code] += 1
        if seen[code] <= _MAX_REPEATS or seen[code] > total[code] - _MAX_REPEATS:
            remaining.append(call)
    return remaining


@contextlib.contextmanager
def _short_chain(error: BaseException | None) -> Iterator[int]:
    """Shorten the tracebacks of an exception and its causes inside the block; yields the number of omitted calls."""
    originals: list[tuple[BaseException, TracebackType]] = []
    left_out, seen = 0, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if (trace := error.__traceback__) is not None:
            short, count = shorten_traceback(trace)
            if count:
                originals.append((error, trace))
                error.__traceback__ = short
                left_out += count
        error = error.__cause__ or error.__context__
    try:
        yield left_out
    finally:
        for changed, trace in originals:
            changed.__traceback__ = trace
