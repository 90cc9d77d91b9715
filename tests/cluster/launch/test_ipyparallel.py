"""Our launchers under ipyparallel's own `Cluster`, and the configuration that axon_nb adds to the user's own."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from axon_nb.cluster.launch.hosts import ssh_launcher
from tests.support.processes import until
from tests.support.script import run_script

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
