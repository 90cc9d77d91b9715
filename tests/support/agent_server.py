"""Forks host agents for tests from one process that has imported what they need, which takes four seconds of CPU time.

An agent that is forked differs from one that is started only in its parent and in what it need not import, and so does
its controller: they take .2 s of CPU time together, instead of 1.2 s. Tests of starting itself, and those that change
what Python or torch read when they are imported, start real ones.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from axon_nb.host.children import Children, run_controller, set_parent_death_signal
from axon_nb.host.fork import MODULES, signals_blocked
from axon_nb.records.environment import AGENT_SERVER, PYTHON_PATH

ROOT = Path(__file__).resolve().parents[2]
_STARTED = (
    "tests/cluster/launch/",
    "tests/cluster/test_scripts.py::test_script_killed_during_start",
    "tests/kernel/failures/test_kills.py::test_kernel_killed_during_cluster_start",
    "tests/kernel/session/test_class.py",
    "tests/kernel/session/test_lifecycle.py::test_cell_without_a_cluster_starts_the_default_one",
    "tests/kernel/session/test_lifecycle.py::test_shutdown_while_warming_up_ends_everything",
)
"""Tests of starting agents; `tests/host`, the examples and the programs of `tests/packaging` start real ones anyway."""
_AT_IMPORT = ("PYTHON", "LD_", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "CUDA", "NCCL", "GLOO", "HOME", "TMPDIR")
"""An agent whose environment differs in one of these is started."""
_ROOM = 32 * 1024
_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS, resource.RLIMIT_CORE)


def agent_environment() -> dict[str, str]:
    """Return what lets the agents of a kernel or a script be forked; empty in tests of starting them."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    return {} if not test or test.startswith(_STARTED) else {AGENT_SERVER.name: _server()}


@functools.cache
def _server() -> str:
    """Start the process that forks; return the path of its socket. It ends with this process."""
    folder = tempfile.mkdtemp(prefix="axa-")
    path = f"{folder}/socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    environment = {name: text for name, text in os.environ.items() if not name.startswith("AXON_NB_TEST")}
    environment[PYTHON_PATH.name] = os.pathsep.join(filter(None, [environment.get(PYTHON_PATH.name), str(ROOT)]))
    # What `/proc` shows of a process is where the kernel put it, and cannot grow: see `_show_as`.
    command = [sys.executable, "-P", "-m", "tests.support.agent_server", str(listener.fileno()), "x" * _ROOM]
    server = subprocess.Popen(
        command,
        env={**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "AXON_NB_TEST_ROOM": "x" * _ROOM},
        cwd="/",
        stdin=subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )
    listener.close()
    atexit.register(server.wait)
    atexit.register(server.kill)
    return path


def main(listener: socket.socket) -> None:
    """Answer each request to fork an agent, until the process that started this one ends."""
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents
    own, before = _relevant(os.environ), set(os.environ)
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    importlib.import_module("axon_nb.engine.bootstrap").prepare()
    set_by_imports = {name: text for name, text in os.environ.items() if name not in before}
    for name in ("axon_nb.host.__main__", "ipyparallel.controller.app"):
        importlib.import_module(name)
    Children.spawn_controller = _fork_controller  # type: ignore[assignment]
    gc.enable()
    gc.collect()
    gc.freeze()  # or each agent would go through all of it, and copy the memory that it touches
    while True:
        connection, _ = listener.accept()
        with connection:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
            while more := connection.recv(1 << 16):
                data += more
            request = json.loads(data)
            pid = 0
            if _relevant(request["env"]) == own:
                peer = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    connection.close()
                    _become_agent(request["argv"], {**set_by_imports, **request["env"]}, descriptors[0], peer)
            connection.sendall(json.dumps(pid).encode())
            os.close(descriptors[0])


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    relevant = {name: text for name, text in environment.items() if name.startswith(_AT_IMPORT)}
    return relevant | {PYTHON_PATH.name: os.pathsep.join(dict.fromkeys(relevant[PYTHON_PATH.name].split(os.pathsep)))}


def _become_agent(argv: list[str], environment: dict[str, str], log: int, peer: int) -> NoReturn:
    code = 1
    try:
        set_parent_death_signal(0)
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(peer, limit))
        os.sched_setaffinity(0, os.sched_getaffinity(peer))
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        os.environ.clear()
        os.environ.update(environment)
        _show_as(argv, environment)
        sys.argv = ["axon_nb.host", *argv[argv.index("axon_nb.host") + 1 :]]
        sys.modules["axon_nb.host.__main__"].main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _fork_controller(children: Children, argv: list[str], log: Path) -> None:
    """As `Children.spawn_controller`, but with what this process has imported."""
    agent = os.getpid()
    with signals_blocked():
        children.controller = os.fork()
        if children.controller == 0:
            _become_controller(argv, log, agent)


def _become_controller(argv: list[str], log: Path, agent: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.setsid()
        set_parent_death_signal(signal.SIGTERM)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for target in (1, 2):
            os.dup2(out, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        _show_as(argv, os.environ)
        sys.argv = argv[argv.index("-c") : argv.index("-c") + 1] + argv[argv.index("-c") + 2 :]
        if os.getppid() == agent:
            run_controller()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _show_as(argv: list[str], environment: Mapping[str, str]) -> None:
    """Show these in `/proc`, where tests and the doctor look for a cluster's processes."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end, environment_start, environment_end = map(int, fields[45:49])
    texts = [f"{name}={text}" for name, text in environment.items()]
    for begin, stop, lines in ((start, end, argv), (environment_start, environment_end, texts)):
        content = "".join(f"{line}\0" for line in lines).encode()[: stop - begin - 1]
        ctypes.memset(begin, 0, stop - begin)
        ctypes.memmove(begin, content, len(content))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
