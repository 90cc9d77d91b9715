"""A socket that accepts connections only after some seconds, as a process without a free core does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from types import TracebackType


class LatePort:
    """Stands before the Unix socket `target` and hands on both ways, from `seconds` after each connection on."""

    def __init__(self, path: str, target: str, *, seconds: float) -> None:
        self._target = target
        self._seconds = seconds
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> LatePort:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for end in [self._listener, *self._open]:
            with contextlib.suppress(OSError):  # its peer has gone already
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                self._open.append(near)
                threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        time.sleep(self._seconds)
        with contextlib.suppress(OSError):  # its target has gone
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._target)
            self._open.append(far)
            threading.Thread(target=_copy, args=(near, far), daemon=True).start()
            _copy(far, near)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # one of them has gone
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def delay(connection_file: Path, channel: str, *, seconds: float) -> LatePort:
    """Put a late port before one channel of an ipyparallel connection file, for those who read it from now on."""
    facts = json.loads(connection_file.read_text())
    prefix, name = facts["interface"].removeprefix("ipc://"), f"{connection_file.stem}-{channel}"
    late = LatePort(f"{prefix}:{name}", f"{prefix}:{facts[channel]}", seconds=seconds)
    connection_file.write_text(json.dumps({**facts, channel: name}))
    return late
