"""Asking a host agent from outside, with a limit for each wait: a look that neither owns the cluster nor keeps it."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
from types import TracebackType
from typing import Any

from axon_nb.host.rundir import RunDir

__all__ = ["AgentQuery"]


class AgentQuery:
    """One short connection to the agent of `run_dir`; unlike `AgentClient` it has no thread and sends no hello.

    Raises:
        OSError: nobody listens there.
    """

    def __init__(self, run_dir: RunDir, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._sock = socket.socket(socket.AF_UNIX)
        self._pending = b""
        try:
            self._sock.settimeout(timeout_s)
            self._sock.connect(str(run_dir.agent_socket))
        except OSError:
            self._sock.close()
            raise

    @property
    def pid(self) -> int | None:
        """The agent's pid as the kernel of Linux knows it, also of one that does not answer; None elsewhere."""
        if not sys.platform.startswith("linux"):
            return None
        pid, _, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid) or None

    def ask(self, cmd: str) -> dict[str, Any]:
        """The reply to a command.

        Raises:
            TimeoutError: it did not come within the limit.
            OSError: the agent is gone.
        """
        end = time.monotonic() + self._timeout_s
        self._sock.settimeout(self._timeout_s)
        self._sock.sendall(json.dumps({"id": 1, "cmd": cmd}).encode() + b"\n")
        while b"\n" not in self._pending:
            if not self._read(end):
                raise ConnectionError("the host agent closed the connection")
        line, _, self._pending = self._pending.partition(b"\n")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ConnectionError("the host agent gave no answer that can be read")
        return reply

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether the agent has ended the connection, as it does when it is gone, within `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        try:
            while self._read(end):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _read(self, end: float) -> bool:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the host agent does not answer")
        self._sock.settimeout(left)
        data = self._sock.recv(1 << 16)
        self._pending += data
        return bool(data)

    def close(self) -> None:
        """Leave the agent as it is."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def __enter__(self) -> AgentQuery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
