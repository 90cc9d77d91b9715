"""`--hosts ssh:NAME`: a real sshd in a network namespace starts the agent of the second host, with its own clock."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.records.protocol.wire import PROTOCOL
from tests.cluster.launch.hosts.ssh_server import SshServer
from tests.cluster.launch.second_host import (
    FAR_HOST,
    HERE_IN_OTHER_TIME,
    Network,
    one_clock_only,
    start_with_joined_host,
)
from tests.support.processes import until
from tests.support.script import ROOT, Script, command_lines, family

ALL_REDUCE = "t = torch.ones(1); dist.all_reduce(t); (globals().get('kept'), t.item())"

_SPANS = """
table = c.spans.recorded()
calls = {}
for span in table.spans():
    if span.kind == "collective" and span.name == "all_reduce":
        calls.setdefault(span.sequence, []).append((span.start_ns, span.end_ns))
"""


@pytest.fixture(scope="module")
def script(server: SshServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script without a cluster."""
    with Script(tmp_path_factory.mktemp("ssh"), IPYTHONDIR=str(server.ipython)) as script:
        script.ok("import axon_nb")
        yield script


def test_agent_that_ssh_starts_runs_ranks_and_outlives_ssh(script: Script, link: Network) -> None:
    started = script.ok(f"c = axon_nb.start(4, hosts='ssh:{FAR_HOST}', devices='cpu')", timeout=230)
    assert f"listen on {link.near_ip} for ranks on other hosts" in started.out
    values = script.value("dict(c.run('import socket; kept = rank; socket.gethostname()').values)")
    assert [values[rank] == FAR_HOST for rank in range(4)] == [False, False, True, True]
    key = script.value("c.connection.client.session.key.decode()")
    assert not [line for line in command_lines(family(script.mark)) if key in line]
    (ssh,) = [one for one in script.others() if one.name() == "ssh"]
    ssh.kill()
    assert script.value(f"dict(c.run({ALL_REDUCE!r}).values)") == {rank: (rank, 4.0) for rank in range(4)}
    answer = script.run("c.run('import os\\nif rank == 3: os.kill(os.getpid(), 9)\\ndist.barrier()')")
    assert answer.message.startswith(f"rank 3 was killed by SIGKILL on the host {FAR_HOST!r}")
    script.ok("c.repair()")
    values = script.value(f"dict(c.run({ALL_REDUCE!r}).values)")
    assert values == {0: (0, 4.0), 1: (1, 4.0), 2: (2, 4.0), 3: (None, 4.0)}
    cell = "import os, time\nif rank == 2:\n    os.kill(os.getppid(), 9); time.sleep(60)\ndist.barrier()"
    assert f"lost with its host {FAR_HOST!r}" in script.run(f"c.run({cell!r})").message
    script.ok("c.repair()")  # it starts the agent again
    values = script.value(f"dict(c.run({ALL_REDUCE!r}).values)")
    assert values == {0: (0, 4.0), 1: (1, 4.0), 2: (None, 4.0), 3: (None, 4.0)}
    script.ok("c.stop()")
    assert until(lambda: not script.others()), command_lines(script.others())


def test_cluster_is_attached_to_after_its_notebook_was_killed(server: SshServer, tmp_path: Path) -> None:
    where = {"IPYTHONDIR": str(server.ipython)}
    with Script(tmp_path, **where) as script:
        script.ok(f"import axon_nb\nc = axon_nb.start(2, hosts='ssh:{FAR_HOST}', devices='cpu', name='far')")
        script.ok("c.run('kept = rank')")
        script.process.kill()
        script.process.wait(60)
        with Script(tmp_path, **where) as second:
            second.ok("import axon_nb\nc = axon_nb.attach('far')")
            assert second.value(f"dict(c.run({ALL_REDUCE!r}).values)") == {0: (0, 2.0), 1: (1, 2.0)}
            answer = second.run("c.run('import os\\nif rank == 1: os.kill(os.getpid(), 9)\\ndist.barrier()')")
            assert answer.message.startswith(f"rank 1 was killed by SIGKILL on the host {FAR_HOST!r}")
            second.ok("c.repair()")
            assert second.value(f"dict(c.run({ALL_REDUCE!r}).values)") == {0: (0, 2.0), 1: (None, 2.0)}
            second.ok("from axon_nb.cluster import current\ncurrent.session().settings.set('keep_alive=1s')")
            second.process.kill()
            second.process.wait(60)
            assert until(lambda: not script.others() and not second.others()), command_lines(script.others())


def test_push_sends_one_copy_to_a_host(script: Script, link: Network) -> None:
    script.ok(f"c = axon_nb.start(5, hosts='ssh:{FAR_HOST}=4', devices='cpu')", timeout=230)
    sent = Path(f"/sys/class/net/{link.interface}/statistics/tx_bytes")
    before = int(sent.read_text())
    script.ok("import numpy as np\nvalues = np.arange(4 << 20, dtype=np.float64)\nc.push({'values': values})")
    copies = (int(sent.read_text()) - before) / (32 << 20)
    assert 1.0 < copies < 1.2
    sums = script.value("dict(c.run('values[rank] = -1.0; float(values.sum())').values)")
    assert sums == {rank: float(sum(range(4 << 20)) - rank - 1) for rank in range(5)}
    held = "import os; [os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')]"
    assert "memfd:axon_nb (deleted)" not in str(script.value(f"dict(c.run({held!r}).values)"))
    script.ok("c.stop()")


def test_world_on_two_hosts_changes_its_size(script: Script) -> None:
    script.ok(f"c = axon_nb.start(3, hosts='ssh:{FAR_HOST}', devices='cpu')", timeout=230)
    script.ok(
        "c.run('model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)')"
    )
    step = (
        "import socket\\noptimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()\\n"
        "(socket.gethostname(), [p.detach().sum().item() for p in model.parameters()])"
    )
    for size, far in ((5, [2, 3]), (2, []), (4, [2, 3])):
        script.ok(f"c.resize({size})", timeout=230)
        values = script.value(f"dict(c.run('{step}').values)")
        assert [rank for rank in range(size) if values[rank][0] == FAR_HOST] == far
        assert all(values[rank][1] == values[0][1] for rank in range(size))
    script.ok("c.stop()")
    assert until(lambda: not script.others()), command_lines(script.others())


def _other_version(folder: Path) -> Path:
    """A Python whose axon_nb speaks another protocol."""
    shutil.copytree(ROOT / "axon_nb", folder / "axon_nb", ignore=shutil.ignore_patterns("__pycache__"))
    version = folder / "axon_nb" / "records" / "protocol" / "version.py"
    text = version.read_text()
    assert f"\nPROTOCOL = {PROTOCOL}\n" in text
    version.write_text(text.replace(f"\nPROTOCOL = {PROTOCOL}\n", f"\nPROTOCOL = {PROTOCOL + 1}\n"))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.timeout(900)  # seven starts
def test_host_that_cannot_join_is_named_with_the_fix(
    script: Script, server: SshServer, link: Network, tmp_path: Path
) -> None:
    def refusal(host: str = FAR_HOST, interface: str = link.near_ip, python: str = sys.executable) -> str:
        server.configure(f"c.SSHLauncher.remote_python = {python!r}")
        answer = script.run(f"axon_nb.start(2, hosts='ssh:{host}', interface={interface!r}, devices='cpu')")
        assert answer.kinds[0] == "StartError"
        assert until(lambda: not script.others()), command_lines(script.others())
        return answer.message

    try:
        assert refusal("host.invalid").endswith("Correct its name, or add it to ~/.ssh/config.")
        message = refusal("stranger")
        assert message.startswith("The host 'stranger' cannot join: ")
        fix = "Run `ssh-copy-id stranger`, so that `ssh stranger` works without a password."
        assert message.endswith(f"Permission denied (publickey). {fix}")
        assert refusal("closed").endswith("Connection refused. Make sure that `ssh closed` works in a terminal.")
        base = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
        fix = "install it there, or set `c.SSHLauncher.remote_python` in ipcluster_config.py to a Python that has it."
        assert refusal(python=base) == f"The host {FAR_HOST!r} has no axon_nb for {base}: {fix}"
        assert refusal(python="/no/python") == f"The host {FAR_HOST!r} has no /no/python: {fix}"
        message = refusal(python=str(_other_version(tmp_path)))
        assert f"(protocol {PROTOCOL + 1}), but the notebook has" in message
        message = refusal(interface="lo")
        assert message.startswith(f"The host {FAR_HOST!r} cannot join: Nothing listens on 127.0.0.1:")
        assert "a firewall closes the port. Open it, or run `%distributed start --hosts` again." in message
    finally:
        server.configure()


def test_collectives_of_both_hosts_overlap_and_the_timeline_says_how_well(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if reason := one_clock_only():
        pytest.skip(reason)
    with Script(tmp_path_factory.mktemp("clocks")) as script:
        script.ok(start_with_joined_host(HERE_IN_OTHER_TIME, "lo"), timeout=230)
        script.ok("c.run('for _ in range(20): dist.all_reduce(torch.ones(3))')")
        script.ok(_SPANS)
        assert script.value("sorted(set(map(len, calls.values())))") == [4]
        assert script.value("len(calls)") >= 20
        late_ns = script.value("max(max(s for s, _ in ends) - min(e for _, e in ends) for ends in calls.values())")
        assert late_ns < 1e6  # no rank leaves before the last one has entered
        assert 0 < script.value("table.clock_error_ns") < 1e8
        script.ok("from axon_nb.widgets.timeline.page import timeline_bundle")
        assert "The clocks of the hosts agree to ± " in script.value(
            "timeline_bundle(table, range(4), title='')['text/plain']"
        )
        script.ok("c.stop()")
