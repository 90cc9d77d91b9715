"""Controllers that fail to start, and channels that connect late: messages sent before that are sent again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import until
from tests.support.script import Script, command_lines, run_script

TAKEN = "Address already in use (addr='tcp://127.0.0.1:40001')"
SHADOW = """
import pathlib, sys
here = pathlib.Path(__file__).parent
if "--nodb" in sys.argv:  # a controller
    for file in sorted(here.glob("*.txt"))[:1]:
        text = file.read_text()
        file.unlink()
        raise OSError(text)
sys.path.remove(str(here.parent))
del sys.modules["ipyparallel"]
import ipyparallel
"""
"""Stands before the real package: a controller fails with the text of a file beside it, which is then used up."""

START = """
import contextlib

from axon_nb.cluster.launch.engines import join_world
from axon_nb.cluster.rpc import connect
from axon_nb.cluster.launch.connection import Connection
from axon_nb.cluster.launch.launchers import controller_command
from axon_nb.cluster.launch.engines import launch_engines
from axon_nb.cluster.launch.placement import plan_layout
from axon_nb.cluster.settings import Settings
from axon_nb.host.client import AgentClient, spawn_agent
from axon_nb.host.run_dir import RunDir
from axon_nb.records.protocol.recovery import ENGINE_ENTRY
from tests.cluster.launch.late_port import delay

run_dir = RunDir.create()
pid = spawn_agent(run_dir, controller=controller_command(run_dir), entry=ENGINE_ENTRY)
agent = AgentClient(run_dir, owner="late", agent_pid=pid)
connect(run_dir.client_file, timeout_s=100, alive=lambda: True).close()
layout = plan_layout(2, devices="cpu", backend="auto", threads=None)
with contextlib.ExitStack() as stack:
    for channel in {channels!r}:
        stack.enter_context(delay(run_dir.{side}_file, channel, seconds=2.0))
    connection = Connection(run_dir, agent, connect(run_dir.client_file, timeout_s=100, alive=lambda: True))
    launch_engines(connection, layout, engines="axon", timeout_s=100, on_registered=lambda count: None)
    print(len(join_world(connection, layout, Settings(), timeout_s=100)))
    connection.stop()
"""

REPAIR = """
import os, axon_nb
from tests.cluster.launch.late_port import delay
from tests.support.processes import until

cluster = axon_nb.start(2, devices="cpu", name="late")
pid = cluster.run("os.getpid()", ranks=[1], quiet=True)[1] if cluster.run("import os", quiet=True).ok else 0
cluster.signal(1, 9)
assert until(lambda: cluster.health.dead)
with delay(cluster.connection.run_dir.engine_file, "mux", seconds=2.0), \
     delay(cluster.connection.run_dir.engine_file, "iopub", seconds=1.5):
    cluster.repair()
    result = cluster.run("import os\\nprint('rank', rank)\\nos.getpid()")
    print(result[1] != pid, sorted(result.values))
    cluster.stop()
"""

ATTACH = """
import axon_nb
from axon_nb.cluster.session import current
from tests.cluster.launch.late_port import delay

first = axon_nb.start(2, devices="cpu", name="late")
current.session().drop(first)
first.connection.close()  # as when its notebook has gone
with delay(first.connection.run_dir.client_file, "iopub", seconds=2.0):
    cluster = axon_nb.attach("late")
    cluster.run("print(f'rank {rank} here')")
    cluster.stop()
"""

KILLED = """
import os, signal, threading, axon_nb, psutil
from tests.cluster.launch.late_port import delay
from tests.support.processes import until

def kill_the_newcomer(known):
    newcomers = lambda: {child.pid for child in agent.children()} - known
    assert until(newcomers)  # until then the dead rank is registered
    assert until(lambda: 1 in client.registered)
    (new,) = newcomers()
    os.kill(new, signal.SIGKILL)

cluster = axon_nb.start(3, devices="cpu", name="late")
run_dir, client = cluster.connection.run_dir, cluster.client
agent = psutil.Process(cluster.rank_info[0].pid).parent()
cluster.run("import torch, torch.distributed as dist")
cluster.signal(1, 9)
assert until(lambda: cluster.health.dead)
known = {child.pid for child in agent.children()}
with delay(run_dir.engine_file, "mux", seconds=100.0):
    thread = threading.Thread(target=kill_the_newcomer, args=(known,))
    thread.start()
    try:
        cluster.repair()
    except axon_nb.AxonError as error:
        print(error)
    thread.join()
"""
KILLED_JOINING = """
import axon_nb
from tests.support.processes import until

cluster = axon_nb.start(3, devices="cpu", name="late")
cluster.run("import torch, torch.distributed as dist")
cluster.signal(1, 9)
assert until(lambda: cluster.health.dead)
startup = cluster.connection.run_dir.profile / "startup" / "00-die.py"
startup.write_text('''
import threading

def die_when_joining():
    import contextlib, os, signal, time
    from axon_nb.engine.session import current
    while True:
        time.sleep(0.001)
        with contextlib.suppress(RuntimeError):
            current()
            break
    os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=die_when_joining, daemon=True).start()
''')
try:
    cluster.repair()
except axon_nb.AxonError as error:
    print(error)
try:
    cluster.run("dist.all_reduce(torch.ones(1))", ranks=[0, 2])
except axon_nb.AxonError as error:
    print("refused" if "to try again" in str(error) else error)
startup.unlink()
cluster.repair()
code = "import torch, torch.distributed as dist\\nx = torch.ones(1)\\ndist.all_reduce(x)\\nx.item()"
print(sorted(cluster.run(code).values.values()))
cluster.stop()
"""


def test_taken_port_is_retried_once_then_reported(tmp_path: Path) -> None:
    package = tmp_path / "ipyparallel"
    package.mkdir()
    (package / "__init__.py").write_text(SHADOW)
    for number in range(3):
        (package / f"{number}.txt").write_text(TAKEN)
    with Script(tmp_path) as script:
        script.ok(
            "import os, axon_nb\naxon_nb.start\n"
            f"os.environ['PYTHONPATH'] = {str(tmp_path)!r} + os.pathsep + os.environ['PYTHONPATH']"
        )
        answer = script.run("axon_nb.start(2, devices='cpu')")
        assert answer.kinds[0] == "StartError"
        assert answer.message == f"The ipyparallel controller exited with code 1: OSError: {TAKEN}"
        assert until(lambda: not script.others()), command_lines(script.others())
        script.ok("c = axon_nb.start(2, devices='cpu')")
        assert script.value("dict(c.run('rank').values)") == {0: 0, 1: 1}
    assert not list(package.glob("*.txt"))


@pytest.mark.parametrize(
    ("side", "channels"),
    [
        ("client", ["notification"]),  # the controller reports the ranks while nobody listens
        ("client", ["iopub", "control"]),
        ("engine", ["mux"]),  # a rank is reported as soon as its heart beats
        ("engine", ["control", "iopub"]),
    ],
)
def test_start_waits_for_all_channels(side: str, channels: list[str]) -> None:
    done = run_script(START.format(side=side, channels=channels))
    assert (done.code, done.out) == (0, "2\n"), done.err


def test_repair_waits_for_all_channels_of_the_new_rank() -> None:
    done = run_script(REPAIR)
    assert done.code == 0, done.err
    assert "rank 0" in done.out
    assert "rank 1" in done.out
    assert done.out.splitlines()[-1] == "True [0, 1]"


def test_attach_waits_for_the_output_channel() -> None:
    done = run_script(ATTACH)
    assert (done.code, sorted(done.out.splitlines())) == (0, ["[rank 0] rank 0 here", "[rank 1] rank 1 here"]), done.err


def test_new_rank_killed_before_connecting_is_reported() -> None:
    done = run_script(KILLED)
    reported = "Rank 1 failed to start: it was killed by SIGKILL. Run `%distributed repair` to try again.\n"
    assert (done.code, done.out) == (0, reported), done.err


def test_new_rank_killed_while_joining_blocks_nobody() -> None:
    done = run_script(KILLED_JOINING)
    assert done.code == 0, done.err
    reported, refused, shared = done.out.splitlines()
    assert reported == "Rank 1 failed to start: it was killed by SIGKILL. Run `%distributed repair` to try again."
    assert refused == "refused"
    assert shared == "[3.0, 3.0, 3.0]"
