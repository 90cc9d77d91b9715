"""The rendezvous store on a rank: a `torch.distributed.Store` over the host agent's socket.

torch's own TCPStore listens on all interfaces and has no authentication. This one is a 0600 Unix socket in a 0700
folder or, for ranks on other hosts, a TCP connection on which both ends prove that they know the cluster's key.

Waits in stores that user code makes, and in `init_rpc`, are in C++, where no interrupt arrives. `install_store_waits`
replaces them in rank processes.
"""

from __future__ import annotations

import functools
import math
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistStoreError

from axon_nb.engine.groups.abort import AbortedError, AbortFlag, connect_in_helper, is_abandoned
from axon_nb.engine.groups.state import current_groups
from axon_nb.host.connections import MessageSigner, authenticate
from axon_nb.host.store import encode, receive
from axon_nb.records.environment import HOST_IP

_SLICE_MS = b"50"
_SILENCE_MS = 300
"""The store replies in far less, and to a wait after a slice."""
_CONNECT_TIMEOUT_S = 10.0
_TCP = "tcp:"
_CALLS_PER_EPOCH = 1_000_000
_WAITS = {
    name: getattr(Store, name)
    for name in ("barrier", "get", "multi_get", "queue_pop", "wait")
    if hasattr(Store, name)  # not all torch versions have them
}
"""The methods of torch's `Store` that wait."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AgentStore(Store):
    """A client of the agent's store; waits are cut into 50 ms slices, so that an interrupt can arrive between two.

    Args:
        address: Path of the Unix socket, or ``tcp:<ip>:<port>``.
        timeout: Timeout of waits.
        key: The store's key; only TCP needs it.
        abort: Ends a wait for a store that does not respond; by default, nothing does.

    Raises:
        ConnectionError: nothing listens there, or the other end does not know the key.
    """

    def __init__(
        self,
        address: str,
        timeout: timedelta = timedelta(minutes=5),
        *,
        key: bytes = b"",
        abort: AbortFlag | None = None,
    ) -> None:
        super().__init__()
        self._address = address
        self._timeout = timeout
        self._key = key
        self._abort = abort or AbortFlag()
        self._signer: MessageSigner | None = None
        self._clones: list[AgentStore] = []
        self._lock = threading.RLock()
        self._sock = self._connect()
        self._broken = False

    def __del__(self) -> None:
        if (sock := getattr(self, "_sock", None)) is not None:
            sock.close()

    @property
    def folder(self) -> Path | None:
        """The cluster's own folder, visible to all its ranks; None if there are ranks on other hosts."""
        return None if self._address.startswith(_TCP) else Path(self._address).parent

    def _connect(self) -> socket.socket:
        if not self._address.startswith(_TCP):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self._address)
            return sock
        ip, _, port = self._address.removeprefix(_TCP).rpartition(":")
        sock = socket.create_connection((ip, int(port)), _CONNECT_TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._signer = authenticate(sock, self._key)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        return sock

    @property
    def own_ip(self) -> str:
        """This host's address on the network that leads to the store; 127.0.0.1 over a Unix socket."""
        if not self._address.startswith(_TCP):
            return "127.0.0.1"
        return HOST_IP.get() or str(self._sock.getsockname()[0])

    def _call(self, *parts: bytes) -> list[bytes]:
        with self._lock:
            if self._broken:
                self._sock.close()
                self._sock = self._connect()
            # After an interrupt between request and reply, the next call on this connection would get this reply.
            self._broken = True
            message = list(parts)
            self._sock.sendall(encode(message if self._signer is None else self._signer.sign(message)))
            self._await_reply()
            reply = receive(self._sock)
            if self._signer is not None:
                reply = self._signer.verify(reply)
            self._broken = False
            return reply

    def _await_reply(self) -> None:
        """Wait for a reply; an abort ends the wait if the store does not respond, as when its process is stopped."""
        readable = select.poll()
        readable.register(self._sock, select.POLLIN)
        while not readable.poll(_SILENCE_MS):
            self._abort.raise_if_set("the rendezvous store")

    def set(self, key: str, value: str | bytes) -> None:
        """Set one key."""
        self._call(b"set", _bytes(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of `key`; waits for it up to the store's timeout."""
        return self._wait_for([key], self._timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value."""
        return int(self._call(b"add", _bytes(key), b"%d" % amount)[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it holds `expected`; return what it then holds."""
        return self._call(b"compare_set", _bytes(key), _bytes(expected), _bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete one key; return whether it existed."""
        return self._call(b"delete", _bytes(key))[0] == b"1"

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._call(b"count")[0])

    # The names that torch's C++ side looks up, as when a PrefixStore wraps this store.
    deleteKey = delete_key
    getNumKeys = num_keys

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of `key`."""
        self._call(b"append", _bytes(key), _bytes(value))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return self._call(b"check", *map(_bytes, keys)) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        self._wait_for(keys, timeout or self._timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys; waits for them."""
        return self._wait_for(keys, self._timeout)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several keys at once."""
        pairs = [_bytes(item) for pair in zip(keys, values, strict=True) for item in pair]
        self._call(b"set", *pairs)

    def has_extended_api(self) -> bool:
        """Whether append, multi_get and multi_set exist: they do."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """The timeout of waits."""
        return self._timeout

    def clone(self) -> AgentStore:
        """Return a client with its own connection to the same store; it lives as long as this one.

        torch clones the store when it splits a group, and keeps only the C++ half of the clone.
        """
        clone = AgentStore(self._address, self._timeout, key=self._key, abort=self._abort)
        self._clones.append(clone)
        return clone

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        if not keys:
            return []
        end = time.monotonic() + timeout.total_seconds()
        wanted = [_bytes(key) for key in keys]
        while True:
            values = self._call(b"wait", _SLICE_MS, *wanted)
            if values:
                return values
            if is_abandoned():  # it would block the store for the next rebuild until its timeout
                raise DistStoreError(f"the wait for {list(keys)[:4]} was cancelled")
            if time.monotonic() > end:
                raise DistStoreError(f"timed out after {timeout} in the rendezvous store, waiting for {list(keys)[:4]}")


class _Waits:
    """What replaces the waits of torch's `Store`, by name.

    They look again and again: a thread that waited in C++ would hold the store's lock until its timeout.
    """

    def wait(self: Any, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not keys or _waits_itself(self):
            _WAITS["wait"](self, keys, *([] if timeout is None else [timeout]))
        else:
            _wait_until(lambda: bool(self.check(keys)), timeout or self.timeout, f"keys: {', '.join(keys)}")

    def get(self: Any, key: str) -> bytes:
        if not _waits_itself(self):
            self.wait([key])
        return bytes(_WAITS["get"](self, key))

    def multi_get(self: Any, keys: Sequence[str]) -> list[bytes]:
        if not _waits_itself(self):
            self.wait(keys)
        return list(_WAITS["multi_get"](self, keys))

    def queue_pop(self: Any, key: str, block: bool = True) -> bytes:
        while block:
            _wait_until(lambda: self.queue_len(key) > 0, self.timeout, f"queue: {key}")
            try:
                return bytes(_WAITS["queue_pop"](self, key, False))
            except dist.QueueEmptyError:  # another rank was faster
                continue
        return bytes(_WAITS["queue_pop"](self, key, False))

    def barrier(self: Any, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        if self.add(f"{key}/arrived", 1) == world_size:
            self.set(f"{key}/complete", "1")
        self.wait([f"{key}/complete"], timeout)


def install_store_waits() -> None:
    """Let interrupts and aborts end the waits of stores, in this process from now on."""
    kind: Any = Store
    for name in _WAITS:
        call: Any = vars(_Waits)[name]
        call.__code__ = call.__code__.replace(co_name=f"store.{name}")  # what the cell's state shows
        setattr(kind, name, call)
    server: Any = vars(dist)["TCPStore"]
    connect = server.__init__

    @functools.wraps(connect)
    def connect_interruptibly(self: Any, *args: Any, **kwargs: Any) -> None:
        _in_helper("TCPStore", functools.partial(connect, self, *args, **kwargs))

    server.__init__ = connect_interruptibly


def _wait_until(done: Callable[[], bool], timeout: timedelta, what: str) -> None:
    end, pause = time.monotonic() + timeout.total_seconds(), _FIRST_PAUSE_S
    while not done():
        _raise_if_over("a wait in a store")
        if time.monotonic() > end:
            raise DistStoreError(f"wait timeout after {int(timeout.total_seconds() * 1000)}ms, {what}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def interruptible_init_rpc(original: FunctionType) -> Callable[..., None]:
    """Return an `init_rpc` whose wait for other ranks can be interrupted, and which counts as a collective of them."""

    @functools.wraps(original)
    def init_rpc(
        name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        state = current_groups()
        call = functools.partial(original, name, backend, rank, world_size, *args, **kwargs)
        if world_size == dist.get_world_size():
            state.joined["init_rpc"] = count = state.joined["init_rpc"] + 1
            # The prefix of its keys: a rank that was interrupted has counted one call more than the others.
            original.__globals__["_init_counter"] = state.epoch * _CALLS_PER_EPOCH + count
            state.joining = ("init_rpc", tuple(range(world_size)), time.monotonic_ns())
        try:
            _in_helper("init_rpc", call)
        except BaseException:
            state.joined["init_rpc"] -= state.joining is not None
            raise
        finally:
            state.joining = None

    return init_rpc


def _in_helper(what: str, connect: Callable[[], Any]) -> None:
    """Call what connects in C++ and keeps nothing locked meanwhile; an abandoned call ends at its own timeout."""
    connect_in_helper(
        connect,
        raise_if_cancelled=lambda: _raise_if_over(what),
        timeout_s=math.inf,  # it has its own
        dispose=lambda _: None,
    )


def _raise_if_over(what: str) -> None:
    if current_groups().abort.is_set():
        raise AbortedError(f"aborted while waiting in {what}")
    if is_abandoned():
        raise DistStoreError(f"{what} was cancelled")


def _waits_itself(store: Any) -> bool:
    """Whether this is a rank's own store: its waits are interruptible, and others are built on them."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, AgentStore)
