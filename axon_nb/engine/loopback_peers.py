"""Who is at the other end of connections that this process accepted on loopback.

Linux lists both ends of such a connection in /proc/net/tcp, each with its owner. Gloo's sockets know no authentication:
they take whoever connects, and keep the connection for a group that is formed later.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LISTEN, _TIME_WAIT = "0A", "06"
_TABLE = Path("/proc/net/tcp")
_FILES = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class _Socket:
    local: str
    remote: str
    state: str
    uid: int
    inode: int

    @property
    def port(self) -> int:
        return int(self.local.rpartition(":")[2], 16)


def _sockets() -> list[_Socket]:
    """Return all IPv4 sockets of this network namespace; none where the system does not list them."""
    try:
        lines = _TABLE.read_text().splitlines()[1:]
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [_Socket(row[1], row[2], row[3], int(row[7]), int(row[9])) for row in rows if len(row) > 9]


def _own_inodes() -> set[int]:
    inodes = set()
    for name in os.listdir(_FILES):
        try:
            target = os.readlink(f"{_FILES}/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(int(target[8:-1]))
    return inodes


def listening_ports() -> set[int]:
    """Return the IPv4 ports on which this process listens; none where the system does not list them."""
    listeners = [socket for socket in _sockets() if socket.state == _LISTEN]
    inodes = _own_inodes() if listeners else set()
    return {socket.port for socket in listeners if socket.inode in inodes}


class PeerCheck:
    """Checks the connections that were accepted on some ports, each of them once.

    Args:
        ports: Ports of this process, on loopback.
    """

    def __init__(self, ports: set[int]) -> None:
        self._ports = ports
        self._known: set[int] = set()
        """Inodes of the connections whose other end belongs to this user."""

    def foreign(self) -> list[str]:
        """Describe who else holds the other end of an accepted connection; empty if nobody does."""
        peers, sockets = [], _sockets()
        by_ends = {(socket.local, socket.remote): socket for socket in sockets}
        inodes = _own_inodes() if self._ports else set()
        for socket in sockets:
            if socket.port not in self._ports or socket.state in (_LISTEN, _TIME_WAIT):
                continue
            if socket.inode not in inodes or socket.inode in self._known:
                continue
            other = by_ends.get((socket.remote, socket.local))
            if other is not None and other.inode and other.uid == os.getuid():
                self._known.add(socket.inode)
            else:  # a socket that its process has closed has no owner
                peers.append("a process that is gone" if other is None or not other.inode else f"user {other.uid}")
        return peers
