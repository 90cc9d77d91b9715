"""`--hosts mpi:NAME`: Open MPI starts the agent of the second host, a network namespace, through a real sshd."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.launch.hosts.ssh_server import SshServer
from tests.cluster.launch.second_host import FAR_HOST, Network
from tests.support.processes import until
from tests.support.script import Script, command_lines, family


@pytest.fixture(scope="module", autouse=True)
def _open_mpi() -> None:
    """Open MPI is needed."""
    if shutil.which("mpiexec") is None:
        pytest.skip("needs mpiexec: Debian's openmpi-bin")
    done = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, timeout=60, check=False)
    if "Open" not in done.stdout:
        pytest.skip("needs Open MPI's mpiexec")


@pytest.fixture(scope="module")
def script(server: SshServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script without a cluster, in which Open MPI reaches that sshd."""
    root_may = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    ssh = f"ssh -F {server.config}"
    with Script(tmp_path_factory.mktemp("mpi"), OMPI_MCA_plm_rsh_agent=ssh, **root_may) as script:
        script.ok("import axon_nb")
        yield script


def test_open_mpi_starts_the_agent_of_another_host(script: Script, link: Network) -> None:
    options = f"hosts='mpi:{FAR_HOST}', interface={link.near_ip!r}, devices='cpu'"
    script.ok(f"c = axon_nb.start(3, {options})", timeout=230)
    key = script.value("c.connection.client.session.key.decode()")
    assert not [line for line in command_lines(family(script.mark)) if key in line]
    cell = "import socket; t = torch.ones(1); dist.all_reduce(t); (socket.gethostname() == 'far-host', t.item())"
    values = {rank: (rank == 2, 3.0) for rank in range(3)}
    assert script.value(f"dict(c.run({cell!r}).values)") == values
    killed = "import os, time\nif rank == 2:\n    os.kill(os.getppid(), 9); time.sleep(60)\ndist.barrier()"
    assert f"lost with its host {FAR_HOST!r}" in script.run(f"c.run({killed!r})").message
    script.ok("c.repair()")
    assert script.value(f"dict(c.run({cell!r}).values)") == values
    script.ok("c.stop()")
    assert until(lambda: not script.others()), command_lines(script.others())


def test_host_that_open_mpi_cannot_reach_is_reported(script: Script) -> None:
    answer = script.run("axon_nb.start(3, hosts='mpi:closed', interface='lo', devices='cpu')")
    assert answer.kinds[0] == "StartError"
    assert answer.message.startswith("The host 'closed' cannot join: ssh: ")
    assert answer.message.endswith(". Make sure that `mpiexec --host closed hostname` works in a terminal.")
    assert until(lambda: not script.others()), command_lines(script.others())
