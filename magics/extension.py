"""Loads and unloads the extension: registers magics, transformers and hooks, and answers the front end's requests.

Cells that run on ranks, and our own magics, are completed through IPython's public matcher interface. Once something
was completed, the ranks' names are fetched after each cell, so that they can be completed while ranks do not answer.

Requests use the private hooks `front_end.help`, `front_end.metadata` and `front_end.requests` of the register. If one
is missing, Jupyter's own behaviour remains: help is on the notebook's names, a reply lacks the cell's result for
programs, and completions wait for the end of the cell.

- `do_inspect` answers Shift+Tab; in a cell for ranks, a rank provides the help.
- While an async cell runs, ipykernel holds back all requests except widgets' messages. While a cell of ours waits for
  ranks, completions and help are let through in the same way.
- So are the requests of a reloaded page. It first requests the kernel's info, and sends nothing else until it has it or
  3 s have passed (`DEFAULT_KERNEL_INFO_TIMEOUT` in @jupyterlab/services). It then requests all widget states at once.
  If they do not arrive within 4 s (`CONTROL_COMM_TIMEOUT` in @jupyter-widgets/base-manager), it requests the list of
  widgets and each state separately. If that were held back, the page would have no views until the cell finishes.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.tokenutil import token_at_cursor

from axon_nb.cluster.cells.result import MIME_TYPE
from axon_nb.cluster.cells.source import RANK_MAGICS
from axon_nb.cluster.session import clusters, current
from axon_nb.cluster.session.current import NotebookSession
from axon_nb.errors import AxonError
from axon_nb.magics.arguments import LineParser
from axon_nb.magics.cells import CellMagics, cell_parser
from axon_nb.magics.data import DataMagics
from axon_nb.magics.distributed import DistributedMagics
from axon_nb.magics.input_transformers import (
    AutoMagics,
    auto_cells,
    awaited_cells,
    help_requests,
    injected_parameters,
    target_rank,
)
from axon_nb.magics.views import JobViewMagics, PlanMagics, TimelineMagics, ViewMagics
from axon_nb.records.hooks import hook, missing_hooks
from axon_nb.records.units import count_of
from axon_nb.shell.completers import add_matcher, remove_matcher, simple_completion

if TYPE_CHECKING:
    from IPython.core.completer import CompletionContext, SimpleMatcherResult


_CLASSES = (
    AutoMagics,
    CellMagics,
    DataMagics,
    DistributedMagics,
    JobViewMagics,
    PlanMagics,
    TimelineMagics,
    ViewMagics,
)
_TRANSFORMERS = (injected_parameters, awaited_cells, help_requests, auto_cells)
_MAGIC = re.compile(r"\s*(%%?)(\w+)\s+(.*)$")
_LOCAL = re.compile(r"\s*(%{1,2}\w*|!.*|(import|from)\s.*)$")
"""What the notebook completes without asking a rank: names of magics, shell commands, modules."""
_VALUES = {
    "--backend": ("auto", "shm", "gloo", "nccl"),
    "--devices": ("auto", "cpu"),
    "--engines": ("axon", "local"),
}
"""The possible values of options."""
_REFRESH_DELAY_S = 0.2
"""Names are fetched this long after the last cell, so that consecutive cells are not delayed."""
_TAKES_RANK_NAMES = ("diff", "gather", "inside", "pull", "repair", "shards", "sync")
"""Magics and subcommands that accept names of variables on the ranks."""
Match = tuple[str, list[str], str]
"""(text before the cursor to replace, candidates, the type that a front end shows beside them)"""
_MAX_LOAD_PER_CORE = 3.0
"""With a higher load average of the last minute, per core, the machine counts as overloaded."""
_SIDE_REQUESTS = ("comm_info_request", "complete_request", "inspect_request", "kernel_info_request")
_COMMS = ("comm_open", "comm_msg", "comm_close")
_COLORS = re.compile(r"\x1b\[[\d;]*m")


class Extension:
    """What `%load_ext axon_nb` adds to a notebook's shell besides magics."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        self._shell = shell
        self._session = session
        self._refresh = NameRefresh(session)
        self._requests: RequestHandler | None = None

    def install(self) -> None:
        """Add it."""
        shell, session = self._shell, self._session
        shell.input_transformers_cleanup.extend(_TRANSFORMERS)
        add_matcher(shell, rank_matcher)
        shell.events.register("post_run_cell", self._refresh.after_cell)
        shell.events.register("post_run_cell", session.history.record_cell)
        self._requests = install_request_handler(session)
        session.watch_shutdown()
        session.interrupts.install()
        session.settings.callbacks["warm_up"] = self._warm

    def uninstall(self) -> None:
        """Remove it."""
        shell, session = self._shell, self._session
        for transformer in _TRANSFORMERS:
            shell.input_transformers_cleanup.remove(transformer)
        remove_matcher(shell, rank_matcher)
        shell.events.unregister("post_run_cell", self._refresh.after_cell)
        shell.events.unregister("post_run_cell", session.history.record_cell)
        self._refresh.cancel()
        if self._requests is not None:
            self._requests.uninstall()
        session.interrupts.uninstall()
        session.settings.callbacks.pop("warm_up", None)
        session.auto.on = False

    def _warm(self, on: bool) -> None:
        """Apply the setting `warm_up`."""
        prewarm = self._session.prewarm
        if not on:
            # On a thread, because it waits for a host agent that is still starting.
            threading.Thread(target=prewarm.discard, name="axon_nb-cool-down", daemon=True).start()
        elif self._session.cluster is None:
            prewarm.start()


def load(shell: InteractiveShell) -> None:
    """Register the magics; report a cluster of this notebook that is still running, else start warming up.

    On a rank, where a cell may load the extension by mistake, the magics refuse to run; the hooks are for the notebook.
    """
    session = current.session()
    session.settings.configure(shell.config.get("AxonNB", {}))
    for cls in _CLASSES:
        shell.register_magics(cls)
    if clusters.own_rank() is not None:
        return
    if session.extension is None:
        extension = Extension(shell, session)
        extension.install()
        session.extension = extension
    if session.cluster is not None:
        return
    try:
        waiting = clusters.own_detached()
    except AxonError as error:
        print(error)
        return
    if waiting:
        entry = waiting[0]
        count = count_of(entry.num_ranks, "rank")
        print(
            f"The cluster {entry.name!r} ({count}) of this notebook is still running. Run `%distributed attach` to "
            "reconnect, or `%distributed start` to stop it and start a new one. A cell on ranks reconnects, too."
        )
    elif session.settings.warm_up:
        session.prewarm.start()


def unload(shell: InteractiveShell) -> None:
    """Undo `load`."""
    session = current.session()
    if session.extension is not None:
        session.extension.uninstall()
        session.extension = None
    manager = shell.magics_manager
    for cls in _CLASSES:
        manager.registry.pop(cls.__name__, None)
        for kind, names in cls.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)


def rank_matcher(context: CompletionContext) -> SimpleMatcherResult:
    """Complete at one position in a cell; if there are candidates, those of the notebook are suppressed."""
    match = _match(context.full_text, context.cursor_line, context.cursor_position)
    if match is None:
        return {"completions": [], "suppress": False}
    fragment, texts, kind = match
    completions = [simple_completion(text, kind) for text in texts]
    return {"completions": completions, "matched_fragment": fragment, "suppress": bool(texts)}


# What IPython's decorator `completion_matcher` sets; the highest priority, so that it runs before other matchers.
vars(rank_matcher).update(matcher_priority=1000, matcher_identifier="axon_nb.rank_matcher", matcher_api_version=2)


def _match(text: str, line_number: int, column: int) -> Match | None:
    line = text.split("\n")[line_number]
    before = line[:column]
    if magic := _MAGIC.match(before):
        match = _match_magic(*magic.groups())
        if match is not None or before.startswith("%%") or magic.group(2) in _own_line_magics():
            return match
    if _LOCAL.match(before):
        return None
    session = current.session()
    cluster = session.cluster
    rank = target_rank(text, cluster, session.auto)
    if cluster is None or rank is None:
        return None
    fragment, texts = cluster.completion.complete(rank, line, column)
    if fragment.startswith(".") and all(text.startswith(".") for text in texts):
        fragment, texts = fragment[1:], [text[1:] for text in texts]
    return (fragment, texts, f"rank {rank}") if before.endswith(fragment) else None


def _match_magic(percents: str, name: str, rest: str) -> Match | None:
    words = rest.split()
    partial = "" if not rest or rest[-1].isspace() else words.pop()
    if percents == "%%":
        options = cell_parser(name).options() if name in RANK_MAGICS else []
    elif name == "distributed":
        commands = _commands()
        if not words:
            return partial, _with_prefix(commands, partial), "command"
        name = words.pop(0)
        options = _matching_options(commands.get(name))
    else:
        options = _matching_options(_own_line_magics().get(name))
    if partial.startswith("-"):
        return partial, _with_prefix(options, partial), "option"
    if words and words[-1] in _VALUES:
        return partial, _with_prefix(_VALUES[words[-1]], partial), "value"
    if name == "config":
        return partial, _with_prefix(current.session().settings.assignments(), partial), "setting"
    if name == "auto":
        return partial, _with_prefix(("on", "off"), partial), "value"
    if name in _TAKES_RANK_NAMES and (cluster := current.get()) is not None:
        return partial, _with_prefix(cluster.completion.names(), partial), "rank 0"
    return None


def _commands() -> dict[str, Callable[..., Any]]:
    shell = get_ipython()
    ours = shell.magics_manager.registry.get("DistributedMagics") if shell is not None else None
    return ours.commands() if ours is not None else {}


def _own_line_magics() -> dict[str, Callable[..., Any]]:
    shell = get_ipython()
    magics = shell.magics_manager.magics["line"] if shell is not None else {}
    return {name: magic for name, magic in magics.items() if getattr(magic, "__module__", "").startswith("axon_nb.")}


def _matching_options(command: Callable[..., Any] | None) -> list[str]:
    parser: Callable[[], LineParser] | None = getattr(command, "parser", None)
    return [] if parser is None else parser().options()


def _with_prefix(words: Iterable[str], prefix: str) -> list[str]:
    return sorted(word for word in words if word.startswith(prefix))


class NameRefresh:
    """Fetches the names of the ranks after each cell of a notebook."""

    def __init__(self, session: NotebookSession) -> None:
        self._session = session
        self._timer: asyncio.TimerHandle | None = None

    def after_cell(self, result: Any = None) -> None:
        """Schedule a refresh of the ranks' names; handles IPython's event `post_run_cell`."""
        self.cancel()
        if (cluster := self._session.cluster) is None or not cluster.completion.is_used:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a terminal has no event loop
            self._refresh()
            return
        self._timer = loop.call_later(_REFRESH_DELAY_S, self._refresh)

    def cancel(self) -> None:
        """Cancel the scheduled refresh."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refresh(self) -> None:
        cluster = self._session.cluster
        if cluster is not None:
            cluster.completion.refresh()


class RequestHandler:
    """Answers the front end's requests to one kernel.

    Args:
        kernel: The kernel of this process.
        session: The notebook whose cells it runs.
    """

    def __init__(self, kernel: Any, session: NotebookSession) -> None:
        self._kernel = kernel
        self._session = session
        self._inspect: Any = getattr(kernel, "do_inspect", None)
        self._side = SideRequests(kernel, self._waits_for_ranks)

    def install(self) -> None:
        """Install the hooks that the kernel has; call it on the main thread."""
        if not missing_hooks("front_end.help", kernel=self._kernel):
            self._kernel.do_inspect = self._do_inspect
        if not missing_hooks("front_end.metadata", kernel=self._kernel):
            self._kernel.finish_metadata = self._finish_metadata
        if threading.current_thread() is threading.main_thread():
            self._side.install()

    def uninstall(self) -> None:
        """Remove the hooks."""
        vars(self._kernel).pop("do_inspect", None)
        vars(self._kernel).pop("finish_metadata", None)
        self._side.uninstall()

    def _finish_metadata(self, parent: dict[str, Any], metadata: dict[str, Any], reply: Any) -> dict[str, Any]:
        """Add the record of the cell to the reply's metadata: a message of its own would cost more than the rest."""
        finished: dict[str, Any] = type(self._kernel).finish_metadata(self._kernel, parent, metadata, reply)
        record = self._session.records.pop(parent["header"]["msg_id"], None)
        return finished if record is None else {**finished, MIME_TYPE: dict(record)}

    def _do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Iterable[str] = ()
    ) -> dict[str, Any]:
        cluster = self._session.cluster
        rank = target_rank(code, cluster, self._session.auto)
        name = token_at_cursor(code, cursor_pos)
        if cluster is not None and rank is not None and name and not name.startswith("%"):
            omit = tuple(omit_sections)
            data: dict[str, Any] | None = cluster.completion.inspect(rank, name, detail=detail_level, omit=omit)
            if data:
                if type(self._kernel).__module__.startswith("google.colab."):
                    # Colab's kernel describes an object in this form, and its page reads no other.
                    text = _COLORS.sub("", data.get("text/plain", ""))
                    data["application/json"] = {"found": True, "name": name, "docstring": text}
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
        reply: dict[str, Any] = self._inspect(code, cursor_pos, detail_level, omit_sections)
        return reply

    def _waits_for_ranks(self) -> bool:
        cluster = self._session.cluster
        return cluster is not None and bool(cluster.busy)


def _is_overloaded() -> bool:
    """Return whether the load is so high that a page on this machine should wait for the kernel's info.

    The page uses these seconds to start up. Without them, anywidget abandons a view for good if it is not there 2 s
    after its creation (`Runtime`).
    """
    try:
        return os.getloadavg()[0] > _MAX_LOAD_PER_CORE * (os.cpu_count() or 1)
    except OSError:  # the load is not available
        return True


def install_request_handler(session: NotebookSession) -> RequestHandler | None:
    """Answer requests to this process's kernel; None if it has none."""
    app = sys.modules.get("ipykernel.kernelapp")
    if app is None or not app.IPKernelApp.initialized():
        return None
    handler = RequestHandler(app.IPKernelApp.instance().kernel, session)
    handler.install()
    return handler


class SideRequests:
    """Answers requests at once while a cell waits for ranks.

    Args:
        kernel: The kernel of this process.
        waits_for_ranks: Whether the running cell waits for ranks.
    """

    def __init__(self, kernel: Any, waits_for_ranks: Callable[[], bool]) -> None:
        self._kernel = kernel
        self._waits_for_ranks = waits_for_ranks
        self._tasks: set[asyncio.Task[None]] = set()
        self._hook = ""
        """The hook into this ipykernel; empty: it has none, or nothing is installed."""
        self._cell: dict[str, Any] = {}
        """The message of the last cell."""

    def install(self) -> None:
        """Install it if the kernel has what it needs; call it on the main thread."""
        kernel = self._kernel
        hooks = [group for group in ("front_end.requests", "front_end.lock", "front_end.queue") if hook(group).is_used]
        self._hook = next((group for group in hooks if not missing_hooks(group, kernel=kernel)), "")
        if self._hook:
            self._on_cell_start()  # the cell that runs `install`
            kernel.shell.events.register("pre_execute", self._on_cell_start)
        if self._hook == "front_end.queue":
            kernel.shell_stream.on_recv(self._enqueue, copy=False)
        elif self._hook:
            kernel.shell_channel_thread.manager.set_on_recv_callback(self._receive)

    def uninstall(self) -> None:
        """Undo `install`."""
        kernel, installed, self._hook = self._kernel, self._hook, ""
        if installed:
            kernel.shell.events.unregister("pre_execute", self._on_cell_start)
        if installed == "front_end.queue":
            kernel.shell_stream.on_recv(partial(kernel.schedule_dispatch, kernel.dispatch_shell), copy=False)
        elif installed:
            kernel.shell_channel_thread.manager.set_on_recv_callback(kernel.shell_main)

    def _on_cell_start(self) -> None:
        self._cell = self._kernel.get_parent("shell")

    def _enqueue(self, frames: list[Any]) -> None:
        if not self._takes(frames):
            self._kernel.schedule_dispatch(self._kernel.dispatch_shell, frames)
            return
        task = asyncio.ensure_future(self._answer(frames, self._kernel.shell_stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _receive(self, subshell_id: str | None, frames: list[Any]) -> None:
        if subshell_id is not None or not self._takes(frames):
            await self._kernel.shell_main(subshell_id, frames)
            return
        manager = self._kernel.shell_channel_thread.manager
        await self._answer(frames, manager.get_subshell_to_shell_channel_socket(None))

    def _is_cell_running(self) -> bool:
        is_handling = self._hook != "front_end.requests" or self._kernel._main_asyncio_lock.locked()
        return is_handling and self._waits_for_ranks()

    def _takes(self, frames: list[Any]) -> bool:
        if not self._is_cell_running():
            return False
        session = self._kernel.session
        try:
            _, parts = session.feed_identities(frames, copy=False)
            kind = session.deserialize(parts, content=False, copy=False)["header"]["msg_type"]
        except Exception:  # ipykernel reports it
            return False
        if kind == "kernel_info_request" and _is_overloaded():
            return False
        # Newer kernels let widgets' messages through by themselves.
        return kind in _SIDE_REQUESTS or (kind in _COMMS and self._hook != "front_end.requests")

    async def _answer(self, frames: list[Any], stream: Any) -> None:
        kernel = self._kernel
        idents, parts = kernel.session.feed_identities(frames, copy=False)
        message = kernel.session.deserialize(parts, content=True, copy=False)
        kernel._publish_status("busy", "shell", parent=message)
        try:
            result = kernel.shell_handlers[message["header"]["msg_type"]](stream, idents, message)
            if inspect.isawaitable(result):
                await result
        except Exception:
            kernel.log.error("Exception in message handler:", exc_info=True)
        # The front end waits for "idle"; "busy" then says that the cell is still running.
        kernel._publish_status("idle", "shell", parent=message)
        if self._is_cell_running():  # else the cell has finished meanwhile, and its last "idle" is published
            kernel._publish_status("busy", "shell", parent=self._cell)
