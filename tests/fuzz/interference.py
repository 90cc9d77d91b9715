"""What happens around a cell: processes that are stopped, strangers that connect, and kills during a repair."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from tests.fuzz.fault import STOPPED, Fault
from tests.fuzz.losses import come_back, endless
from tests.support.kernel import Kernel
from tests.support.processes import Footprint, footprint, listening

_LIMIT_S = 150.0
_STRANGERS = 20
"""Connections to each socket."""
Make = Callable[[random.Random, str], Fault]


def stopped_process(rng: random.Random, message: str) -> Fault:
    """The agent, the controller or a rank is stopped, and the user presses the stop button."""
    code, detail, names = endless(rng)
    stops = rng.choice(["agent", "controller", f"rank {rng.randrange(4)}"])
    moments = (rng.uniform(0.2, 0.8),)
    says = {"agent": r"Ranks 0-3 stopped\.", "controller": r"the controller is stopped \(SIGSTOP\)"}.get(
        stops, rf"\[{stops}\] is stopped \(SIGSTOP\)"
    )
    return Fault("stopped process", f"{stops} in {detail}", code, STOPPED, says, moments, names=names, stops=stops)


def strangers(fails: Make) -> Make:
    """Strangers connect to the cluster's ports, and to the agent and the store, while a cell fails."""

    def make(rng: random.Random, message: str) -> Fault:
        return dataclasses.replace(fails(rng, message), kind="strangers", connects=True)

    return make


def kill_during_repair(dies: Make) -> Make:
    """The kernel or another rank is killed while a dead rank is replaced."""

    def make(rng: random.Random, message: str) -> Fault:
        fault = dies(rng, message)
        others = [f"rank {rank}" for rank in range(4) if rank not in fault.dies]
        during = rng.choice(["kernel", rng.choice(others)])
        after_s = rng.uniform(0, 0.6)
        detail = f"{fault.detail}, and {during} {after_s:.2f} s into the repair"
        return dataclasses.replace(
            fault, kind="kill during a repair", detail=detail, during_repair=during, loses_after_s=after_s
        )

    return make


@contextlib.contextmanager
def stopped(cluster: Footprint, which: str) -> Iterator[None]:
    """Stop a process of the cluster meanwhile."""
    pid = cluster.pids[int(which.removeprefix("rank "))] if which.startswith("rank") else getattr(cluster, which)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def connections(cluster: Footprint) -> Iterator[None]:
    """Hold connections to the cluster's ports, and to the agent and the store, and write noise to them."""
    with contextlib.ExitStack() as stack:
        addresses: list[tuple[socket.AddressFamily, Any]] = [
            (socket.AF_INET6 if ":" in found.laddr.ip else socket.AF_INET, tuple(found.laddr))
            for found in listening(cluster)
        ]
        # Only this user gets at Unix sockets. Noise on those of ZeroMQ would take messages away from the ranks.
        addresses += [(socket.AF_UNIX, str(path)) for path in cluster.folder.glob("*.sock")]
        assert addresses, "a cluster without sockets"
        noise = random.Random(1).randbytes(512)
        for family, address in addresses * _STRANGERS:
            stranger = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            stranger.settimeout(1)
            with contextlib.suppress(OSError):  # refused, or the path is too long: what is tried is what a stranger can
                stranger.connect(address)
                stranger.sendall(noise)
        yield


def repair_with_a_kill(notebook: Kernel, fault: Fault) -> None:
    """Start a repair, kill a process meanwhile, and repair what is left."""
    cluster = footprint(notebook)
    request = notebook.submit("%distributed repair")
    time.sleep(fault.loses_after_s)
    if fault.during_repair == "kernel":
        come_back(notebook)
        notebook.run("%distributed attach", timeout=_LIMIT_S)
    else:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            os.kill(cluster.pids[int(fault.during_repair.removeprefix("rank "))], signal.SIGKILL)
        notebook.collect(request, timeout=_LIMIT_S)
    for _ in range(3):  # the news of a death may come after the first
        notebook.run("%distributed repair", timeout=_LIMIT_S)  # refuses if nothing is left to repair
        reply = notebook.run("%%distributed\n'alive'", timeout=_LIMIT_S)
        if reply.ok:
            return
    raise AssertionError(f"a plain repair does not make it whole: {reply.traceback[:2000]}")
