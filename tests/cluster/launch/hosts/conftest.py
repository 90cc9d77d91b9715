"""The second host of these tests, as a network namespace with an sshd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.launch.hosts.ssh_server import SshServer, serve_ssh, why_no_ssh
from tests.cluster.launch.second_host import Network, network


@pytest.fixture(scope="module")
def link() -> Iterator[Network]:
    """The network between two hosts."""
    if reason := why_no_ssh():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def server(link: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """The sshd of the second host."""
    with serve_ssh(link, tmp_path_factory.mktemp("sshd")) as server:
        yield server
