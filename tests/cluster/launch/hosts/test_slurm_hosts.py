"""`--hosts slurm`: a real Slurm with two nodes on this machine starts the agents, from outside and inside a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.comm.world import torchrun_environment
from tests.cluster.launch.hosts.slurm_nodes import NODES, Slurm, serve_slurm, why_no_slurm
from tests.support.processes import until
from tests.support.script import Script, command_lines, family

CELL = "import os; t = torch.ones(1); dist.all_reduce(t); (os.environ.get('AXON_NB_HOST', ''), t.item())"

KEPT = "import os; t = torch.ones(1); dist.all_reduce(t); (os.environ['AXON_NB_HOST'], globals().get('kept'), t.item())"


def _kept(*ranks: int) -> dict[int, tuple[str, int | None, float]]:
    """What `KEPT` gives when these ranks have kept their variable."""
    return {rank: (NODES[rank // 2], rank if rank in ranks else None, 4.0) for rank in range(4)}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm with two nodes."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    with serve_slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.mark.timeout(480)
def test_job_runs_the_ranks_of_a_notebook_outside_it_and_repairs_them(slurm: Slurm, tmp_path: Path) -> None:
    with slurm.job(2) as number, Script(tmp_path, **slurm.environment) as script:
        script.ok(f"import axon_nb\nc = axon_nb.start(4, hosts='slurm:{number}', devices='cpu')", timeout=230)
        key = script.value("c.connection.client.session.key.decode()")
        assert not [line for line in command_lines(family(script.mark)) if key in line]
        values = script.value(f"dict(c.run({CELL!r}).values)")
        assert values == {rank: (NODES[rank // 2], 4.0) for rank in range(4)}
        script.ok("c.run('kept = rank')")
        answer = script.run("c.run('import os\\nif rank == 2: os.kill(os.getpid(), 9)\\ndist.barrier()')")
        assert answer.message.startswith(f"rank 2 was killed by SIGKILL on the host {NODES[1]!r}")
        script.ok("c.repair()")
        assert script.value(f"dict(c.run({KEPT!r}).values)") == _kept(0, 1, 3)
        cell = "import os, time\nif rank == 3:\n    os.kill(os.getppid(), 9); time.sleep(60)\ndist.barrier()"
        assert f"lost with its host {NODES[1]!r}" in script.run(f"c.run({cell!r})").message
        assert script.value("dict(c.run('rank', ranks='0-1').values)") == {0: 0, 1: 1}
        script.ok("c.repair()")  # a new step of the job starts the agent again
        assert script.value(f"dict(c.run({KEPT!r}).values)") == _kept(0, 1)
        script.ok("c.stop()")
        assert until(lambda: not script.others()), command_lines(script.others())
        assert until(lambda: number not in slurm.run("squeue", "--steps", "--noheader", "--format=%i"))


def test_notebook_in_a_job_has_ranks_on_its_other_nodes(slurm: Slurm) -> None:
    code = (
        f"import axon_nb\nc = axon_nb.start(3, hosts='slurm', devices='cpu')\nprint(dict(c.run({CELL!r}).values))\n"
        "c.stop()"
    )
    with slurm.job(2) as number:
        step = ["srun", f"--jobid={number}", "--overlap", f"--nodelist={NODES[0]}", "--nodes=1", "--ntasks=1"]
        out = slurm.run(*step, sys.executable, "-c", code)
        assert str({0: ("", 3.0), 1: ("", 3.0), 2: (NODES[1], 3.0)}) in out
        assert until(lambda: number not in slurm.run("squeue", "--steps", "--noheader", "--format=%i"))


def test_job_that_cannot_run_ranks_is_refused_with_the_fix(slurm: Slurm, tmp_path: Path) -> None:
    with slurm.job(1) as number, Script(tmp_path, **slurm.environment) as script:
        script.ok("import axon_nb")

        def refusal(hosts: str) -> str:
            answer = script.run(f"axon_nb.start(2, hosts={hosts!r}, devices='cpu')")
            assert answer.kinds[0] == "UsageError"
            return answer.message

        assert "name a job with `--hosts slurm:JOB`; `squeue --me` lists yours." in refusal("slurm")
        assert refusal("slurm:999999") == (
            "Slurm cannot show the job 999999 (slurm_load_jobs error: Invalid job id specified): `squeue --me` lists "
            "yours."
        )
        script.ok(f"import os\nos.environ.update(SLURM_JOB_ID={number!r}, SLURMD_NODENAME={NODES[0]!r})")
        assert refusal("slurm") == (
            f"The Slurm job {number} has no node besides this one: leave out `--hosts`, or allocate more nodes."
        )
        assert not script.others()


IDENTITY = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
VARIABLES = "import json, os; print(json.dumps(dict(os.environ)))"


def test_ranks_of_a_step_know_their_host_and_that_of_rank_0(slurm: Slurm) -> None:
    def started(*options: str) -> list[str]:
        answers = slurm.run("srun", *options, sys.executable, "-c", VARIABLES).splitlines()
        found = [torchrun_environment(json.loads(answer)) or {} for answer in answers]
        return sorted(" ".join(values[name] for name in IDENTITY) for values in found)

    first, second = NODES
    assert started("-N2", "-n3") == [f"0 0 2 {first}", f"1 1 2 {first}", f"2 0 1 {first}"]
    with slurm.job(2) as number:
        assert started(f"--jobid={number}", "--overlap", "-N1", "-n1", f"--nodelist={second}") == [f"0 0 1 {second}"]
