"""The clock of a host that joined over a slow link is known to a millisecond, with the error."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from axon_nb.records.protocol.agent import GetInfo
from axon_nb.records.spans import HostClock
from tests.cluster.launch.second_host import CLOCK_AHEAD_S, IN_OTHER_TIME, one_clock_only
from tests.host.link.conftest import FAR, IP, Joining
from tests.support.processes import until

_DELAY_S = 0.005


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            time.sleep(_DELAY_S)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _slow_link(address: str) -> Iterator[str]:
    """An address that leads to another one; everything takes 5 ms in each direction."""
    ip, _, port = address.rpartition(":")
    with socket.create_server((IP, 0)) as server:
        ends: list[socket.socket] = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                near, _ = server.accept()
                far = socket.create_connection((ip, int(port)))
                ends.extend((near, far))
                for one in ends:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                back = threading.Thread(target=_pass_on, args=(far, near))
                back.start()
                _pass_on(near, far)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"{IP}:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in ends:
            one.close()


def test_clock_of_a_host_behind_a_slow_link_is_found_with_its_error(joining: Joining) -> None:
    if reason := one_clock_only():
        pytest.skip(reason)
    with _slow_link(joining.address) as address:
        process = joining.start(address=address, behind=IN_OTHER_TIME)

        def clock() -> HostClock | None:
            return joining.first.client.call(GetInfo()).clocks.get(FAR)

        def wrong_ns(found: HostClock | None) -> float:
            return abs(found.offset_ns + CLOCK_AHEAD_S * 1e9) if found else float("inf")

        assert until(lambda: (found := clock()) is not None and wrong_ns(found) < 1e6), (clock(), process.poll())
        found = clock()
        assert found is not None
        assert wrong_ns(found) <= found.error_ns
        assert found.error_ns >= _DELAY_S * 1e9  # a link may delay one direction only: nobody can tell
        joining.first.client.stop(60.0)
