"""A process of the notebook or of the cluster is killed while a cell runs: what survives, and what is said."""

from __future__ import annotations

import os
import random
import signal
import time

from tests.fuzz.fault import COLLECTIVES, NAMES, STOPPED, Fault
from tests.support.kernel import Kernel, Reply
from tests.support.processes import Footprint, until

_LIMIT_S = 150.0
_HANDLE = "__import__('axon_nb').cluster.current.get().running_cell"


def endless(rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    """A cell that ends only when it is ended: its code, what it does, and the objects in a step."""
    if rng.random() < 0.6:
        names = tuple(rng.sample(NAMES, rng.randint(1, len(NAMES))))
        return f"train({list(names)!r}, None)", "training", names
    if rng.random() < 0.5:
        name = rng.choice([name for name in COLLECTIVES if name != "new_group"])
        return f"collect({name!r}, 10**9)", name, ()
    name = rng.choice(["sleep", "multiply", "barrier", "loader", "spin"])
    return "while True: pass" if name == "spin" else f"stay({name!r})", name, ()


def _loss(rng: random.Random, loses: str, ends: tuple[str, ...], says: str) -> Fault:
    code, detail, names = endless(rng)
    after_s = rng.uniform(0, 0.8)
    return Fault(f"{loses} killed", detail, code, ends, says, names=names, loses=loses, loses_after_s=after_s)


def kernel(rng: random.Random, message: str) -> Fault:
    """The ranks go on, and a fresh kernel attaches to them and to the cell."""
    return _loss(rng, "kernel", STOPPED, "KeyboardInterrupt|stopped")


def agent(rng: random.Random, message: str) -> Fault:
    """The cluster is lost, and the cell says what to do."""
    return _loss(rng, "agent", ("ClusterLostError",), r"lost its host agent.*`%distributed start`")


def controller(rng: random.Random, message: str) -> Fault:
    """The cluster is lost, and the cell says what to do."""
    return _loss(rng, "controller", ("ClusterLostError",), r"controller.*`%distributed start`")


def lose(notebook: Kernel, cluster: Footprint, fault: Fault, request: str, *, start: str) -> tuple[Reply, float]:
    """Kill the process of a fault while its cell runs; returns how the cell ended, and when (`time.time`).

    A lost kernel is replaced by a fresh one, which attaches, and then cancels the cell. A lost cluster must leave no
    process; a new one is started.

    Args:
        notebook: Whose cell runs.
        cluster: What its cluster consists of.
        fault: One that loses a process.
        request: Of the cell.
        start: The cell that starts a new cluster.
    """
    if fault.loses == "kernel":
        return _attach(notebook), time.time()
    os.kill(getattr(cluster, fault.loses), signal.SIGKILL)
    reply, ended = notebook.collect(request, timeout=_LIMIT_S), time.time()
    assert until(cluster.all_ended), f"left by a lost cluster: {cluster.processes}"
    notebook.ok(start, timeout=_LIMIT_S)
    assert until(cluster.gone), f"left by a lost cluster: {cluster.folder}"
    return reply, ended


def come_back(notebook: Kernel) -> None:
    """Kill the kernel; a fresh one finds the cluster."""
    notebook.come_back()
    said = notebook.ok("%load_ext axon_nb", timeout=_LIMIT_S).stdout
    assert "is still running. Run `%distributed attach`" in said, said


def _attach(notebook: Kernel) -> Reply:
    come_back(notebook)
    attached = notebook.ok("%distributed attach", timeout=_LIMIT_S)
    assert "is still running on ranks 0-3. Its output continues here." in attached.stdout, attached.stdout
    assert notebook.ok("%distributed cancel").lines() == ["Interrupted the cell on ranks 0-3."]
    return notebook.run(f"{_HANDLE}.result(100)", timeout=_LIMIT_S)
