"""One line instead of a traceback for a rank whose cell was ended from outside.

Rendering a traceback takes 100-400 ms, on every rank at once, and says only where torch waits.

Failures of a size that a notebook can show, before IPython renders them.

IPython looks up the module of every frame among all that are loaded: 7 ms each with torch, and a recursion error has a
thousand. On a busy machine the notebook gave the rank up meanwhile. And ipykernel sends each failure on the output
channel besides, in full length, where nobody reads it: the reply has it. Private hooks: `showtraceback`'s
`_showtraceback` and the `structured_traceback` of `InteractiveTB`; where one is missing IPython's own ways are left.
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
from axon_nb.engine.groups.abort import Aborted
from axon_nb.engine.user_frame import RUN_CODE
from axon_nb.records.protocol.cells import Interruption

__all__ = [
    "bounded",
    "find_place",
    "install_bounded_traceback",
    "install_short_traceback",
    "missing_traceback_hooks",
    "shortened",
    "take_place",
]

_place: list[Interruption] = []


def install_short_traceback(shell: Any) -> None:
    """Have `shell` show one line when a cell was aborted or interrupted."""

    def show(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> Any:
        line, call = find_place(trace)
        _place[:] = [Interruption(line, call)]
        text = [f"{kind.__name__} at line {line}: {error}"]
        shell._showtraceback(kind, error, text)
        return text

    shell.set_custom_exc((Aborted, KeyboardInterrupt, asyncio.CancelledError), show)


def take_place() -> Interruption | None:
    """Where the last ended cell was; None when it was not ended from outside."""
    return _place.pop() if _place else None


def find_place(trace: TracebackType | None) -> tuple[int | None, str]:
    """The cell's line, and the function of torch.distributed that it had called, in a traceback."""
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


_ALIKE = 10
"""Calls of one function that are shown of a traceback, from its outer and as many from its inner end."""
_FIRST, _LAST = 60, 30
"""The same of all calls."""


def missing_traceback_hooks(shell: Any) -> list[str]:
    """Names of the hooks that this IPython does not have."""
    absent = [name for name in ("_showtraceback", "_last_traceback") if not hasattr(shell, name)]
    if not hasattr(getattr(shell, "InteractiveTB", None), "structured_traceback"):
        absent.append("InteractiveTB.structured_traceback")
    return absent


def install_bounded_traceback(shell: Any) -> None:
    """Have `shell` render the ends of long tracebacks only, and keep what it rendered for the reply alone."""
    absent = missing_traceback_hooks(shell)
    if "_showtraceback" not in absent:
        shell._showtraceback = _keeper(shell)
    if "InteractiveTB.structured_traceback" not in absent:
        shell.InteractiveTB.structured_traceback = bounded(shell.InteractiveTB.structured_traceback)


def _keeper(shell: Any) -> Any:
    def keep(kind: type[BaseException], error: BaseException, rendered: list[str]) -> None:
        sys.stdout.flush()  # what was printed before belongs above
        sys.stderr.flush()
        str(error)  # an exception without a text fails here, where IPython can still tell of that
        if getattr(shell.displayhook, "msg", None) is not None:
            shell._last_traceback_during_displayhook = True
        shell._last_traceback = rendered

    return keep


def bounded(render: Any) -> Any:
    """IPython's `structured_traceback`, of the ends of long tracebacks only."""

    def rendered(kind: Any, error: Any, trace: Any = None, tb_offset: int | None = None, context: int = 5) -> list[str]:
        if kind is None:
            kind, error, trace = sys.exc_info()
        with _short_chain(error) as left_out:
            if isinstance(trace, TracebackType):
                trace, _ = shortened(trace)
            lines: list[str] = render(kind, error, trace, tb_offset, context)
        if left_out:
            lines.append(f"({left_out:,} of its calls are not shown.)")
        return lines

    return rendered


def shortened(trace: TracebackType) -> tuple[TracebackType, int]:
    """A traceback of its outermost and innermost calls, and how many were left out; itself when it is short."""
    calls: list[TracebackType] = []
    inner: TracebackType | None = trace
    while inner is not None:
        calls.append(inner)
        inner = inner.tb_next
    kept = _without_repeats(calls)
    if len(kept) > _FIRST + _LAST:
        kept = kept[:_FIRST] + kept[-_LAST:]
    if len(kept) == len(calls):
        return trace, 0
    chain: TracebackType | None = None
    for call in reversed(kept):
        chain = TracebackType(chain, call.tb_frame, call.tb_lasti, call.tb_lineno)
    assert chain is not None
    return chain, len(calls) - len(kept)


def _without_repeats(calls: Sequence[TracebackType]) -> list[TracebackType]:
    """A recursion's first and last calls."""
    total = Counter(call.tb_frame.f_code for call in calls)
    seen: Counter[CodeType] = Counter()
    kept = []
    for call in calls:
        code = call.tb_frame.f_code
        seen[code] += 1
        if seen[code] <= _ALIKE or seen[code] > total[code] - _ALIKE:
            kept.append(call)
    return kept


@contextlib.contextmanager
def _short_chain(error: BaseException | None) -> Iterator[int]:
    """While the block runs, an exception and those that it came from have short tracebacks; how many calls are gone."""
    whole: list[tuple[BaseException, TracebackType]] = []
    left_out, seen = 0, set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if (trace := error.__traceback__) is not None:
            short, count = shortened(trace)
            if count:
                whole.append((error, trace))
                error.__traceback__ = short
                left_out += count
        error = error.__cause__ or error.__context__
    try:
        yield left_out
    finally:
        for changed, trace in whole:
            changed.__traceback__ = trace
