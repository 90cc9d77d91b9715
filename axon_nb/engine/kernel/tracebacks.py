"""Shortens tracebacks: one line for aborted cells, and a bounded number of calls for all others.

Rendering the traceback of an aborted rank takes 100-400 ms, on every rank at once, and shows only where torch waits.

IPython looks up the module of every frame among all loaded ones: 7 ms each with torch, and a recursion error has a
thousand frames. On a busy machine the notebook considered the rank dead meanwhile. So tracebacks are shortened before
they are rendered. ipykernel also publishes each error in full on the output channel, where nobody reads it: the reply
has it.

`str` of an error runs the user's code, which may take seconds or fail. IPython and ipykernel each need the text, so
they get a stand-in with the error's name and text, and the text is read once.

Private hooks: `showtraceback`'s `_showtraceback`, and of `InteractiveTB` the `structured_traceback` and the frames that
it renders. Without them IPython's own behaviour stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

from IPython.core import ultratb

from axon_nb.engine.collective_names import is_public_call
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.output.nested_errors import install_callback_errors, is_nested, note_error
from axon_nb.engine.user_frame import RUN_CODE, describe_inner, library_of
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.cells import AbortLocation

__all__ = [
    "bound_traceback",
    "find_location",
    "install_bounded_traceback",
    "install_short_traceback",
    "restore_error",
    "shorten_traceback",
    "take_abort_location",
]

_location: list[AbortLocation] = []
_ABORTS = (AbortedError, KeyboardInterrupt, asyncio.CancelledError)


def install_short_traceback(shell: Any) -> None:
    """Have `shell` show one line for a cell that was aborted or interrupted, and an exception group as a traceback."""

    def show(shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None) -> Any:
        if isinstance(error, BaseExceptionGroup):  # IPython writes it to stderr, and the reply has no traceback
            text = _render_group(error, trace)
            shell._showtraceback(kind, error, text)
            return text
        where = abort_location(trace)
        _location[:] = [where]
        text = [f"{kind.__name__} at line {where.line}{where.within}: {error}"]
        shell._showtraceback(kind, error, text)
        return text

    shell.set_custom_exc((*_ABORTS, BaseExceptionGroup), show)


def _render_group(group: BaseExceptionGroup[Any], trace: TracebackType | None) -> list[str]:
    while trace is not None and trace.tb_frame.f_code is RUN_CODE:
        trace = trace.tb_next
    with _short_chain(group):
        return [line.rstrip("\n") for line in traceback.format_exception(type(group), group, trace)]


def take_abort_location() -> AbortLocation | None:
    """Remove and return where the last cell was; None if it was not aborted."""
    return _location.pop() if _location else None


def find_location(trace: TracebackType | None) -> tuple[int | None, str]:
    """The cell's line and the torch.distributed function that it called, from a traceback."""
    found = abort_location(trace)
    return found.line, found.call


def abort_location(trace: TracebackType | None) -> AbortLocation:
    """Where a cell was, from the traceback of the error that ended it."""
    line, call, within, cell_file = None, "", "", ""
    while trace is not None:
        frame = trace.tb_frame
        code = frame.f_code
        if frame.f_back is not None and frame.f_back.f_code is RUN_CODE:
            line, cell_file, within = trace.tb_lineno, code.co_filename, ""
        elif not library_of(code.co_filename):
            within = describe_inner(code, trace.tb_lineno, cell_file)
        if not call and is_public_call(code):
            call = code.co_name
        trace = trace.tb_next
    return AbortLocation(line, call, within)


_MAX_REPEATS = 10
"""Calls of one function shown from each end of a traceback."""
_FIRST_CALLS, _LAST_CALLS = 60, 30
"""Calls of all functions shown from each end."""


def install_bounded_traceback(shell: Any) -> None:
    """Have `shell` render only the ends of long tracebacks, and only for the reply."""
    if not missing_hooks("kernel.failures", shell=shell):
        shell._showtraceback = _save_without_publishing(shell)
        install_callback_errors(shell)
        shell.events.register("post_run_cell", _reply_with_stand_in)
    if not missing_hooks("kernel.frames", shell=shell):
        module: Any = ultratb
        module.get_line_number_of_frame = _without_analysis(module.get_line_number_of_frame)
        _release_frames(shell.InteractiveTB)
    if not missing_hooks("kernel.tracebacks", shell=shell):
        shell.InteractiveTB.structured_traceback = bound_traceback(shell.InteractiveTB.structured_traceback)


def _without_analysis(count_lines: Any) -> Any:
    """Have IPython render a cell as in any notebook, where the file of a cell does not exist.

    It then prints the source lines. For other files it parses the source, which its libraries cache forever.
    """

    def count(frame: FrameType) -> int:
        if frame.f_code.co_filename.startswith("<"):
            raise FileNotFoundError(frame.f_code.co_filename)
        return int(count_lines(frame))

    return count


def _release_frames(renderer: Any) -> None:
    """Break the reference cycles in which stack_data holds the frames of a traceback, once it is rendered."""
    records: list[Any] = []
    get_records, render = renderer.get_records, renderer.structured_traceback

    def collect(*args: Any, **kwargs: Any) -> Any:
        added = get_records(*args, **kwargs)
        records.extend(added)
        return added

    def rendered(*args: Any, **kwargs: Any) -> Any:
        try:
            return render(*args, **kwargs)
        finally:
            for record in records:
                if record._sd is not None:
                    vars(record._sd).clear()
            records.clear()

    renderer.get_records, renderer.structured_traceback = collect, rendered


def _save_without_publishing(shell: Any) -> Any:
    def save(kind: type[BaseException], error: BaseException, rendered: list[str]) -> None:
        if is_nested(shell):
            note_error(error, str(_stand_in(error)), rendered, abort_location(error.__traceback__))
            return
        _stand_in(error)  # ipykernel reads name and text from it
        if getattr(shell.displayhook, "msg", None) is not None:
            shell._last_traceback_during_displayhook = True
        shell._last_traceback = rendered

    return save


_stood_in: list[tuple[BaseException, BaseException]] = []
"""The last error that was rendered, and its stand-in."""


def _stand_in(error: BaseException) -> BaseException:
    """Return an exception with the name, text, notes and causes of `error`."""
    if _stood_in and _stood_in[0][0] is error:
        return _stood_in[0][1]
    name, text = "Exception", "<exception str() failed>"
    with contextlib.suppress(BaseException):  # an interrupt ends the text, and the cell ends with its error
        name = str(type(error).__name__)
        text = str(error)
    stand_in: BaseException = type(name, (Exception,), {})(text)
    stand_in.__cause__, stand_in.__context__ = error.__cause__, error.__context__
    stand_in.__suppress_context__ = error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        stand_in.__notes__ = notes
    _stood_in[:] = [(error, stand_in)]
    return stand_in


def _reply_with_stand_in(result: Any) -> None:
    """Let ipykernel, which makes the reply next, see the stand-in."""
    if result is not None and _stood_in and result.error_in_exec is _stood_in[0][0]:
        result.error_in_exec = _stood_in[0][1]


def restore_error(shell: Any) -> None:
    """Put the error itself back into the cell's result, once the reply has been made."""
    result = getattr(shell, "last_execution_result", None)
    if result is not None and _stood_in and result.error_in_exec is _stood_in[0][1]:
        result.error_in_exec = _stood_in[0][0]
    _stood_in.clear()


def bound_traceback(render: Any) -> Any:
    """Wrap IPython's `structured_traceback` to render only the ends of long tracebacks."""

    def rendered(kind: Any, error: Any, trace: Any = None, tb_offset: int | None = None, context: int = 5) -> list[str]:
        if kind is None:
            kind, error, trace = sys.exc_info()
        if isinstance(error, _ABORTS):  # IPython asks for no custom traceback under `%run`
            where = abort_location(trace)
            return [f"{type(error).__name__} at line {where.line}{where.within}: {error}"]
        shown = _stand_in(error) if isinstance(error, BaseException) else error
        with _short_chain(error) as left_out:
            if isinstance(trace, TracebackType):
                trace, _ = shorten_traceback(trace)
            try:
                lines: list[str] = render(type(shown), shown, trace, tb_offset, context)
            except Exception:  # what IPython needs for it, such as `open`, was replaced by the cell
                lines = [f"{type(shown).__name__}: {shown} (line {find_location(trace)[0]})"]
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
