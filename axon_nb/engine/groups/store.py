"""The rendezvous store as ranks see it: a `torch.distributed.Store` over the host agent's socket.

torch's own TCPStore listens on all interfaces and has no authentication; this one is a 0600 Unix socket in a 0700
folder, or, for ranks on other hosts, a TCP connection on which both ends know the cluster's key.

Waiting for the other ranks of a group that is being made: they may come at very different times.

Connecting in Gloo has a limit of a few seconds, which a slow rank would break; here the limit is the group's own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from axon_nb.engine.groups.abort import raise_if_aborted
from axon_nb.host.store import encode, receive
from axon_nb.host.store_tcp import MessageSigner, authenticate

__all__ = ["AgentStore", "allow_waits", "cancel_waits", "rendezvous", "skip_rendezvous"]

_SLICE_MS = b"50"
_CONNECT_S = 10.0
_TCP = "tcp:"

_given_up: set[int] = set()


def cancel_waits(thread: int) -> None:
    """Nobody wants the result of what `thread` waits for: the wait ends, and stands in nobody's way any more."""
    _given_up.add(thread)


def allow_waits() -> None:
    """Waits of this thread are wanted, whatever it did before."""
    _given_up.discard(threading.get_ident())


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class AgentStore(Store):
    """A client of the agent's store. Waits are cut into 50 ms slices, so that an interrupt lands between two.

    Args:
        address: Path of the Unix socket, or ``tcp:<ip>:<port>``.
        timeout: Limit of waits.
        key: The store's key; needed over TCP alone.

    Raises:
        ConnectionError: nobody listens there, or somebody who does not know the key.
    """

    def __init__(self, address: str, timeout: timedelta = timedelta(minutes=5), *, key: bytes = b"") -> None:
        super().__init__()
        self._address = address
        self._timeout = timeout
        self._key = key
        self._signer: MessageSigner | None = None
        self._lock = threading.RLock()
        self._sock = self._connect()
        self._broken = False

    @property
    def folder(self) -> Path | None:
        """The cluster's own folder, which all its ranks see; None when there are ranks on other hosts."""
        return None if self._address.startswith(_TCP) else Path(self._address).parent

    def _connect(self) -> socket.socket:
        if not self._address.startswith(_TCP):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self._address)
            return sock
        ip, _, port = self._address.removeprefix(_TCP).rpartition(":")
        sock = socket.create_connection((ip, int(port)), _CONNECT_S)
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
        return str(self._sock.getsockname()[0]) if self._address.startswith(_TCP) else "127.0.0.1"

    def _call(self, *parts: bytes) -> list[bytes]:
        with self._lock:
            if self._broken:
                self._sock.close()
                self._sock = self._connect()
            # An interrupt between request and answer: the next call on that connection would get this one's answer.
            self._broken = True
            message = list(parts)
            self._sock.sendall(encode(message if self._signer is None else self._signer.sign(message)))
            answer = receive(self._sock)
            if self._signer is not None:
                answer = self._signer.verify(answer)
            self._broken = False
            return answer

    def set(self, key: str, value: str | bytes) -> None:
        """Set one key."""
        self._call(b"set", _bytes(key), _bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, waited for up to the store's timeout."""
        return self._wait_for([key], self._timeout)[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        return int(self._call(b"add", _bytes(key), b"%d" % amount)[0])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if it holds `expected`; returns what it then holds."""
        return self._call(b"compare_set", _bytes(key), _bytes(expected), _bytes(desired))[0]

    def delete_key(self, key: str) -> bool:
        """Delete one key; whether it was there."""
        return self._call(b"delete", _bytes(key))[0] == b"1"

    def num_keys(self) -> int:
        """How many keys there are."""
        return int(self._call(b"count")[0])

    # The names under which torch's C++ side looks for the two, as when a PrefixStore is put over this store.
    deleteKey = delete_key
    getNumKeys = num_keys

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of `key`."""
        self._call(b"append", _bytes(key), _bytes(value))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._call(b"check", *map(_bytes, keys)) == [b"1"]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there."""
        self._wait_for(keys, timeout or self._timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of several keys, waited for."""
        return self._wait_for(keys, self._timeout)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Set several keys at once."""
        pairs = [_bytes(item) for pair in zip(keys, values, strict=True) for item in pair]
        self._call(b"set", *pairs)

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set exist."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of waits."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """The limit of waits."""
        return self._timeout

    def clone(self) -> AgentStore:
        """A client of its own connection to the same store."""
        return AgentStore(self._address, self._timeout, key=self._key)

    def _wait_for(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        if not keys:
            return []
        end = time.monotonic() + timeout.total_seconds()
        wanted = [_bytes(key) for key in keys]
        while True:
            values = self._call(b"wait", _SLICE_MS, *wanted)
            if values:
                return values
            if threading.get_ident() in _given_up:
                raise DistStoreError(f"the wait for {list(keys)[:4]} was given up")
            if time.monotonic() > end:
                raise DistStoreError(f"waited {timeout} in the rendezvous store for {list(keys)[:4]}")


_PIECE = timedelta(milliseconds=20)

_off: list[bool] = []


@contextlib.contextmanager
def skip_rendezvous() -> Iterator[None]:
    """On a replaced rank: the others have its groups already, and only form them anew."""
    _off.append(True)
    try:
        yield
    finally:
        _off.pop()


def rendezvous(store: Store, place: str, *, rank: int, size: int, limit: timedelta) -> None:
    """Say that this rank has come to `place`, and wait for the others.

    Args:
        store: The store that all ranks reach.
        place: Prefix of the keys; another one for each occasion.
        rank: This process's rank in the group.
        size: Number of ranks in the group.
        limit: How long to wait.

    Raises:
        Aborted: the cell was ended meanwhile.
        DistStoreError: a rank did not come.
    """
    if _off:
        return
    keys = [f"{place}/{other}" for other in range(size)]
    store.set(keys[rank], "1")
    end = time.monotonic() + limit.total_seconds()
    while True:
        try:
            store.wait(keys, _PIECE)
            return
        except dist.DistStoreError:
            raise_if_aborted("new_group")
            if time.monotonic() > end:
                raise
