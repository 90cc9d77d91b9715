"""Ranks on a host whose agent joined: the agent is one more process here, started by the command that is printed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.launch.second_host import FAR_HOST, HERE, start_with_joined_host
from tests.support.processes import until
from tests.support.script import Script, command_lines, family


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
