"""Private hooks into ipykernel, all of them, for engines of ipykernel 7.

The register lists them as `kernel.cells`, and a test fails when the installed ipykernel lacks one. A missing hook is
skipped: cells still run, with the loss that its comment names.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import zmq

__all__ = [
    "ControlHandler",
    "add_control_handlers",
    "install",
    "tap_output",
    "wrap_do_execute",
]

ControlHandler = Callable[[dict[str, Any]], dict[str, Any] | None]
"""Takes a request's content and returns the reply's; runs on the kernel's control thread."""


def install(kernel: Any, hold_async: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    """Make `kernel` a good host for cells.

    Args:
        kernel: The engine's kernel.
        hold_async: Context manager that is entered with the task of an async cell while it runs, so that an interrupt
            can cancel it.
    """
    # Without it a top-level await never replies: ipykernel asks a thread that an engine does not have for its parent.
    kernel.shell_channel_thread = SimpleNamespace(parent_thread=threading.main_thread())
    type(kernel)._supports_kernel_subshells = False
    # ipykernel swaps the SIGINT handler around every request; an interrupt that lands between is lost.
    kernel.pre_handler_hook = lambda: None
    kernel.post_handler_hook = lambda: None
    if hasattr(kernel, "_cancel_on_sigint"):

        @contextlib.contextmanager
        def cancel_on_sigint(task: Any) -> Iterator[None]:
            with hold_async(task):
                yield

        kernel._cancel_on_sigint = cancel_on_sigint
    _quieten(kernel)
    _answer_directly(kernel)


def _quieten(kernel: Any) -> None:
    # The notebook knows the code it sent, and only asks when a rank is idle again: two of three messages saved.
    kernel._publish_execute_input = lambda *args, **kwargs: None
    publish = getattr(kernel, "_publish_status", None)
    if publish is not None:

        def publish_idle(status: str, *args: Any, **kwargs: Any) -> None:
            if status != "busy":
                publish(status, *args, **kwargs)

        kernel._publish_status = publish_idle


class _Served:
    """One of our handlers, as ipykernel calls its own."""

    def __init__(self, kernel: Any, handler: ControlHandler) -> None:
        self._session = kernel.session
        self._handler = handler

    def __call__(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        try:
            content = self._handler(parent["content"]) or {}
        except Exception as error:
            content = {"error": f"{type(error).__name__}: {error}"}
        self._session.send(stream, "axon_reply", content, parent=parent, ident=ident)


def _answer_directly(kernel: Any) -> None:
    # For each request on this channel ipykernel flushes stdout and stderr, each a wait for another thread, and says
    # that it is idle, which goes through the controller to the notebook. Questions of views come many times a second,
    # beside the user's code.
    original = getattr(kernel, "process_control", None)
    if original is None:
        return

    async def process_control(frames: list[Any]) -> None:
        session = kernel.session
        idents, parts = session.feed_identities(frames, copy=False)
        try:
            served = kernel.control_handlers.get(session.unpack(parts[1].bytes)["msg_type"])
        except (IndexError, KeyError, TypeError, ValueError):
            served = None
        if not isinstance(served, _Served):
            await original(frames)
            return
        try:
            message = session.deserialize(parts, content=True, copy=False)
        except (KeyError, TypeError, ValueError) as error:  # not signed with our key, or damaged
            kernel.log.error("Invalid control message: %s", error)
            return
        served(kernel.control_stream, idents, message)
        kernel.control_stream.flush(zmq.POLLOUT)

    kernel.process_control = process_control


def add_control_handlers(kernel: Any, handlers: dict[str, ControlHandler]) -> None:
    """Serve `handlers` on the control channel, which answers while the main thread is busy or stuck."""
    for name, handler in handlers.items():
        kernel.control_handlers[name] = _Served(kernel, handler)


def tap_output(kernel: Any, tap: Callable[[list[Any]], None]) -> None:
    """Have `tap` see the frames of each message of the output channel before it goes out, in order.

    Without the hook a notebook that comes back does not see what was printed meanwhile.
    """
    thread = getattr(kernel.iopub_socket, "io_thread", None) or kernel.iopub_socket
    send = getattr(thread, "send_multipart", None)
    if send is None:
        return

    def send_multipart(frames: list[Any], *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(ValueError, KeyError):  # no message of Jupyter's
            tap(frames)
        send(frames, *args, **kwargs)

    thread.send_multipart = send_multipart


def wrap_do_execute(
    kernel: Any, wrapper: Callable[[dict[str, Any], Callable[[], Awaitable[dict[str, Any]]]], Awaitable[dict[str, Any]]]
) -> None:
    """Have `wrapper(metadata, run)` run each visible cell: `metadata` is the request's, `run()` gives the reply."""
    original = kernel.do_execute

    async def do_execute(code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if silent:
            return await original(code, silent, *args, **kwargs)  # type: ignore[no-any-return]
        metadata = kernel.get_parent("shell").get("metadata") or {}
        return await wrapper(metadata, lambda: original(code, silent, *args, **kwargs))

    kernel.do_execute = do_execute
