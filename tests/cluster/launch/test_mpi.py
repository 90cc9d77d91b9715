"""`engines="mpi"`: ranks that mpiexec starts. They still form their group over the host agent's store."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.support.output_lines import by_rank
from tests.support.processes import until
from tests.support.script import Script, command_lines

pytestmark = pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs mpiexec, such as Open MPI's")
has_mpi4py = importlib.util.find_spec("mpi4py") is not None

ROOT_MAY = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
"""Open MPI refuses to run as root, and to run more processes than there are cores, without an option."""


@pytest.mark.skipif(not has_mpi4py, reason="needs mpi4py, with which ipyparallel's engines ask for their MPI rank")
def test_mpiexec_ranks_run_cells_and_exit(tmp_path: Path) -> None:
    with Script(tmp_path, **ROOT_MAY) as script:
        script.ok("import axon_nb\nc = axon_nb.start(2, engines='mpi', devices='cpu')")
        answer = script.ok("r = c.run('t = torch.ones(1)\\ndist.all_reduce(t)\\nprint(t.item())\\nrank')")
        assert by_rank(answer.out) == {0: ["2.0"], 1: ["2.0"]}
        assert script.value("dict(r.values)") == {0: 0, 1: 1}
        cell = "from mpi4py import MPI\n(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)"
        assert script.value(f"dict(c.run({cell!r}).values)") == {0: (0, 2), 1: (1, 2)}
        script.ok("c.stop()")
        assert until(lambda: not script.others()), command_lines(script.others())


@pytest.mark.skipif(has_mpi4py, reason="needs an environment without mpi4py")
def test_start_without_mpi4py_names_the_package(tmp_path: Path) -> None:
    with Script(tmp_path, **ROOT_MAY) as script:
        answer = script.run(
            "import axon_nb\nfrom axon_nb.cluster import current\ncurrent.session().settings.set('start_timeout=100')\n"
            "axon_nb.start(2, engines='mpi', devices='cpu')"
        )
        assert answer.kinds[0] == "StartError"
        assert "mpi4py" in answer.message
        assert until(lambda: not script.others())
