"""A real IPython kernel, driven as a front end drives it: execute, collect, interrupt, restart, kill."""

from __future__ import annotations

import ast
import contextlib
import os
import queue
import re
import signal
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from jupyter_core.paths import jupyter_runtime_dir

from axon_nb.cluster.cells.result import MIME_TYPE
from axon_nb.host.run_dir import base_dir
from tests.kernel.cells.labelled import ranks_of
from tests.support.agent_server import agent_environment
from tests.support.records.cell_reply import Reply, belongs, text_of
from tests.support.script import MARK, family

__all__ = ["PROBE_S", "DiscardedError", "FreshCluster", "Kernel", "Reply", "discard_all"]

_TIMEOUT_S = 100.0
"""For what must happen: a busy machine takes its time, and a wait that succeeds costs nothing."""
_START_S = 130.0
"""For cells that start a cluster: a start that hangs gives its own reason after 120 s."""
_STARTS = re.compile(r"%distributed (re)?start\b|axon_nb\.start\(")
_MARGIN_S = 10.0
"""A wait ends so long before pytest's limit for the test, which would not say what was waited for."""
PROBE_S = 20.0
"""How long ranks that no cell uses may take to answer."""
_SHUTDOWN_S = 60.0
"""After half of this Jupyter terminates a kernel that was asked to end."""


class DiscardedError(Exception):
    """The kernel was discarded, and runs nothing any more."""


class Kernel:
    """One kernel process and a client of it."""

    def __init__(self, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
        self.mark, self._is_discarded = uuid.uuid4().hex, False
        """The first is in the environment of the kernel and of all that it starts."""
        _living.add(self)
        # Unix sockets: a port that is free when the kernel's are chosen may be taken when it comes to open them.
        sockets = Path(jupyter_runtime_dir()) / f"k{uuid.uuid4().hex[:12]}"
        sockets.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.manager = KernelManager(transport="ipc", ip=str(sockets), shutdown_wait_time=_SHUTDOWN_S)
        argv = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="test", language="python")
        environment = {**os.environ, **agent_environment(), **(env or {}), MARK: self.mark}
        self.manager.start_kernel(env=environment, cwd=str(cwd or Path.cwd()))
        self._early: list[dict[str, Any]] = []
        self._cells: dict[str, str] = {}
        try:
            self._connect()
        except BaseException:
            self.discard()
            self.__exit__(None, None, None)
            raise

    def _connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=_end_of(_TIMEOUT_S) - time.monotonic())

    @property
    def pid(self) -> int:
        """Of the kernel's process."""
        return int(self.manager.provisioner.pid)

    def submit(self, code: str) -> str:
        """Send a cell; returns the request's id for `collect`."""
        self._raise_if_discarded()
        request = str(self.client.execute(code))
        self._cells[request] = code
        return request

    def collect(self, request: str, *, timeout: float = _TIMEOUT_S) -> Reply:
        """Everything that belongs to the request, until the kernel is idle and has replied.

        Raises:
            TimeoutError: it was not over in `timeout` seconds.
        """
        code, began = self._cells.get(request, ""), time.monotonic()
        if _STARTS.search(code):
            timeout = max(timeout, _START_S)
        reply, ids, end = Reply(), dict[str, int](), _end_of(timeout)
        early, self._early = self._early, []
        for message in early:
            if belongs(message, request):
                reply.take(message, ids)
            else:
                self._early.append(message)
        idle = False
        while not (idle and reply.status):
            if time.monotonic() > end:
                took = time.monotonic() - began
                raise TimeoutError(f"this cell is not over after {took:.0f} s:\n{code}\nso far:\n{reply.shown()}")
            if not idle and (message := self._get(self.client.get_iopub_msg)):
                if not belongs(message, request):
                    continue
                reply.take(message, ids)
                idle = message["msg_type"] == "status" and message["content"]["execution_state"] == "idle"
            answer = self._get(self.client.get_shell_msg) if idle else None
            if answer and belongs(answer, request):
                reply.status = answer["content"]["status"]
                reply.record = answer["metadata"].get(MIME_TYPE, {})
        reply.seconds = time.monotonic() - began
        return reply

    def _get(self, channel: Any) -> dict[str, Any] | None:
        self._raise_if_discarded()
        try:
            return dict(channel(timeout=0.2))
        except queue.Empty:
            return None

    def follow(self, request: str, reply: Reply, *, until: Callable[[], bool], timeout: float = _TIMEOUT_S) -> None:
        """Add to `reply` what still appears in its cell after the cell's end, until `until()` is true.

        Raises:
            TimeoutError: it was not within `timeout` seconds.
        """
        ids, end = dict[str, int](), _end_of(timeout)
        while not until():
            if time.monotonic() > end:
                raise TimeoutError(f"still waiting for output of a cell that is over; so far:\n{reply.shown()}")
            message = self._get(self.client.get_iopub_msg)
            if message is not None and belongs(message, request):
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
        end, missing = _end_of(timeout), set(ranks)
        while time.monotonic() < end:
            message = self._get(self.client.get_iopub_msg)
            if message is None or not belongs(message, request):
                continue
            self._early.append(message)
            shown = text_of(message)
            for line in shown.splitlines():
                missing -= ranks_of(line) if text in line else set()
            if not missing and text in shown:
                return
        reported = "".join(map(text_of, self._early))
        raise TimeoutError(f"no {text!r}, or not of ranks {sorted(missing)}; so far:\n{reported}")

    def settle(self) -> None:
        """Return when the kernel has noticed all that was sent to it before, interrupts included."""
        request, end = self.client.kernel_info(), _end_of(_TIMEOUT_S)
        while time.monotonic() < end:
            if (answer := self._get(self.client.get_shell_msg)) is not None and belongs(answer, request):
                return
        raise TimeoutError("the kernel does not answer a request for its info")

    def run(self, code: str, *, timeout: float = _TIMEOUT_S) -> Reply:
        """Run a cell to its end, whatever becomes of it."""
        return self.collect(self.submit(code), timeout=timeout)

    def ok(self, code: str, *, timeout: float = _TIMEOUT_S) -> Reply:
        """Run a cell that must succeed."""
        reply = self.run(code, timeout=timeout)
        assert reply.ok, f"{code}\n{reply.stdout}\n{reply.stderr}\n{reply.traceback}\n{_crash_reports()}"
        return reply

    def load_and_warm_up(self) -> None:
        """Load axon_nb, and let its agent import what optimizers need: otherwise each rank does."""
        self.ok("%load_ext axon_nb")
        self.value("__import__('axon_nb').cluster.current.session().prewarm.wait_until_idle(60)")

    def value(self, expression: str) -> Any:
        """A plain value (what its repr says) of the notebook's namespace."""
        return ast.literal_eval(self.ok(expression).result)

    def interrupt(self) -> None:
        """The stop button: SIGINT to the kernel's process group, as Jupyter sends it."""
        self.manager.interrupt_kernel()

    def restart(self, *, now: bool) -> None:
        """Restart the kernel, politely or by force."""
        self._raise_if_discarded()
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

    def discard(self) -> None:
        """SIGKILL the kernel and all that it started, its clusters included; later uses raise `DiscardedError`."""
        self._is_discarded = True
        end = time.monotonic() + _TIMEOUT_S
        while left := family(self.mark):  # one may start another while it is killed
            assert time.monotonic() < end, left
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)

    def _raise_if_discarded(self) -> None:
        if self._is_discarded:
            raise DiscardedError("the kernel was killed after a test that failed")

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
        _living.discard(self)


_living: weakref.WeakSet[Kernel] = weakref.WeakSet()


def discard_all() -> None:
    """Kill each kernel of this process, and all that it started: a test has failed, and may have left it busy."""
    for kernel in list(_living):
        kernel.discard()


FreshCluster = Callable[[int], Kernel]
"""Starts a cluster of so many ranks; returns its kernel."""


def _end_of(timeout: float) -> float:
    """When a wait ends that begins now: earlier if pytest's limit for the test (an alarm) comes before that."""
    left = signal.getitimer(signal.ITIMER_REAL)[0]
    return time.monotonic() + (min(timeout, max(left - _MARGIN_S, 0.0)) if left else timeout)


def _crash_reports() -> str:
    """What Python wrote when C code crashed in a rank of any cluster whose files are still there."""
    reports: list[str] = []
    with contextlib.suppress(OSError):  # a cluster may be removing its files
        texts = ((file, file.read_text(errors="replace")) for file in base_dir().rglob("*.crash"))
        reports.extend(f"{file}:\n{text}" for file, text in texts if text)
    return "\n".join(reports)
