"""Adapts IPython's shell to ranks: names of cells, `subgroup`, shell commands, exits, and tracebacks that stay short.

IPython swallows an interrupt that stops a `!command`; here it also stops the cell. `sys.exit()` and `exit()` stop the
cell on that rank, never the rank, and a note says so. `subgroup` is the process group of exactly the ranks that run the
cell, created once per set of ranks.

Rendering the traceback of an aborted rank takes 100-400 ms, on every rank at once, and shows only where torch waits: it
gets one line. IPython looks up the module of every frame among all loaded ones: 7 ms each with torch, and a recursion
error has a thousand frames. On a busy machine the notebook considered the rank dead meanwhile. So tracebacks are
shortened before they are rendered. ipykernel also publishes each error in full on the output channel, where nobody
reads it: the reply has it.

`str` of an error runs the user's code, which may take seconds or fail. IPython and ipykernel each need the text, so
they get a plain copy with the error's name and text, and the text is read once.

Cells and libraries such as rich replace what shows errors. What they install shows those of the user's code; an aborted
rank keeps its one line, and the reply names the user's lines.

Private hooks: `showtraceback`'s `_showtraceback`, and of `InteractiveTB` the `structured_traceback` and the frames that
it renders. Without them IPython's own behaviour stays.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import functools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from IPython.core import ultratb
from IPython.core.compilerop import CachingCompiler
from IPython.core.error import UsageError
from msgspec.structs import replace

from axon_nb.engine.frames import is_public_call
from axon_nb.engine.groups.abort import AbortedError
from axon_nb.engine.groups.creation import c10d, named_group
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.output import NestedErrors
from axon_nb.engine.session import RankSession
from axon_nb.records.hooks import hook, missing_hooks
from axon_nb.records.protocol.cells import AbortLocation
from axon_nb.records.stacks import library_of
from axon_nb.shell import RUN_CODE, cell_of_file, describe_inner

NAME = "subgroup"
_ABORTS = (AbortedError, KeyboardInterrupt, asyncio.CancelledError)
_MAX_REPEATS = 10
"""Calls of one function shown from each end of a traceback."""
_FIRST_CALLS, _LAST_CALLS = 60, 30
"""Calls of all functions shown from each end."""
_NOTE = "The cell stopped on this rank and counts as failed; the rank keeps running with its state."


def bind_subgroup(session: RankSession, ranks: Sequence[int], *, wanted: bool) -> None:
    """Bind the group of `ranks` to its name in the namespace; collective over them if the group is created.

    A variable of that name that the user has set is not changed.

    Args:
        session: This rank.
        ranks: The ranks that run the cell, including this one.
        wanted: Whether the cell mentions the name. If not, an existing binding is only updated to the cell's ranks.

    Raises:
        AbortedError: the cell was aborted while its ranks were creating the group.
    """
    namespace = session.kernel.shell.user_ns
    bound = session.subgroup
    if (NAME in namespace and namespace[NAME] is not bound) or not (wanted or NAME in namespace):
        return
    group = get_subgroup(session, ranks, create=wanted)
    if group is None:
        namespace.pop(NAME, None)  # rather than leave the group of other ranks
        return
    session.subgroup = namespace[NAME] = group


def get_subgroup(session: RankSession, ranks: Sequence[int], *, create: bool = True) -> Any:
    """Return the group of exactly `ranks`; with `create`, a missing one is created, which all of them must do.

    Raises:
        AbortedError: the cell was aborted while its ranks were creating the group.
    """
    if len(ranks) == session.config.world_size:
        return dist.group.WORLD
    prefix = f"{NAME}_{'_'.join(map(str, sorted(ranks)))}_"
    group = next((group for group, name in list(c10d._world.pg_names.items()) if name.startswith(prefix)), None)
    if group is not None or not create:
        return group
    session.num_subgroups[prefix] += 1
    with named_group(f"{prefix}{session.num_subgroups[prefix]}"):
        # Only its members create it, as the other ranks do not run the cell.
        return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"{NAME} of a cell")


class Tracebacks:
    """Renders the errors of a rank's cells, and knows which one ended the cell that runs."""

    def __init__(self) -> None:
        self._nested = NestedErrors()
        self._abort_location: AbortLocation | None = None
        """Where the cell was when it was aborted; None if it was not."""
        self._copied: tuple[BaseException, BaseException] | None = None
        """The last error that was rendered, and its plain copy."""
        self._in_reply: BaseException | None = None
        """The last error whose traceback is in the reply."""
        self._hook: Any = None
        """What a cell has put in place of `_showtraceback`."""

    def install(self, shell: Any) -> None:
        """Have `shell` show short tracebacks."""
        register = shell.set_custom_exc

        def set_custom_exc(kinds: tuple[type[BaseException], ...], handler: Any) -> None:
            theirs = () if handler is None else tuple(kinds)

            def show(shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: Any = None) -> Any:
                is_theirs = isinstance(error, theirs) and not isinstance(error, _ABORTS)
                return (handler if is_theirs else self._show)(shell, kind, error, trace, tb_offset=tb_offset)

            register((*_ABORTS, BaseExceptionGroup, *theirs), show)

        shell.set_custom_exc = set_custom_exc
        set_custom_exc((), None)
        self.install_bounded(shell)

    def install_bounded(self, shell: Any) -> None:
        """Have `shell` render only the ends of long tracebacks, and only for the reply."""
        if not missing_hooks("kernel.failures", shell=shell):
            save = self._save_without_publishing(shell)

            def set_hook(_: Any, hook: Any = None) -> None:
                self._hook = None if hook is save else hook

            type(shell)._showtraceback = property(lambda _: save, set_hook, set_hook)
            self._nested.install(shell)
            shell.events.register("post_run_cell", functools.partial(self._complete_reply, shell))
        if hook("kernel.frames").is_used and not missing_hooks("kernel.frames", shell=shell):
            module: Any = ultratb
            module.get_line_number_of_frame = _without_analysis(module.get_line_number_of_frame)
            _release_frames(shell.InteractiveTB)
        if not missing_hooks("kernel.tracebacks", shell=shell):
            shell.InteractiveTB.structured_traceback = self.bound(shell.InteractiveTB.structured_traceback)

    def _show(
        self, shell: Any, kind: type[BaseException], error: BaseException, trace: Any, tb_offset: Any = None
    ) -> list[str]:
        """Show one line for a cell that was aborted or interrupted, and an exception group as a traceback."""
        if isinstance(error, BaseExceptionGroup):  # IPython writes it to stderr, and the reply has no traceback
            text = _render_group(error, trace)
        else:
            where = self._abort_location = abort_location(trace)
            text = [f"{kind.__name__} at line {where.line}{where.within}: {error}"]
        shell._showtraceback(kind, error, text)
        return text

    def _save_without_publishing(self, shell: Any) -> Any:
        def save(kind: type[BaseException], error: BaseException, rendered: list[str]) -> None:
            copy = self._copy(error)  # ipykernel reads name and text from it
            # Lightning's Trainer exits when it is interrupted.
            cut = error.__context__ if isinstance(error, SystemExit) else error
            is_nested, hook = self._nested.is_nested(shell), None if isinstance(cut, _ABORTS) else self._hook
            if hook is not None:
                hook(kind, error, rendered)
                rendered = [] if is_nested else self._places(error)
            if is_nested:
                self._nested.note(error, str(copy), rendered, abort_location(error.__traceback__))
                return
            if getattr(shell.displayhook, "msg", None) is not None:
                shell._last_traceback_during_displayhook = True
            if cut is not error and isinstance(cut, _ABORTS):
                self._copied = error, _plain_copy(cut)
                line = abort_location(error.__traceback__).line
                self._abort_location = replace(abort_location(cut.__traceback__), line=line)
            shell._last_traceback, self._in_reply = rendered, error

        return save

    def _copy(self, error: BaseException) -> BaseException:
        if self._copied is None or self._copied[0] is not error:
            self._copied = error, _plain_copy(error)
        return self._copied[1]

    def _complete_reply(self, shell: Any, result: Any) -> None:
        """Let ipykernel, which makes the reply next, see the copy, and where an error was that other code has shown."""
        error = None if result is None else result.error_in_exec
        if error is not None and error is not self._in_reply and not isinstance(error, UsageError):
            shell._last_traceback = self._places(error)
        if error is not None and self._copied is not None and error is self._copied[0]:
            result.error_in_exec = self._copied[1]

    def _places(self, error: BaseException) -> list[str]:
        """Return the lines of the user's code that an error came through, and its text."""
        trace, places = error.__traceback__, list[str]()
        while trace is not None:
            code, line = trace.tb_frame.f_code, trace.tb_lineno
            if not library_of(file := code.co_filename):
                place = f"{cell}, line {line}" if (cell := cell_of_file(file)) else f"File {file}:{line}"
                places.append(place if code.co_name.startswith("<") else f"{place}, in {code.co_name}")
            trace = trace.tb_next
        copy = self._copy(error)
        return [*places[-_MAX_REPEATS:], f"{type(copy).__name__}: {copy}"]

    def restore_error(self, shell: Any) -> None:
        """Put the error itself back into the cell's result, once the reply has been made."""
        result = getattr(shell, "last_execution_result", None)
        if result is not None and self._copied is not None and result.error_in_exec is self._copied[1]:
            result.error_in_exec = self._copied[0]
        self._copied = self._in_reply = None

    def end_cell(self, reply: dict[str, Any]) -> AbortLocation | None:
        """Make the reply an error if the cell swallowed one; return where the cell was aborted, None if it was not."""
        where, self._abort_location = self._abort_location, None
        return self._nested.fail(reply, where)

    def bound(self, render: Any) -> Any:
        """Wrap IPython's `structured_traceback` to render only the ends of long tracebacks."""

        def rendered(
            kind: Any, error: Any, trace: Any = None, tb_offset: int | None = None, context: int = 5
        ) -> list[str]:
            if kind is None:
                kind, error, trace = sys.exc_info()
            if isinstance(error, _ABORTS):  # IPython asks for no custom traceback under `%run`
                where = abort_location(trace)
                return [f"{type(error).__name__} at line {where.line}{where.within}: {error}"]
            shown = self._copy(error) if isinstance(error, BaseException) else error
            with _short_chain(error) as left_out:
                if isinstance(trace, TracebackType):
                    trace, _ = shorten_traceback(trace)
                try:
                    lines: list[str] = render(type(shown), shown, trace, tb_offset, context)
                except Exception:  # what IPython needs for it, such as `open`, was replaced by the cell
                    lines = [f"{type(shown).__name__}: {shown} (line {abort_location(trace).line})"]
            if left_out:
                lines.append(f"({left_out:,} calls are not shown.)")
            return lines

        return rendered


def _plain_copy(error: BaseException) -> BaseException:
    """Return an exception with the name, text, notes and causes of `error`."""
    name, text = "Exception", "<exception str() failed>"
    with contextlib.suppress(BaseException):  # an interrupt ends the text, and the cell ends with its error
        name = str(type(error).__name__)
        text = str(error)
    copy: BaseException = type(name, (Exception,), {})(text)
    copy.__cause__, copy.__context__ = error.__cause__, error.__context__
    copy.__suppress_context__ = error.__suppress_context__
    if notes := getattr(error, "__notes__", None):
        copy.__notes__ = notes
    return copy


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


def _render_group(group: BaseExceptionGroup[Any], trace: TracebackType | None) -> list[str]:
    while trace is not None and trace.tb_frame.f_code is RUN_CODE:
        trace = trace.tb_next
    with _short_chain(group):
        return [line.rstrip("\n") for line in traceback.format_exception(type(group), group, trace)]


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


def install_cell_names(shell: Any) -> None:
    """Have `shell` name the file of a cell as IPython does in a terminal, ``<ipython-input-3-9f2c61d0a1b4>``.

    Profilers and caches on disk know that name. It is the same on all ranks, so that equal warnings and tracebacks are
    shown once; ipykernel's contains the process id.
    """
    shell.compile.get_code_name = functools.partial(CachingCompiler.get_code_name, shell.compile)


def install_shell_commands(shell: Any, interrupts: InterruptHandler) -> None:
    """Have `!command` and `lines = !command` raise the interrupt that stopped them."""
    for name in ("system", "getoutput"):
        setattr(shell, name, _raise_interrupts(getattr(shell, name), interrupts))


def _raise_interrupts(run: Any, interrupts: InterruptHandler) -> Any:
    def command(*args: Any, **kwargs: Any) -> Any:
        before = interrupts.raised
        result = run(*args, **kwargs)
        if interrupts.raised > before:
            raise KeyboardInterrupt
        return result

    return command


def install_restored_names(shell: Any, predefine: Callable[[], None]) -> None:
    """Bring back what everything else needs: removed builtins after each cell, predefined names after `%reset`.

    Args:
        shell: The rank's shell.
        predefine: Puts the predefined names into its namespace.
    """
    run, reset = shell.run_code, shell.reset
    present, original = vars(builtins), list(vars(builtins).items())

    async def run_code(*args: Any, **kwargs: Any) -> Any:
        try:
            return await run(*args, **kwargs)
        finally:  # no builtin may be used before it is back
            for name, value in original:
                if name not in present:
                    present[name] = value

    def reset_namespace(*args: Any, **kwargs: Any) -> None:
        reset(*args, **kwargs)
        predefine()
        install_exits(shell)

    shell.run_code, shell.reset = run_code, reset_namespace


def install_autoreload(shell: Any) -> None:
    """Have `%autoreload` read new modules after each cell, so that it can update their classes when they are edited.

    It does so before each cell. In a notebook a cell that edits the file comes between; ranks do not run that.
    """

    def read_modules(*_: Any) -> None:
        if (magics := shell.magics_manager.registry.get("AutoreloadMagics")) is not None:
            magics.pre_run_cell(None)

    shell.events.register("post_run_cell", read_modules)


def install_exits(shell: Any) -> None:
    """Have `exit()` and `quit()` act like `sys.exit()`: IPython's own would stop the rank's process."""
    for name in ("exit", "quit"):
        shell.user_ns[name] = sys.exit
    warnings.filterwarnings("ignore", message="To exit: use 'exit', 'quit'", category=UserWarning)


def describe_exit(reply: dict[str, Any], shell: Any) -> None:
    """Explain a `SystemExit` that the cell itself raised, instead of IPython's hint to `%tb`."""
    error = getattr(getattr(shell, "last_execution_result", None), "error_in_exec", None)
    if reply.get("ename") != "SystemExit" or not isinstance(error, SystemExit):
        return
    line = abort_location(error.__traceback__).line
    code = error.code
    reply["evalue"] = "" if code is None else str(code)
    where = f" at line {line}" if line else ""
    reply["traceback"] = [f"SystemExit{where}: sys.exit({'' if code is None else repr(code)})", _NOTE]
