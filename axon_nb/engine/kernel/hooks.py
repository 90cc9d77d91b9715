"""All private hooks into ipykernel 7, as engines use it.

A cell of ours bypasses ipykernel's dispatch of requests, which publishes two statuses, flushes each stream twice and
writes five lines for a log that nobody keeps: the reply says how many messages the cell has sent, so the notebook knows
when it has all of them.

The register lists them as `kernel.cells`, and a test fails if the installed ipykernel lacks one. A missing hook is
skipped: cells still run, with the limitation that its comment names.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import itertools
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import zmq
from ipykernel import ipkernel
from IPython.core import shellapp
from jupyter_client.jsonutil import json_default
from zmq.eventloop.zmqstream import ZMQStream

from axon_nb.errors import UsageError
from axon_nb.records.environment import HOST_NAME
from axon_nb.records.hooks import hook, missing_hooks
from axon_nb.records.protocol.cells import KEY
from axon_nb.records.protocol.recovery import DirectRequest
from axon_nb.records.protocol.wire import FAILURE, REFUSAL, REPLY, Request, decode, encode_reply, message_type, pack

_NUM_PARTS, _METADATA = 5, 3
"""Parts of a message without buffers: signature, header, parent, metadata, content."""
ControlHandler = Callable[[Any], Any]
"""Takes a request and returns its reply; runs on the kernel's control thread. A `UsageError` refuses the request."""

ControlHandlers = Mapping[type[Request[Any]], ControlHandler]
"""By request class."""

_RUN_RANKS = {"asyncio", "axon_nb", "ipykernel", "ipyparallel", "jupyter_client", "tornado", "zmq"}
"""Packages whose code runs between cells."""

_names: set[str] = set()
"""Modules that there were when this rank was forked."""


def install(kernel: Any, track_task: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    """Prepare `kernel` for cells.

    Args:
        kernel: The engine's kernel.
        track_task: Context manager entered with the task of an async cell while it runs, so that an interrupt can
            cancel it.
    """
    # Without it a top-level await never replies: ipykernel reads the parent of a thread that an engine does not have.
    kernel.shell_channel_thread = SimpleNamespace(parent_thread=threading.main_thread())
    type(kernel)._supports_kernel_subshells = False
    # ipykernel swaps the SIGINT handler around every request; an interrupt in between would be lost.
    kernel.pre_handler_hook = lambda: None
    kernel.post_handler_hook = lambda: None
    if hasattr(kernel, "_cancel_on_sigint"):

        @contextlib.contextmanager
        def cancel_on_sigint(task: Any) -> Iterator[None]:
            with track_task(task):
                yield

        kernel._cancel_on_sigint = cancel_on_sigint
    kernel.log.setLevel(kernel.parent.log_level)  # below it, its handler drops each record of a message
    _suppress_messages(kernel)
    _reply_directly(kernel)
    _hold_json(kernel.session)


class _WithoutModules:
    """Python's `sys`, as if nothing was imported."""

    modules: ClassVar[dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def note_modules() -> None:
    """Note which modules there are, in the process from which ranks are forked, for `show_modules`."""
    _names.clear()
    _names.update(sys.modules)


def hide_modules() -> None:
    """Have the kernel that starts note no modules; to look at all takes each rank 10 MiB that ranks share."""
    if not missing_hooks("kernel.modules"):
        for module in (ipkernel, shellapp):
            vars(module).update(sys=_WithoutModules())


def show_modules(shell: Any) -> None:
    """End `hide_modules`, and tell the shell which modules were not imported by cells, for ``%reset aggressive``."""
    if vars(ipkernel)["sys"] is sys:
        return
    for module in (ipkernel, shellapp):
        vars(module).update(sys=sys)
    # Without a look at those of the process that forked this one.
    _names.update(itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - len(_names))))
    shell._sys_modules_keys = _names


def hold_modules() -> None:
    """Let what runs between cells use copies of modules; profilers and mocks replace functions of the modules."""
    if json is not sys.modules["json"]:  # held where this process was forked from
        return
    for original in (json, signal, time):
        own = ModuleType(original.__name__)
        vars(own).update(vars(original))
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in _RUN_RANKS and getattr(module, original.__name__, None) is original:
                setattr(module, original.__name__, own)


def _hold_json(session: Any) -> None:
    """Hold on to the functions that write and read messages: a cell may replace those of the `json` module."""
    write = json.JSONEncoder(default=json_default, ensure_ascii=False, allow_nan=False).encode
    read, pack_any = json.JSONDecoder().decode, session.pack

    def pack(content: Any) -> Any:
        try:
            text = write(content)
        except (TypeError, ValueError):
            return pack_any(content)
        return text.encode("utf8", errors="replace")  # a message with a lone surrogate would be lost

    def unpack(data: bytes | str) -> Any:
        return read(data.decode("utf8", "replace") if isinstance(data, bytes) else data)

    session.pack, session.unpack = pack, unpack


def _suppress_messages(kernel: Any) -> None:
    # The notebook knows the code it sent, and only needs to know when a rank is idle: this saves two of three messages.
    kernel._publish_execute_input = lambda *args, **kwargs: None
    publish = getattr(kernel, "_publish_status", None)
    if publish is not None:

        def publish_idle(status: str, *args: Any, **kwargs: Any) -> None:
            if status != "busy":
                publish(status, *args, **kwargs)

        kernel._publish_status = publish_idle


class _RequestHandler:
    """Adapts one of our handlers to ipykernel's interface."""

    def __init__(self, kernel: Any, kind: type[Request[Any]], handler: ControlHandler) -> None:
        self._session = kernel.session
        self._kind = kind
        self._handler = handler

    def __call__(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        reply = REPLY
        try:
            content = encode_reply(self._kind, self._handler(decode(self._kind, parent["content"])))
        except UsageError as error:
            reply, content = REFUSAL, {"reason": str(error)}
        except Exception as error:
            reply, content = FAILURE, {"reason": f"{type(error).__name__}: {error}"}
        self._session.send(stream, reply, pack(content), parent=parent, ident=ident)


def _reply_directly(kernel: Any) -> None:
    # For each request on this channel, ipykernel flushes stdout and stderr, each of which waits for another thread, and
    # publishes an idle status, which goes through the controller to the notebook. Views send many requests per second
    # while the user's code runs.
    original = getattr(kernel, "process_control", None)
    if original is None:
        return

    async def process_control(frames: list[Any]) -> None:
        session = kernel.session
        idents, parts = session.feed_identities(frames, copy=False)
        try:
            handler = kernel.control_handlers.get(session.unpack(parts[1].bytes)["msg_type"])
        except (IndexError, KeyError, TypeError, ValueError):
            handler = None
        if not isinstance(handler, _RequestHandler):
            await original(frames)
            return
        try:
            message = session.deserialize(parts, content=True, copy=False)
        except (KeyError, TypeError, ValueError) as error:  # wrong signature, or damaged
            kernel.log.error("Invalid control message: %s", error)
            return
        handler(kernel.control_stream, idents, message)
        kernel.control_stream.flush(zmq.POLLOUT)

    kernel.process_control = process_control


def add_control_handlers(kernel: Any, handlers: ControlHandlers) -> None:
    """Serve `handlers` on the control channel, which answers while the main thread is busy or stuck."""
    for kind, handler in handlers.items():
        kernel.control_handlers[message_type(kind)] = _RequestHandler(kernel, kind, handler)


def tap_output(kernel: Any, tap: Callable[[list[Any]], None]) -> bool:
    """Pass the frames of each outgoing message of the output channel to `tap`, in order; return whether that works.

    Without this hook, a notebook that reconnects does not see what was printed meanwhile.
    """
    thread = getattr(kernel.iopub_socket, "io_thread", None) or kernel.iopub_socket
    send = getattr(thread, "send_multipart", None)
    if send is None:
        return False

    def send_multipart(frames: list[Any], *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(ValueError, KeyError):  # not a Jupyter message
            tap(frames)
        send(frames, *args, **kwargs)

    thread.send_multipart = send_multipart
    return True


def _failed_reply(error: Exception) -> dict[str, Any]:
    name, text = "Exception", "its class or text cannot be shown"
    with contextlib.suppress(Exception):
        name, text = str(type(error).__name__), str(error)
    note = f"The cell ended, but its outcome could not be reported: {name}: {text}"
    return {
        "status": "error",
        "ename": name,
        "evalue": text,
        "traceback": [note],
        "payload": [],
        "user_expressions": {},
    }


def serve_cells(
    kernel: Any, wrapper: Callable[[dict[str, Any], Callable[[], Awaitable[dict[str, Any]]]], Awaitable[dict[str, Any]]]
) -> None:
    """Have `wrapper(metadata, run)` run each visible cell: `metadata` is the request's, `run()` returns the reply.

    If it fails, the cell fails: ipykernel would send no reply, and the notebook would wait for it.
    """
    original = kernel.do_execute
    _spare_work(kernel)
    _dispatch_cells(kernel)

    async def do_execute(code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if silent:
            return await original(code, silent, *args, **kwargs)  # type: ignore[no-any-return]
        metadata = kernel.get_parent("shell").get("metadata") or {}
        try:
            return await wrapper(metadata, lambda: original(code, silent, *args, **kwargs))
        except Exception as error:
            return _failed_reply(error)

    kernel.do_execute = do_execute


def _spare_work(kernel: Any) -> None:
    """Have ipykernel do once what it does in each cell.

    A cell's source is transformed to see whether the cell awaits, and again to run it. The signature of a method of
    IPython is worked out each time.
    """
    shell = kernel.shell
    transform = shell.transform_cell
    last: list[str] = ["", ""]

    def transform_cell(raw: str) -> str:
        if raw is not last[0]:
            last[:] = raw, transform(raw)
        return last[1]

    shell.transform_cell = transform_cell
    run = type(shell).run_cell_async
    run.__signature__ = inspect.signature(run)


def _dispatch_cells(kernel: Any) -> None:
    original = getattr(kernel, "dispatch_shell", None)
    if original is None:
        return
    session, key = kernel.session, f'"{KEY}"'.encode()

    async def dispatch_shell(frames: list[Any], *args: Any, **kwargs: Any) -> None:
        stream = kernel.shell_stream
        try:
            idents, parts = session.feed_identities(frames, copy=False)
            is_ours = len(parts) == _NUM_PARTS and key in parts[_METADATA].bytes
        except ValueError:  # not a message: ipykernel sends itself a note
            is_ours = False
        if not is_ours:
            await original(frames, *args, **kwargs)
            return
        try:
            message = session.deserialize(parts, content=True, copy=False)
        except (KeyError, TypeError, ValueError) as error:  # wrong signature, or damaged
            kernel.log.error("Invalid cell: %s", error)
            return
        kernel.set_parent(idents, message, channel="shell")
        try:
            reply = await kernel.do_execute(message["content"]["code"], False, False, {}, False)
        except KeyboardInterrupt:  # after the cell, which has a reply
            kernel.log.error("A KeyboardInterrupt arrived between two cells.")
            return
        session.send(stream, "execute_reply", reply, parent=message, ident=idents)
        if reply.get(KEY, {}).get("outputs") is None:
            kernel._publish_status("idle", "shell")
        stream.flush(zmq.POLLOUT)

    kernel.dispatch_shell = dispatch_shell


class DirectChannel:
    """Takes cells and calls from a socket of the notebook, without the controller in between.

    Args:
        kernel: The engine's kernel.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream: Any = None
        self._path = ""
        self._context = contextvars.copy_context()

    def connect(self, request: DirectRequest) -> None:
        """Connect when no cell runs; a notebook on another host is not reached this way. Call it from any thread."""
        is_here = request.host == (HOST_NAME.get() or socket.gethostname()) and Path(request.path).exists()
        group = "kernel.direct" if hook("kernel.direct").is_used else "kernel.direct_queue"
        if is_here and not missing_hooks(group, kernel=self._kernel):
            self._kernel.io_loop.add_callback(self._connect, request)

    def _connect(self, request: DirectRequest) -> None:
        if request.path == self._path:
            return
        if self._stream is not None:  # to a notebook that is gone
            # Not at once: what pyzmq has scheduled for the last reply warns, in the cell, of a stream that is closed.
            self._stream.stop_on_recv()
            self._kernel.io_loop.add_callback(self._stream.close, linger=0)
        self._path = request.path
        dealer: Any = zmq.Context.instance().socket(zmq.DEALER)
        dealer.set_hwm(0)
        dealer.setsockopt(zmq.IDENTITY, request.identity.encode())
        dealer.connect(f"ipc://{request.path}")
        self._stream = ZMQStream(dealer)
        self._stream.on_recv(self._start if hook("kernel.direct").is_used else self._queue, copy=False)
        dealer.send(b"")

    def _start(self, frames: list[Any]) -> asyncio.Task[None]:
        """Run it in the context of the cells before, where torch keeps its options."""
        return asyncio.get_running_loop().create_task(self._receive(frames), context=self._context)

    async def _receive(self, frames: list[Any]) -> None:
        async with self._kernel._main_asyncio_lock:
            await self._dispatch(frames)

    def _queue(self, frames: list[Any]) -> None:
        """Let ipykernel 6 run it, which queues what is to run."""
        self._kernel.schedule_dispatch(self._dispatch, frames)

    async def _dispatch(self, frames: list[Any]) -> None:
        kernel = self._kernel
        stream, kernel.shell_stream = kernel.shell_stream, self._stream
        try:
            await kernel.dispatch_shell(frames)
        finally:
            kernel.shell_stream = stream
