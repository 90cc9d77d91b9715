"""Answers the front end's requests: help on names of ranks, and completions, help and widget states during a cell.

It uses the private hooks `front_end.help`, `front_end.metadata` and `front_end.requests` of the register. If one is
missing, Jupyter's own behaviour remains: help is on the notebook's names, a reply lacks the cell's result for programs,
and completions wait for the end of the cell.

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
import os
import sys
import threading
from collections.abc import Iterable
from contextvars import ContextVar, copy_context
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from axon_nb.cluster.cells.record import MIME_TYPE
from axon_nb.cluster.session.notebook import NotebookSession
from axon_nb.magics.cell_head import target_rank
from axon_nb.records.hooks import missing_hooks

_MAX_LOAD_PER_CORE = 3.0
"""With a higher load average of the last minute, per core, the machine counts as overloaded."""
_SIDE_REQUESTS = ("comm_info_request", "complete_request", "inspect_request", "kernel_info_request")
_is_side_request: ContextVar[bool] = ContextVar("axon_nb_is_side_request", default=False)
"""Whether the current request is answered while a cell runs."""


def _thread(kernel: Any) -> Any:
    return getattr(kernel, "shell_channel_thread", None)


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
        self._kernel_set_parent: Any = getattr(kernel, "set_parent", None)
        self.answers_during_cells = False
        """Whether it also answers while a cell runs."""
        self._cell: dict[str, Any] = {}
        """The message of the last cell."""

    def install(self) -> None:
        """Install the hooks that the kernel has; call it on the main thread."""
        if not missing_hooks("front_end.help", kernel=self._kernel):
            self._kernel.do_inspect = self._do_inspect
        if not missing_hooks("front_end.metadata", kernel=self._kernel):
            self._kernel.finish_metadata = self._finish_metadata
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not missing_hooks("front_end.requests", kernel=self._kernel):
            self.answers_during_cells = True
            self._on_cell_start()  # the cell that runs `install`
            self._kernel.set_parent = self._set_parent
            self._kernel.shell.events.register("pre_execute", self._on_cell_start)
            self._kernel.shell_channel_thread.manager.set_on_recv_callback(self._shell_main)

    def uninstall(self) -> None:
        """Remove the hooks."""
        vars(self._kernel).pop("do_inspect", None)
        vars(self._kernel).pop("finish_metadata", None)
        if self.answers_during_cells:
            del self._kernel.set_parent
            self._kernel.shell.events.unregister("pre_execute", self._on_cell_start)
            self._kernel.shell_channel_thread.manager.set_on_recv_callback(self._kernel.shell_main)

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
            data = cluster.completion.inspect(rank, name, detail=detail_level, omit=omit)
            if data:
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
        reply: dict[str, Any] = self._inspect(code, cursor_pos, detail_level, omit_sections)
        return reply

    async def _shell_main(self, subshell_id: str | None, msg: Any) -> None:
        kernel = self._kernel
        if subshell_id is not None or not kernel._main_asyncio_lock.locked() or not self._waits_for_ranks():
            await kernel.shell_main(subshell_id, msg)
            return
        header = self._header(msg)
        kind = header.get("msg_type")
        if kind not in _SIDE_REQUESTS or (kind == "kernel_info_request" and _is_overloaded()):
            await kernel.shell_main(subshell_id, msg)
            return
        # As `shell_main` does for widgets' messages. The front end waits for "idle"; "busy" then says that the cell
        # is still running.
        context = copy_context()
        context.run(_is_side_request.set, True)
        dispatch = kernel.dispatch_shell(msg, subshell_id=subshell_id, concurrent=True)
        await asyncio.create_task(dispatch, context=context)
        kernel._publish_status("idle", "shell", parent={"header": header})
        if kernel._main_asyncio_lock.locked():  # else the cell has finished meanwhile and published its last "idle"
            kernel._publish_status("busy", "shell", parent=self._cell)

    def _set_parent(self, ident: Any, parent: dict[str, Any], channel: str = "shell") -> None:
        # Only in this context: what other threads of the notebook show meanwhile belongs to the cell.
        if _is_side_request.get():
            self._kernel._shell_parent_ident.set(ident)
            self._kernel._shell_parent.set(parent)
        else:
            self._kernel_set_parent(ident, parent, channel)

    def _waits_for_ranks(self) -> bool:
        cluster = self._session.cluster
        return cluster is not None and bool(cluster.busy)

    def _on_cell_start(self) -> None:
        self._cell = self._kernel.get_parent("shell")

    def _header(self, msg: Any) -> dict[str, Any]:
        session = self._kernel.session
        try:
            _, frames = session.feed_identities(msg, copy=False)
            header: dict[str, Any] = session.deserialize(frames, content=False, copy=False)["header"]
        except Exception:  # ipykernel reports it
            return {}
        return header


def _is_overloaded() -> bool:
    """Return whether the load is so high that a page on this machine should wait for the kernel's info.

    The page uses these seconds to start up. Without them, anywidget abandons a view for good if it is not there 2 s
    after its creation (`Runtime`).
    """
    try:
        return os.getloadavg()[0] > _MAX_LOAD_PER_CORE * (os.cpu_count() or 1)
    except OSError:  # the load is not available
        return True


def install(session: NotebookSession) -> RequestHandler | None:
    """Answer requests to this process's kernel; None if it has none."""
    app = sys.modules.get("ipykernel.kernelapp")
    if app is None or not app.IPKernelApp.initialized():
        return None
    handler = RequestHandler(app.IPKernelApp.instance().kernel, session)
    handler.install()
    return handler
