"""What the front end asks of the kernel besides cells: help on names of ranks, and answers during a cell.

Private hooks into ipykernel, `front_end.help` and `front_end.requests` in the register; where one is missing Jupyter's
own ways are left: help is on the notebook's names, and completions wait for the end of the cell.

- `do_inspect` answers Shift+Tab; in a cell for ranks a rank answers it.
- ipykernel holds requests back while an async cell runs, but for widgets' messages: completions and help are let
  through in the same way while the cell is one of ours, which only waits for ranks.
- So is what a page asks that is loaded again. It first asks what the kernel is, and sends nothing else until it knows
  or 3 s are over (`DEFAULT_KERNEL_INFO_TIMEOUT` in @jupyterlab/services). Then it asks for all states of widgets at
  once, and where these do not come within 4 s (`CONTROL_COMM_TIMEOUT` in @jupyter-widgets/base-manager) for the list of
  widgets and each state by itself: held back, that would leave the page without its views until the cell is over.
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

from axon_nb.cluster.inspection import completion
from axon_nb.cluster.session import current
from axon_nb.magics.cell_head import target_rank
from axon_nb.records.hooks import missing_hooks

__all__ = ["install", "uninstall"]

_MOST_A_CORE = 3.0
"""Processes that want to run, of the last minute: with more the machine is overloaded."""
_SIDE_REQUESTS = ("comm_info_request", "complete_request", "inspect_request", "kernel_info_request")


_aside: ContextVar[bool] = ContextVar("axon_nb_aside", default=False)
"""Whether a question is answered beside the cell that runs."""


class FrontEnd:
    """Answers for one kernel.

    Args:
        kernel: The kernel of this process.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._inspect: Any = getattr(kernel, "do_inspect", None)
        self._set_for_all: Any = getattr(kernel, "set_parent", None)
        self.lets_through = False
        """Whether it answers during a cell, too."""
        self._cell: dict[str, Any] = {}
        """The message of the last cell."""

    def install(self) -> None:
        """Take over what can be; call it on the main thread."""
        if not missing_hooks("front_end.help", kernel=self._kernel):
            self._kernel.do_inspect = self._do_inspect
        here = threading.current_thread() is threading.main_thread()
        if here and not missing_hooks("front_end.requests", kernel=self._kernel):
            self.lets_through = True
            self._cell_begins()  # the one that installs it
            self._kernel.set_parent = self._set_parent
            self._kernel.shell.events.register("pre_execute", self._cell_begins)
            self._kernel.shell_channel_thread.manager.set_on_recv_callback(self._shell_main)

    def uninstall(self) -> None:
        """Leave it to ipykernel again."""
        vars(self._kernel).pop("do_inspect", None)
        if self.lets_through:
            del self._kernel.set_parent
            self._kernel.shell.events.unregister("pre_execute", self._cell_begins)
            self._kernel.shell_channel_thread.manager.set_on_recv_callback(self._kernel.shell_main)

    def _do_inspect(
        self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Iterable[str] = ()
    ) -> dict[str, Any]:
        cluster = current.get()
        rank = target_rank(code, cluster.world_size) if cluster is not None else None
        name = token_at_cursor(code, cursor_pos)
        if cluster is not None and rank is not None and name and not name.startswith("%"):
            omit = tuple(omit_sections)
            data = completion.of(cluster.state).inspect(rank, name, detail=detail_level, omit=omit)
            if data:
                return {"status": "ok", "found": True, "data": data, "metadata": {}}
        reply: dict[str, Any] = self._inspect(code, cursor_pos, detail_level, omit_sections)
        return reply

    async def _shell_main(self, subshell_id: str | None, msg: Any) -> None:
        kernel = self._kernel
        if subshell_id is not None or not kernel._main_asyncio_lock.locked() or not _waits_for_ranks():
            await kernel.shell_main(subshell_id, msg)
            return
        header = self._header(msg)
        kind = header.get("msg_type")
        if kind not in _SIDE_REQUESTS or (kind == "kernel_info_request" and _is_overloaded()):
            await kernel.shell_main(subshell_id, msg)
            return
        # As `shell_main` does for widgets' messages. The front end waits for "idle", and is told that the cell runs on.
        aside = copy_context()
        aside.run(_aside.set, True)
        side = kernel.dispatch_shell(msg, subshell_id=subshell_id, concurrent=True)
        await asyncio.create_task(side, context=aside)
        kernel._publish_status("idle", "shell", parent={"header": header})
        if kernel._main_asyncio_lock.locked():  # else the cell has ended meanwhile, and said "idle" for the last time
            kernel._publish_status("busy", "shell", parent=self._cell)

    def _set_parent(self, ident: Any, parent: dict[str, Any], channel: str = "shell") -> None:
        # Not for all threads: what one of the notebook shows meanwhile is the cell's.
        if _aside.get():
            self._kernel._shell_parent_ident.set(ident)
            self._kernel._shell_parent.set(parent)
        else:
            self._set_for_all(ident, parent, channel)

    def _cell_begins(self) -> None:
        self._cell = self._kernel.get_parent("shell")

    def _header(self, msg: Any) -> dict[str, Any]:
        session = self._kernel.session
        try:
            _, frames = session.feed_identities(msg, copy=False)
            header: dict[str, Any] = session.deserialize(frames, content=False, copy=False)["header"]
        except Exception:  # ipykernel tells of it
            return {}
        return header


def _waits_for_ranks() -> bool:
    cluster = current.get()
    return cluster is not None and bool(cluster.busy)


def _is_overloaded() -> bool:
    """Whether so much runs here that a page on this machine needs the seconds that it waits for the kernel.

    It starts until then; anywidget gives up a view that is not there 2 s after it was begun (`Runtime`), for good.
    """
    try:
        return os.getloadavg()[0] > _MOST_A_CORE * (os.cpu_count() or 1)
    except OSError:  # nobody knows
        return True


_installed: list[FrontEnd] = []


def install() -> None:
    """Answer for this process's kernel, if it runs in one; safe to call again."""
    app = sys.modules.get("ipykernel.kernelapp")
    if _installed or app is None or not app.IPKernelApp.initialized():
        return
    _installed.append(FrontEnd(app.IPKernelApp.instance().kernel))
    _installed[0].install()


def uninstall() -> None:
    """Take back what `install` did."""
    while _installed:
        _installed.pop().uninstall()
