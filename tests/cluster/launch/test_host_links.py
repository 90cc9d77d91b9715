"""The link to a host that joined is cut: for a moment, and for good; that host is a network namespace."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.launch.second_host import FAR_HOST, IN_NAMESPACE, Network, network, start_with_joined_host, why_not
from tests.support.processes import until
from tests.support.script import Script, command_lines

SUM = "t = torch.ones(1); dist.all_reduce(t)"
WAIT_FOR_HOST = (
    "import time\nfrom axon_nb.records.protocol.agent import GetInfo\nend = time.monotonic() + 120\n"
    "while not c.connection.agent.call(GetInfo()).hosts and time.monotonic() < end: time.sleep(0.05)"
)


@pytest.fixture(scope="module")
def link() -> Iterator[Network]:
    """The network between two hosts."""
    if reason := why_not():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def script(link: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with ranks 0 and 1 on this host, 2 and 3 on the other."""
    with Script(tmp_path_factory.mktemp("links"), **link.environment) as script:
        script.ok(start_with_joined_host(IN_NAMESPACE, link.interface), timeout=230)
        script.ok("c.run('kept = rank')")
        yield script


def test_ranks_of_both_hosts_form_one_world(script: Script) -> None:
    cell = "import socket\nt = torch.ones(3)\ndist.all_reduce(t)\n(socket.gethostname(), t[0].item())"
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert [values[rank][1] for rank in range(4)] == [4.0] * 4
    assert [values[rank][0] == FAR_HOST for rank in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("silently", [False, True], ids=["link down", "packets lost"])
def test_short_cut_of_the_link_loses_nothing(script: Script, link: Network, tmp_path: Path, silently: bool) -> None:
    cell = (
        f"import time\nopen(f'{tmp_path}/{{rank}}', 'w').close()\nt = torch.zeros(1)\n"
        "for _ in range(60):\n    t += 1; dist.all_reduce(t); t /= world_size; time.sleep(0.05)\n"
        "(kept, t.item())"
    )
    script.submit(f"dict(c.run({cell!r}).values)")
    assert until(lambda: len(list(tmp_path.iterdir())) == 4)
    with link.cut(silently=silently):
        time.sleep(2.0)
    assert script.collect().value == {rank: (rank, 60.0) for rank in range(4)}


def test_ranks_of_a_lost_host_start_on_another_and_move_back(script: Script, link: Network) -> None:
    cell = f"import socket; {SUM}; (socket.gethostname() == {FAR_HOST!r}, globals().get('kept'), t.item())"
    with link.cut():
        assert f"lost with its host {FAR_HOST!r}" in script.run("c.run('dist.barrier()')").message
        answer = script.run("c.repair(host='nowhere')")
        assert "--on must be a host of the cluster (" in answer.message
        script.ok("import socket\nc.repair(host=socket.gethostname())")
        values = script.value(f"dict(c.run({cell!r}).values)")
        assert values == {0: (False, 0, 4.0), 1: (False, 1, 4.0), 2: (False, None, 4.0), 3: (False, None, 4.0)}
        assert script.value("c.status()['host'].nunique()") == 1
        script.run("c.run('import os\\nif rank == 3: os.kill(os.getpid(), 9)\\ndist.barrier()')")
        script.ok("c.repair()")
        assert script.value(f"dict(c.run({cell!r}).values)") == values
    script.ok(WAIT_FOR_HOST)
    script.ok(f"c.repair('2-3', host={FAR_HOST!r})")
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert values == {0: (False, 0, 4.0), 1: (False, 1, 4.0), 2: (True, None, 4.0), 3: (True, None, 4.0)}


def test_host_behind_a_cut_link_is_lost_and_joins_again_by_itself(script: Script, link: Network) -> None:
    with link.cut():
        answer = script.run("c.run('dist.barrier()')")
        assert f"lost with its host {FAR_HOST!r}: its agent has not responded for" in answer.message
        assert script.value("sorted(c.health.dead)") == [2, 3]
        assert script.value("dict(c.run('kept', ranks='0-1').values)") == {0: 0, 1: 1}
    script.ok(WAIT_FOR_HOST)
    script.ok("c.repair()")
    cell = f"{SUM}; (globals().get('kept'), t.item())"
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert values == {0: (0, 4.0), 1: (1, 4.0), 2: (None, 4.0), 3: (None, 4.0)}
    script.ok("c.stop()")
    assert until(lambda: not script.others()), command_lines(script.others())
