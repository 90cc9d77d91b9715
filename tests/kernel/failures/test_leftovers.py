"""What is left when a cluster is gone: nothing, whatever was killed and whatever cells started."""

from __future__ import annotations

import os
import signal

import psutil

from tests.support.kernel import Kernel
from tests.support.processes import ended, footprint, until

DAEMON = (
    "import subprocess, sys\n"
    "child = 'import os, time; os.fork() or time.sleep(600)'\n"
    "t_started = subprocess.Popen([sys.executable, '-c', child], start_new_session=True).pid"
)


def test_agent_and_controller_killed_at_once() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        cluster = footprint(kernel)
        assert len(cluster.processes) > 4, "the controller has a child"
        os.kill(cluster.agent, signal.SIGKILL)
        os.kill(cluster.controller, signal.SIGKILL)
        assert until(cluster.all_ended), [process for process in cluster.processes if not ended(process)]


def test_detached_processes_end_with_the_cluster() -> None:
    with Kernel() as kernel:
        kernel.ok("%load_ext axon_nb\n%distributed start -n 2")
        kernel.ok(f"%%distributed\n{DAEMON}")
        pids = kernel.value("list(__import__('axon_nb').current_cluster().pull('t_started').values())")
        started = [psutil.Process(pid) for pid in pids]
        started += [child for process in started for child in process.children()]
        kernel.ok("%distributed stop")
        assert until(lambda: all(map(ended, started))), started
