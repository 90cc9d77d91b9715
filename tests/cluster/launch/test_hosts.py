"""Ranks on two hosts: the second is a network namespace with its own host name; real engines on both."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from axon_nb.cluster.launch.placement import Layout, interface_ip, place_ranks, plan_layout
from axon_nb.errors import StartError, UsageError
from axon_nb.records.compatibility import Verdict
from axon_nb.records.protocol.cluster import EngineInfo
from axon_nb.records.protocol.version import own_version
from tests.cluster.launch.second_host import FAR_HOST, Network, network, why_not
from tests.support.processes import until
from tests.support.script import Script, command_lines, family

LAUNCHER = "tests.cluster.launch.second_host.FarEngineSetLauncher"


@pytest.fixture(scope="module")
def link() -> Iterator[Network]:
    """The network between two hosts."""
    if reason := why_not():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def script(link: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with ranks 0 to 3, two on each host."""
    with Script(tmp_path_factory.mktemp("hosts"), **link.environment) as script:
        started = script.ok(
            f"import axon_nb\nc = axon_nb.start(4, engines={LAUNCHER!r}, interface={link.interface!r}, devices='cpu')"
        )
        assert link.near_ip in started.out
        yield script


def test_ranks_report_their_host(script: Script) -> None:
    cell = (
        "import os, socket\n"
        "names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')\n"
        "(socket.gethostname(), *(int(os.environ[n]) for n in names))"
    )
    values = script.value(f"dict(c.run({cell!r}).values)")
    by_host: dict[str, list[tuple[int, ...]]] = {}
    for rank in range(4):
        host, *numbers = values[rank]
        assert numbers[0] == rank
        by_host.setdefault(host, []).append(tuple(numbers[1:]))
    assert set(by_host) == {socket.gethostname(), FAR_HOST}
    for seen in by_host.values():
        assert [numbers[:2] for numbers in seen] == [(0, 2), (1, 2)]
        assert {numbers[3] for numbers in seen} == {2}
    assert len({numbers[2] for seen in by_host.values() for numbers in seen}) == 2
    assert sorted(script.value("c.status()['host'].unique().tolist()")) == sorted(by_host)


def test_ranks_on_two_hosts_communicate_and_form_groups(script: Script) -> None:
    cell = (
        "t = torch.full((1000,), float(rank + 1))\ndist.all_reduce(t)\n"
        "g = dist.new_group([0, 3])\nu = torch.ones(1)\nif rank in (0, 3): dist.all_reduce(u, group=g)\n"
        "(t[0].item(), u.item())"
    )
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert values == {0: (10.0, 2.0), 1: (10.0, 1.0), 2: (10.0, 1.0), 3: (10.0, 2.0)}


def test_failed_rank_releases_peers_on_the_other_host(script: Script) -> None:
    answer = script.run("c.run('if rank == 1: raise ValueError(\"far\")\\ndist.barrier()')")
    assert answer.message == "rank 1: ValueError: far"
    assert script.value("dict(c.run('dist.barrier(); rank').values)") == {0: 0, 1: 1, 2: 2, 3: 3}


def test_only_loopback_and_the_chosen_address_listen(script: Script, link: Network) -> None:
    ips = set()
    for process in family(script.mark):
        for entry in process.net_connections(kind="inet"):
            if entry.status == psutil.CONN_LISTEN:
                ips.add(entry.laddr.ip)
    assert link.near_ip in ips
    assert ips <= {"127.0.0.1", link.near_ip, link.far_ip}


def test_network_store_rejects_clients_without_the_key(script: Script, link: Network) -> None:
    ports = {
        entry.laddr.port
        for process in family(script.mark)
        if "axon_nb.host" in process.cmdline()
        for entry in process.net_connections(kind="tcp")
        if entry.status == psutil.CONN_LISTEN
    }
    assert len(ports) == 1
    with socket.create_connection((link.near_ip, ports.pop()), 60) as sock:
        sock.settimeout(60)
        assert len(sock.recv(100)) == 32
        sock.sendall(bytes(64))
        assert sock.recv(100) == b""


def test_stop_leaves_no_processes_on_either_host(script: Script) -> None:
    folder = Path(script.value("str(c.connection.run_dir.path)"))
    script.ok("c.stop()")
    assert until(lambda: not script.others()), command_lines(script.others())
    assert until(lambda: not folder.exists())


@pytest.mark.slow
def test_start_without_interface_names_the_missing_setting(link: Network, tmp_path: Path) -> None:
    with Script(tmp_path, **link.environment) as script:
        # The limit is for the ranks alone: agent and controller are there before.
        answer = script.run(
            "import axon_nb\nfrom axon_nb.cluster import current\n"
            "session = current.session()\nsession.prewarm.start()\n"
            "assert session.prewarm.wait_until_idle(140)\nsession.settings.set('start_timeout=12')\n"
            f"axon_nb.start(2, engines={LAUNCHER!r}, devices='cpu')"
        )
        assert answer.kinds[0] == "StartError"
        assert "--interface NAME" in answer.message
        assert "within -" not in answer.message
        assert until(lambda: not script.others())


def test_launcher_without_hosts_names_the_setting(tmp_path: Path) -> None:
    with Script(tmp_path, IPYTHONDIR=str(tmp_path)) as script:
        answer = script.run("import axon_nb\naxon_nb.start(2, engines='ssh', devices='cpu')")
        assert answer.kinds[0] == "StartError"
        assert answer.message.startswith(
            "The engine launcher 'ssh' has room for 0 of 2 ranks: set its hosts in `ipcluster_config.py`"
        )
        assert until(lambda: not script.others())


def test_interface_is_given_by_name_or_address() -> None:
    assert interface_ip("lo") == interface_ip("127.0.0.1") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"--interface nonesuch: this host has no such interface or address"):
        interface_ip("nonesuch")


def test_several_hosts_require_num_ranks() -> None:
    with pytest.raises(UsageError, match="Several hosts need `-n`"):
        plan_layout(None, several_hosts=True)
    with pytest.raises(UsageError, match="--devices must be auto or cpu with ranks on several hosts; got 0,1"):
        plan_layout(2, devices="0,1", several_hosts=True)


def _places(*hosts: str, gpus: int = 0) -> list[EngineInfo]:
    return [EngineInfo(host, 1, 6, gpus, own_version(), Verdict("", "", 0.0, ())) for host in hosts]


def test_placements_follow_the_hosts() -> None:
    layout = Layout(3, "nccl", ("cuda:0",) * 3, None, 1)
    found = place_ranks(layout, _places("a", "b", "a", gpus=2))
    shown = [(s.local_rank, s.local_world_size, s.node_rank, s.device, s.threads) for s in found]
    assert shown == [(0, 2, 0, "cuda:0", 3), (0, 1, 1, "cuda:0", 6), (1, 2, 0, "cuda:1", 3)]
    with pytest.raises(StartError, match="a has 2 ranks and 1 GPU"):
        place_ranks(layout, _places("a", "b", "a", gpus=1))
    assert place_ranks(layout, _places("a", "b", "a", gpus=2), threads_per_rank=2)[1].threads == 2
