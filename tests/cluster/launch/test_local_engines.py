"""`engines="local"`: ipyparallel starts the ranks; and our launchers under its own `Cluster`."""

from __future__ import annotations

import contextlib
import re
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from axon_nb.cluster.launch.hosts import ssh_launcher
from tests.support.cell_output import by_rank
from tests.support.kernel import Kernel
from tests.support.processes import until
from tests.support.script import Script, command_lines, family, run_script, script_environment


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


START = """
import os, shutil, signal, tempfile, time
import ipyparallel as ipp

cluster = ipp.Cluster(n=2, engines="axon", log_level=40)
client = cluster.start_and_connect_sync(activate=False)
"""
STOP = """
cluster.stop_cluster_sync()
client.close()
"""


def test_ipyparallel_cluster_starts_agent_and_leaves_no_processes() -> None:
    done = run_script(
        START
        + """
view = client[:]
print(client.ids, len(set(view.apply_sync(os.getpid))))
view.push({"x": 20})
view.execute("y = x + 1", block=True)
print(view["y"])
print(view.apply_sync(lambda n: n * 2, 21))
print(view.apply_sync(lambda: "torch" in __import__("sys").modules))
try:
    view.execute("1 / 0", block=True)
except ipp.CompositeError as error:
    print(len(error.elist))
def nap(folder):
    import os, time
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(600)
busy = view.apply_async(nap, folder := tempfile.mkdtemp())
while len(os.listdir(folder)) < 2:  # ipykernel drops a request that is interrupted before its function runs
    time.sleep(0.02)
cluster.signal_engines_sync(signal.SIGINT)
busy.wait(100)
shutil.rmtree(folder)
print("interrupted", busy.ready(), view.apply_sync(lambda: 1))
"""
        + STOP
    )
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["[0, 1] 2", "[21, 21]", "[42, 42]", "[True, True]", "2", "interrupted True [1, 1]"]
    assert until(lambda: not done.left()), done.left()


def test_script_without_stop_leaves_no_processes() -> None:
    done = run_script(START + "print(client.ids)\nraise SystemExit(3)")
    assert done.out == "[0, 1]\n", done.err
    assert "Error stopping cluster" not in done.err
    assert until(lambda: not done.left()), done.left()


def test_killed_engine_is_noticed_at_once() -> None:
    done = run_script(
        START
        + """
pids = client[:].apply_sync(os.getpid)
os.kill(pids[1], signal.SIGKILL)
end = time.monotonic() + 100
while client.ids != [0] and time.monotonic() < end:
    time.sleep(0.01)
print(client.ids, client[0].apply_sync(lambda: "alive"))
"""
        + STOP
    )
    assert done.out == "[0] alive\n", done.err
    assert until(lambda: not done.left()), done.left()


def test_engines_of_another_program_are_not_attachable() -> None:
    code = """
import axon_nb
from axon_nb.cluster.session import clusters as kept
for name in (None, kept.running()[0].name):
    try:
        axon_nb.attach(name)
    except axon_nb.errors.UsageError as error:
        print(error)
print(client[:].apply_sync(lambda: "alive"))
"""
    with tempfile.TemporaryDirectory(prefix="axt-") as alone:  # other tests' clusters live on beside this one
        done = run_script(START + code + STOP, AXON_NB_RUNTIME_DIR=alone)
        first, second, last = done.out.splitlines()
        assert first.startswith("No detached cluster found"), done.err
        assert "a program started its engines with ipyparallel.Cluster(engines='axon')" in second
        assert last == "['alive', 'alive']"
        assert until(lambda: not done.left()), done.left()


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of IPython's default profile."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    folder = tmp_path / "profile_default"
    folder.mkdir()
    return folder


def test_ssh_runs_this_python_unless_configured(profile: Path) -> None:
    assert ssh_launcher().config.SSHLauncher.remote_python == sys.executable
    (profile / "ipcluster_config.py").write_text("c.SSHLauncher.remote_python = '/far/python'\n")
    assert ssh_launcher().config.SSHLauncher.remote_python == "/far/python"


def test_process_group_interrupt_does_not_reach_ssh(profile: Path) -> None:
    (profile / "ipcluster_config.py").write_text(
        f"c.SSHLauncher.ssh_cmd = [{sys.executable!r}, '-c', 'import time; print(1, flush=True); time.sleep(600)']\n"
    )
    command = list(ssh_launcher().config.SSHLauncher.ssh_cmd)
    with subprocess.Popen([*command, "far-host"], stdout=subprocess.PIPE, text=True) as ssh:
        try:
            assert ssh.stdout is not None
            assert ssh.stdout.readline() == "1\n"
            ssh.send_signal(signal.SIGINT)
            time.sleep(0.5)
            assert ssh.poll() is None
        finally:
            ssh.kill()
