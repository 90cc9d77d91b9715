"""`engines="local"`: ipyparallel starts the ranks; cells and their end are the same."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kernel import Kernel
from tests.support.output_lines import by_rank
from tests.support.processes import until
from tests.support.script import Script, command_lines, family, script_environment


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    """A script with 2 ranks that were not forked by the host agent."""
    with Script(tmp_path_factory.mktemp("local")) as script:
        script.ok("import axon_nb\nc = axon_nb.start(2, engines='local', devices='cpu')")
        yield script


def test_local_engines_run_the_same_cell(script: Script) -> None:
    answer = script.ok("r = c.run('t = torch.ones(2) * (rank + 1)\\ndist.all_reduce(t)\\nprint(t.tolist())\\nrank')")
    assert by_rank(answer.out) == {0: ["[3.0, 3.0]"], 1: ["[3.0, 3.0]"]}
    assert script.value("dict(r.values), c.engines") == ({0: 0, 1: 1}, "local")


def test_ranks_have_their_names_and_environment(script: Script) -> None:
    cell = "import os\n(rank, world_size, local_rank, os.environ['RANK'], os.environ['OMP_NUM_THREADS'])"
    values = script.value(f"dict(c.run({cell!r}).values)")
    assert {rank: value[:4] for rank, value in values.items()} == {0: (0, 2, 0, "0"), 1: (1, 2, 1, "1")}


def test_data_moves_and_ranks_answer(script: Script) -> None:
    script.ok("c.push({'x': [1, 2]})")
    assert script.value("c.pull('x + [rank]')") == {0: [1, 2, 0], 1: [1, 2, 1]}
    assert until(lambda: script.value("c.status()['state'].tolist()") == ["idle", "idle"], timeout=60)


def test_failed_rank_releases_its_peer(script: Script) -> None:
    answer = script.run("c.run('if rank == 0: raise ValueError(\"first\")\\nimport time\\ntime.sleep(600)')")
    assert answer.message == "rank 0: ValueError: first"
    assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}


def test_all_files_are_owner_only(script: Script) -> None:
    folder = Path(script.value("str(c.connection.run_dir.path)"))
    logs = list(folder.rglob("*.log"))
    assert len(logs) >= 4
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a draft that has its name by now
            mode = path.lstat().st_mode
            if not stat.S_ISLNK(mode):  # a link has no mode of its own
                assert stat.S_IMODE(mode) & 0o677 == 0o600, path


def test_killed_engine_is_reported_and_stop_leaves_no_processes(script: Script) -> None:
    folder = Path(script.value("str(c.connection.run_dir.path)"))
    answer = script.run(
        "c.run('import os, signal, time\\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\\ntime.sleep(600)')"
    )
    assert answer.kinds[0] == "CellError"
    assert answer.message.startswith("rank 1 disconnected")
    later = script.run("c.run('1')")
    assert later.kinds[0] == "ClusterLostError"
    assert "Rank 1 disconnected" in later.message
    assert "`%distributed restart`" in later.message
    assert "`%distributed repair`" not in later.message
    assert script.value("dict(c.run('rank', ranks='0').values)") == {0: 0}
    script.ok("c.stop()")
    assert until(lambda: not script.others()), command_lines(script.others())
    assert until(lambda: not folder.exists())


@pytest.mark.slow
def test_stop_leaves_no_processes(tmp_path: Path) -> None:
    with Script(tmp_path) as script:
        script.ok("import axon_nb\nc = axon_nb.start(2, engines='local', devices='cpu')")
        assert len(script.others()) >= 4
        script.ok("c.stop()")
        assert until(lambda: not script.others()), command_lines(script.others())
    assert not family(script.mark)


NOTICED = {
    "by ipyparallel first": """
import asyncio
from ipyparallel.cluster.launcher import LocalEngineSetLauncher

start_all = LocalEngineSetLauncher.start

async def start(self, n):
    started = start_all(self, n)
    while self.launchers:  # in a script ipyparallel's event loop runs until this is over
        await asyncio.sleep(0.01)
    return started

LocalEngineSetLauncher.start = start
""",
    "by axon_nb alone": """
from ipyparallel.cluster.launcher import LocalEngineLauncher

LocalEngineLauncher._start_waiting = lambda self: None
""",
}


@pytest.mark.parametrize("noticed", NOTICED)
def test_failed_engine_start_is_reported_with_cause(tmp_path: Path, noticed: str) -> None:
    """The host agent runs already when the environment turns bad, so that the engines alone meet it."""
    with Script(tmp_path) as script:
        script.ok(
            "import os, axon_nb\nfrom axon_nb.cluster import current\n"
            "session = current.session()\nsession.prewarm.start()\n"
            "assert session.prewarm.wait_until_idle(140)\nsession.settings.set('start_timeout=10min')\n"
            "os.environ['PYTHONHOME'] = '/nowhere'"
        )
        script.ok(NOTICED[noticed])
        answer = script.run("axon_nb.start(2, engines='local', devices='cpu')")
        assert answer.kinds[0] == "StartError"
        reason = r"Engine [01] exited while starting: ModuleNotFoundError: No module named 'encodings'"
        assert re.fullmatch(reason, answer.message), answer.message
        assert until(lambda: not script.others())


FAILING = """
import os, sys
from ipyparallel.cluster.launcher import LocalEngineLauncher, LocalEngineSetLauncher

class Engine(LocalEngineLauncher):
    def start(self):
        if self.identifier in os.environ["FAILING"]:
            self.engine_cmd = [sys.executable, "-c", f"raise OSError('no card for {self.identifier}')"]
        return super().start()

LocalEngineSetLauncher.launcher_class = Engine
"""


@pytest.mark.parametrize("failing", ["0", "1", "01"])
def test_engine_exit_in_a_notebook_is_reported_with_cause(tmp_path: Path, failing: str) -> None:
    """The exit is noticed by ipyparallel, too: its loop runs in a notebook, and drops the engine from its set."""
    with Kernel(cwd=tmp_path, env=script_environment(FAILING=failing)) as kernel:
        kernel.ok(FAILING)
        kernel.ok("%load_ext axon_nb\n%distributed config start_timeout=10min warm_up=off")
        # The kernel's own limit is a quarter of that.
        reply = kernel.run("%distributed start -n 2 --engines local --devices cpu")
        assert reply.ename == "StartError"
        said = re.fullmatch(r"Engine (\d) exited while starting: OSError: no card for (\d)", reply.evalue)
        assert said, reply.evalue
        assert said[1] == said[2]
        assert said[1] in failing
        assert until(lambda: [process.pid for process in family(kernel.mark)] == [kernel.pid])
