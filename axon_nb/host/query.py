"""Queries to a host agent with a time limit, which neither own the cluster nor keep it alive."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import time
from types import TracebackType
from typing import Any

from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.agent import Command, command_message


class AgentQuery:
    """A short connection to the agent of `run_dir`; unlike `AgentClient` it has no thread and sends no `hello`.

    Raises:
        OSError: nothing listens on the agent's socket.
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
        """The agent's pid according to the Linux kernel, even if the agent hangs; None on other systems."""
        if not sys.platform.startswith("linux"):
            return None
        pid, _, _ = struct.unpack("3i", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid) or None

    def request(self, command: Command[Any]) -> dict[str, Any]:
        """Send a command and return the fields of the reply, unchecked: the agent may be of another version.

        Raises:
            TimeoutError: no reply within the limit.
            OSError: the agent is gone.
        """
        deadline = time.monotonic() + self._timeout_s
        self._sock.settimeout(self._timeout_s)
        self._sock.sendall(json.dumps(command_message(1, command)).encode() + b"\n")
        while b"\n" not in self._pending:
            if not self._read(deadline):
                raise ConnectionError("the host agent closed the connection")
        line, _, self._pending = self._pending.partition(b"\n")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ConnectionError("the host agent sent an unreadable reply")
        return reply

    def wait_closed(self, timeout_s: float) -> bool:
        """Whether the agent closes the connection, as when it exits, within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        try:
            while self._read(deadline):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def _read(self, deadline: float) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the host agent does not reply")
        self._sock.settimeout(left)
        data = self._sock.recv(1 << 16)
        self._pending += data
        return bool(data)

    def close(self) -> None:
        """Disconnect; the agent keeps running."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def __enter__(self) -> AgentQuery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
