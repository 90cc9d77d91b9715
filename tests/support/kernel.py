"""A real IPython kernel, driven as a front end drives it: execute, collect, interrupt, restart, kill."""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_core.paths import jupyter_runtime_dir

from axon_nb.host.run_dir import base_dir
from tests.kernel.cells.labelled import merged, ranks_of

__all__ = ["FreshCluster", "Kernel", "Reply"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TIMEOUT_S = 150.0
"""For what must happen: a busy machine takes its time, and a wait that succeeds costs nothing. Longer than the start
timeout of a cluster (120 s), and shorter than pytest's for a test (240 s), so that each fails with its own reason."""
_SHUTDOWN_S = 60.0
"""After half of this Jupyter terminates a kernel that was asked to end."""


@dataclass
class Reply:
    """Everything that one execute request gave back."""

    status: str = ""
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    """text/plain of the Out[] value."""
    ename: str = ""
    evalue: str = ""
    traceback: str = ""
    """As shown, without colours."""
    displays: list[dict[str, Any]] = field(default_factory=list)
    """Mime bundles in order; an update replaces what it updates."""
    arrivals: list[tuple[float, str, str]] = field(default_factory=list)
    """(time, message type, text) of each message."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the cell succeeded."""
        return self.status == "ok"

    def lines(self) -> list[str]:
        """The lines of stdout; a line of several ranks is one, also when it came from some of them too late for that.

        What was shown how often and when is in `stdout` and `arrivals`.
        """
        return merged(self.stdout)

    def take(self, message: dict[str, Any], ids: dict[str, int]) -> None:
        """Add one output message."""
        kind, content, text = message["msg_type"], message["content"], _text_of(message)
        self.arrivals.append((time.time(), kind, text))
        if kind == "stream":
            setattr(self, content["name"], getattr(self, content["name"]) + text)
        elif kind == "execute_result":
            self.result = content["data"].get("text/plain", "")
        elif kind in ("display_data", "update_display_data"):
            identity = content.get("transient", {}).get("display_id")
            if kind == "update_display_data" and identity in ids:
                self.displays[ids[identity]] = content["data"]
            else:
                if identity:
                    ids[identity] = len(self.displays)
                self.displays.append(content["data"])
        elif kind == "error":
            self.ename, self.evalue = content["ename"], content["evalue"]
            self.traceback = _ANSI.sub("", "\n".join(content["traceback"]))


class Kernel:
    """One kernel process and a client of it."""

    def __init__(self, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        # Unix sockets: a port that is free when the kernel's are chosen may be taken when it comes to open them.
        sockets = Path(jupyter_runtime_dir()) / f"k{uuid.uuid4().hex[:12]}"
        sockets.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.manager = KernelManager(transport="ipc", ip=str(sockets), shutdown_wait_time=_SHUTDOWN_S)
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
        self.manager.start_kernel(env={**os.environ, **(env or {})}, cwd=str(cwd or Path.cwd()))
        self._early: list[dict[str, Any]] = []
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_TIMEOUT_S)

    @property
    def pid(self) -> int:
        """Of the kernel's process."""
        return int(self.manager.provisioner.pid)

    def submit(self, code: str) -> str:
        """Send a cell; returns the request's id for `collect`."""
        return str(self.client.execute(code))

    def collect(self, request: str, *, timeout: float = _TIMEOUT_S) -> Reply:
        """Everything that belongs to the request, until the kernel is idle and has replied.

        Raises:
            TimeoutError: it was not over in `timeout` seconds.
        """
        reply, ids, end, began = Reply(), dict[str, int](), time.monotonic() + timeout, time.monotonic()
        early, self._early = self._early, []
        for message in early:
            if _belongs(message, request):
                reply.take(message, ids)
            else:
                self._early.append(message)
        idle = False
        while not (idle and reply.status):
            if time.monotonic() > end:
                raise TimeoutError(
                    f"the cell is not over after {timeout} s; so far:\n{reply.stdout}\n{reply.traceback}"
                )
            if not idle and (message := self._get(self.client.get_iopub_msg)):
                if not _belongs(message, request):
                    continue
                reply.take(message, ids)
                idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            answer = self._get(self.client.get_shell_msg) if idle else None
            if answer and _belongs(answer, request):
                reply.status = answer["content"]["status"]
        reply.seconds = time.monotonic() - began
        return reply

    @staticmethod
    def _get(channel: Any) -> dict[str, Any] | None:
        try:
            return dict(channel(timeout=0.2))
        except queue.Empty:
            return None

    def follow(self, request: str, reply: Reply, *, until: Callable[[], bool], timeout: float = _TIMEOUT_S) -> None:
        """Add to `reply` what still appears in its cell after the cell's end, until `until()` is true.

        Raises:
            TimeoutError: it was not within `timeout` seconds.
        """
        ids, end = dict[str, int](), time.monotonic() + timeout
        while not until():
            if time.monotonic() > end:
                raise TimeoutError(f"still waiting after {timeout} s; so far:\n{reply.stdout}\n{reply.stderr}")
            message = self._get(self.client.get_iopub_msg)
            if message is not None and _belongs(message, request):
                reply.take(message, ids)

    def wait_for_output(
        self, request: str, text: str, *, ranks: Iterable[int] = (), timeout: float = _TIMEOUT_S
    ) -> None:
        """Return when the cell has printed or displayed `text`; what came so far is kept for `collect`.

        Args:
            request: Of the cell.
            text: A part of what is shown in one piece.
            ranks: Wait until each of these has printed a line with it.
            timeout: In seconds.

        Raises:
            TimeoutError: it did not come.
        """
        end, missing = time.monotonic() + timeout, set(ranks)
        while time.monotonic() < end:
            message = self._get(self.client.get_iopub_msg)
            if message is None or not _belongs(message, request):
                continue
            self._early.append(message)
            shown = _text_of(message)
            for line in shown.splitlines():
                missing -= ranks_of(line) if text in line else set()
            if not missing and text in shown:
                return
        reported = "".join(map(_text_of, self._early))
        raise TimeoutError(f"no {text!r} of ranks {sorted(missing)} after {timeout} s; so far:\n{reported}")

    def settle(self) -> None:
        """Return when the kernel has noticed all that was sent to it before, presses of the stop button included."""
        request, end = self.client.kernel_info(), time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            if (answer := self._get(self.client.get_shell_msg)) is not None and _belongs(answer, request):
                return
        raise TimeoutError(f"the kernel says nothing for {_TIMEOUT_S} s")

    def run(self, code: str, *, timeout: float = _TIMEOUT_S) -> Reply:
        """Run a cell to its end, whatever becomes of it."""
        return self.collect(self.submit(code), timeout=timeout)

    def ok(self, code: str, *, timeout: float = _TIMEOUT_S) -> Reply:
        """Run a cell that must succeed."""
        reply = self.run(code, timeout=timeout)
        assert reply.ok, f"{code}\n{reply.stdout}\n{reply.stderr}\n{reply.traceback}\n{_crash_reports()}"
        return reply

    def value(self, expression: str) -> Any:
        """A plain value (what its repr says) of the notebook's namespace."""
        return ast.literal_eval(self.ok(expression).result)

    def interrupt(self) -> None:
        """The stop button: SIGINT to the kernel's process group, as Jupyter sends it."""
        self.manager.interrupt_kernel()

    def restart(self, *, now: bool) -> None:
        """Restart the kernel, politely or by force."""
        self.client.stop_channels()
        self._early.clear()
        self.manager.restart_kernel(now=now)
        self._connect()

    def kill(self) -> None:
        """SIGKILL: the kernel gets no chance to say anything. Does nothing when it has ended already."""
        self.manager.provisioner.process.kill()
        self.manager.provisioner.process.wait(_TIMEOUT_S)

    def come_back(self) -> None:
        """SIGKILL, then a fresh kernel for the same notebook, as Jupyter's restarter makes one."""
        self.kill()
        self.restart(now=True)

    def shutdown(self) -> None:
        """The menu's "Shut Down Kernel"."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()


FreshCluster = Callable[[int], Kernel]
"""Starts a cluster of so many ranks; returns its kernel."""


def _belongs(message: dict[str, Any], request: str) -> bool:
    return bool(message["parent_header"].get("msg_id") == request)


def _crash_reports() -> str:
    """What Python wrote when C code crashed in a rank of any cluster whose files are still there."""
    reports: list[str] = []
    with contextlib.suppress(OSError):  # a cluster may be removing its files
        texts = ((file, file.read_text(errors="replace")) for file in base_dir().rglob("*.crash"))
        reports.extend(f"{file}:\n{text}" for file, text in texts if text)
    return "\n".join(reports)


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return str(content.get("text", content.get("data", {}).get("text/plain", "")))
