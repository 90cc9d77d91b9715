"""Answers the front end's requests while a cell waits for ranks, on kernels that hold back all of them: before 7.4.

ipykernel 6 queues the messages of the shell channel, ipykernel 7 takes a lock for each. Both call a function for each
message that arrives; ours answers completions, help and widgets' messages at once, without making them the kernel's
current request: what the cell shows meanwhile is still its own. It uses the private hooks `front_end.queue` and
`front_end.lock` of the register; without them these requests wait for the end of the cell.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from axon_nb.records.hooks import hook, missing_hooks

_COMMS = ("comm_open", "comm_msg", "comm_close")


class SideRequests:
    """Answers requests at once while a cell waits for ranks.

    Args:
        kernel: The kernel of this process.
        waits_for_ranks: Whether the running cell waits for ranks.
        answers: Whether to answer requests of this type, besides those of widgets.
    """

    def __init__(self, kernel: Any, waits_for_ranks: Callable[[], bool], answers: Callable[[str], bool]) -> None:
        self._kernel = kernel
        self._waits_for_ranks = waits_for_ranks
        self._answers = answers
        self._tasks: set[asyncio.Task[None]] = set()
        self._manager: Any = None
        """Of ipykernel 7, which calls back for each message; None: ipykernel 6, whose stream does."""

    def install(self) -> bool:
        """Install it and return True, if the kernel has what it needs; call it on the main thread."""
        kernel = self._kernel
        if hook("front_end.lock").is_used and not missing_hooks("front_end.lock", kernel=kernel):
            self._manager = kernel.shell_channel_thread.manager
            self._manager.set_on_recv_callback(self._receive)
        elif hook("front_end.queue").is_used and not missing_hooks("front_end.queue", kernel=kernel):
            kernel.shell_stream.on_recv(self._enqueue, copy=False)
        else:
            return False
        return True

    def uninstall(self) -> None:
        """Undo `install`."""
        kernel = self._kernel
        if self._manager is not None:
            self._manager.set_on_recv_callback(kernel.shell_main)
        else:
            kernel.shell_stream.on_recv(partial(kernel.schedule_dispatch, kernel.dispatch_shell), copy=False)

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
        await self._answer(frames, self._manager.get_subshell_to_shell_channel_socket(None))

    def _takes(self, frames: list[Any]) -> bool:
        if not self._waits_for_ranks():
            return False
        session = self._kernel.session
        try:
            _, parts = session.feed_identities(frames, copy=False)
            kind = session.deserialize(parts, content=False, copy=False)["header"]["msg_type"]
        except Exception:  # ipykernel reports it
            return False
        return kind in _COMMS or self._answers(kind)

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
        if self._waits_for_ranks():
            kernel._publish_status("busy", "shell")
