"""Ranks on a host that joined, and what is lost and comes back when its link is cut."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.launch.second_host import (
    FAR_HOST,
    HERE,
    IN_NAMESPACE,
    Network,
    network,
    start_with_joined_host,
    why_not,
)
from tests.support.processes import until
from tests.support.script import Script, command_lines, family

SUM = "t = torch.ones(1); dist.all_reduce(t)"
WAIT_FOR_HOST = (
    "import time\nfrom axon_nb.records.protocol.agent import GetInfo\nend = time.monotonic() + 120\n"
    "while not c.connection.agent.call(GetInfo()).hosts and time.monotonic() < end: time.sleep(0.05)"
)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with ranks 0 and 1 here, 2 and 3 under the agent that joined."""
    with Script(tmp_path_factory.mktemp("joined")) as script:
        script.ok(start_with_joined_host(HERE, "lo"), timeout=230)
        yield script


def test_ranks_of_both_hosts_form_one_world(script: Script) -> None:
    cell = (
        "import os\nt = torch.ones(3)\ndist.all_reduce(t)\nkept = rank\n"
        "(os.getppid(), os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'], t[0].item())"
    )
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert [values[rank][1:] for rank in range(4)] == [
        (local, host, 4.0) for local, host in [("0", "0"), ("1", "0"), ("0", "1"), ("1", "1")]
    ]
    agent = script.value("joined.pid")
    assert [values[rank][0] == agent for rank in range(4)] == [False, False, True, True]
    hosts = script.value("c.status()['host'].tolist()")
    assert hosts[0] == hosts[1] != FAR_HOST
    assert hosts[2:] == [FAR_HOST, FAR_HOST]


def test_dead_rank_on_the_other_host_is_reported_and_replaced_alone(script: Script) -> None:
    cell = "import os\nif rank == 3:\n    os.write(2, b'last words\\n'); os.kill(os.getpid(), 9)\ndist.barrier()"
    answer = script.run(f"c.run({cell!r})")
    assert answer.message.startswith(f"rank 3 was killed by SIGKILL on the host {FAR_HOST!r}")
    assert "last words" in answer.message
    script.ok("c.repair()")
    values = script.value("dict(c.run('import os; dist.barrier(); (globals().get(\"kept\"), os.getppid())').values)")
    assert [values[rank][0] for rank in range(4)] == [0, 1, 2, None]
    assert values[3][1] == script.value("joined.pid")


def test_ranks_of_a_lost_host_are_reported_and_return_when_it_has_joined_again(script: Script) -> None:
    script.ok("c.run('kept = rank')")
    cell = "import os, time\nif rank == 2:\n    os.kill(os.getppid(), 9); time.sleep(60)\ndist.barrier()"
    answer = script.run(f"c.run({cell!r})")
    assert f"lost with its host {FAR_HOST!r}: its agent closed the connection" in answer.message
    dead = script.value("sorted(c.health.dead)")
    assert dead == [2, 3]
    assert script.value("dict(c.run('kept', ranks='0-1').values)") == {0: 0, 1: 1}
    answer = script.run("c.repair()")
    assert f"The host {FAR_HOST!r} is not connected. Run `axon-nb host --join` there again" in answer.message
    assert re.search(r"What happened to it: joined \d\d:\d\d:\d\d, lost \d\d:\d\d:\d\d\.", answer.message)
    script.ok(
        "import time\nfrom axon_nb.records.protocol.agent import GetInfo\njoined.wait()\njoin()\n"
        "end = time.monotonic() + 120\n"
        "while not c.connection.agent.call(GetInfo()).hosts and time.monotonic() < end: time.sleep(0.05)"
    )
    script.ok("c.repair()")
    cell = "t = torch.ones(1); dist.all_reduce(t); (globals().get('kept'), t.item())"
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert values == {0: (0, 4.0), 1: (1, 4.0), 2: (None, 4.0), 3: (None, 4.0)}


def test_nothing_listens_but_on_the_address_that_was_named(script: Script) -> None:
    listening = {
        entry.laddr.ip
        for process in family(script.mark)
        for entry in process.net_connections(kind="inet")
        if entry.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


def test_stop_leaves_nothing_on_either_host(script: Script) -> None:
    script.ok("from axon_nb.records.protocol.agent import GetInfo")
    script.ok("hosts = c.connection.agent.call(GetInfo()).hosts.values()")
    folders = script.value("[str(c.connection.run_dir.path), *(host.folder for host in hosts)]")
    assert len(folders) == 2
    script.ok("c.stop()")
    script.ok("joined.wait(60)")
    assert until(lambda: not script.others()), command_lines(script.others())
    assert until(lambda: not any(Path(folder).exists() for folder in folders))


@pytest.fixture(scope="module")
def link() -> Iterator[Network]:
    """The network between two hosts."""
    if reason := why_not():
        pytest.skip(reason)
    with network() as made:
        yield made


@pytest.fixture(scope="module")
def linked_script(link: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with ranks 0 and 1 on this host, 2 and 3 on the other."""
    with Script(tmp_path_factory.mktemp("links"), **link.environment) as script:
        script.ok(start_with_joined_host(IN_NAMESPACE, link.interface), timeout=230)
        script.ok("c.run('kept = rank')")
        yield script


def test_ranks_form_one_world_over_the_link(linked_script: Script) -> None:
    cell = "import socket\nt = torch.ones(3)\ndist.all_reduce(t)\n(socket.gethostname(), t[0].item())"
    values = linked_script.value(f"dict(c.run({cell!r}).values)")
    assert [values[rank][1] for rank in range(4)] == [4.0] * 4
    assert [values[rank][0] == FAR_HOST for rank in range(4)] == [False, False, True, True]


@pytest.mark.parametrize("silently", [False, True], ids=["link down", "packets lost"])
def test_short_cut_of_the_link_loses_nothing(
    linked_script: Script, link: Network, tmp_path: Path, silently: bool
) -> None:
    cell = (
        f"import time\nopen(f'{tmp_path}/{{rank}}', 'w').close()\nt = torch.zeros(1)\n"
        "for _ in range(60):\n    t += 1; dist.all_reduce(t); t /= world_size; time.sleep(0.05)\n"
        "(kept, t.item())"
    )
    linked_script.submit(f"dict(c.run({cell!r}).values)")
    assert until(lambda: len(list(tmp_path.iterdir())) == 4)
    with link.cut(silently=silently):
        time.sleep(2.0)
    assert linked_script.collect().value == {rank: (rank, 60.0) for rank in range(4)}


def test_ranks_of_a_lost_host_start_on_another_and_move_back(linked_script: Script, link: Network) -> None:
    cell = f"import socket; {SUM}; (socket.gethostname() == {FAR_HOST!r}, globals().get('kept'), t.item())"
    with link.cut():
        answer = linked_script.run("c.run('dist.barrier()')")
        assert f"lost with its host {FAR_HOST!r}: its agent has not responded for" in answer.message
        assert linked_script.value("sorted(c.health.dead)") == [2, 3]
        answer = linked_script.run("c.repair(host='nowhere')")
        assert "--on must be a host of the cluster (" in answer.message
        linked_script.ok("import socket\nc.repair(host=socket.gethostname())")
        values = linked_script.value(f"dict(c.run({cell!r}).values)")
        assert values == {0: (False, 0, 4.0), 1: (False, 1, 4.0), 2: (False, None, 4.0), 3: (False, None, 4.0)}
        assert linked_script.value("c.status()['host'].nunique()") == 1
        linked_script.run("c.run('import os\\nif rank == 3: os.kill(os.getpid(), 9)\\ndist.barrier()')")
        linked_script.ok("c.repair()")
        assert linked_script.value(f"dict(c.run({cell!r}).values)") == values
    linked_script.ok(WAIT_FOR_HOST)
    linked_script.ok(f"c.repair('2-3', host={FAR_HOST!r})")
    values = linked_script.value(f"dict(c.run({cell!r}).values)")
    assert values == {0: (False, 0, 4.0), 1: (False, 1, 4.0), 2: (True, None, 4.0), 3: (True, None, 4.0)}
    linked_script.ok("c.stop()")
    assert until(lambda: not linked_script.others()), command_lines(linked_script.others())
