"""Records what its process does, with times: calls of Python functions in all threads, and messages on sockets.

It is imported in the notebook's kernel and in ranks, and changes nothing of what it watches.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns
from types import CodeType, FrameType
from typing import Any

import zmq

_calls: list[tuple[int, CodeType]] = []
_messages: list[tuple[int, str, str, int, int]] = []
"""Time, socket, direction, messages and bytes."""
_names: dict[int, str] = {}
_watching = False
_SEND_MORE, _RECEIVE_MORE = int(zmq.SNDMORE), int(zmq.RCVMORE)
_PY_CALL = 0
"""`PyTrace_CALL`."""


def start() -> None:
    """Record from now on."""
    global _watching
    if not _watching:
        _watching = True
        _watch_zmq()
        for name, direction in (("send", "to"), ("sendall", "to"), ("recv", "from"), ("recv_into", "from")):
            _watch_sockets(name, direction)
    _profile(on=True)


def save(path: str) -> None:
    """Stop, write what was recorded, and forget it."""
    _profile(on=False)
    codes: dict[CodeType, int] = {}
    calls = [(at, codes.setdefault(code, len(codes))) for at, code in _calls if code.co_filename != __file__]
    functions = [f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname}" for code in codes]
    Path(path).write_text(json.dumps({"functions": functions, "calls": calls, "messages": _messages}))
    _calls.clear()
    _messages.clear()


def _on_event(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _calls.append((monotonic_ns(), frame.f_code))


def _on_c_event(_: int, frame: int, event: int, argument: int) -> int:
    if event == _PY_CALL:
        _calls.append((monotonic_ns(), ctypes.cast(frame, ctypes.py_object).value.f_code))
    return 0


_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
    _on_c_event
)


def _profile(*, on: bool) -> None:
    function = _on_event if on else None
    if sys.version_info >= (3, 12):
        threading.setprofile_all_threads(function)
        return
    threading.setprofile(function)  # threads that start from now on
    api = ctypes.pythonapi
    for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(api, name).restype = ctypes.c_void_p
    api._PyEval_SetProfile.argtypes = [ctypes.c_void_p] * 3
    callback = ctypes.cast(_CALLBACK, ctypes.c_void_p) if on else None
    state = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while state:
        api._PyEval_SetProfile(state, callback, None)
        state = api.PyThreadState_Next(ctypes.c_void_p(state))


def _watch_zmq() -> None:
    # Every other method of a ZeroMQ socket ends in these two, once for each part of a message.
    send, receive = zmq.Socket.send, zmq.Socket.recv

    def watched_send(self: Any, data: Any, flags: int = 0, *args: Any, **kwargs: Any) -> Any:
        result = send(self, data, flags, *args, **kwargs)
        _messages.append((monotonic_ns(), _zmq_name(self), "to", int(not int(flags) & _SEND_MORE), _size(data)))
        return result

    def watched_receive(self: Any, *args: Any, **kwargs: Any) -> Any:
        data = receive(self, *args, **kwargs)
        last = not self.getsockopt(_RECEIVE_MORE)
        _messages.append((monotonic_ns(), _zmq_name(self), "from", int(last), _size(data)))
        return data

    zmq.Socket.send, zmq.Socket.recv = watched_send, watched_receive  # type: ignore[method-assign]


def _watch_sockets(name: str, direction: str) -> None:
    plain: Callable[..., Any] = getattr(socket.socket, name)

    def watched(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
        result = plain(self, *args, **kwargs)
        size = result if isinstance(result, int) else len(args[0] if result is None else result)
        # What a stream delivers at once depends on when it is read: there, only what is sent is a message.
        _messages.append((monotonic_ns(), _socket_name(self), direction, int(direction == "to"), size))
        return result

    setattr(socket.socket, name, watched)


def _size(data: Any) -> int:
    return memoryview(data.buffer if isinstance(data, zmq.Frame) else data).nbytes


def _zmq_name(sock: Any) -> str:
    if id(sock) not in _names:
        _names[id(sock)] = sock.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    return _names[id(sock)]


def _socket_name(sock: socket.socket) -> str:
    """Return the address of a connection; empty: none, as of the ends of `socket.socketpair`."""
    if id(sock) not in _names:
        try:
            _names[id(sock)] = str(sock.getpeername() or sock.getsockname())
        except OSError:  # it is not connected
            return ""
    return _names[id(sock)]
