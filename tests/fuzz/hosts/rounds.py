"""Rounds of random faults on two hosts."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.cluster.launch.hosts.ssh_server import SshServer, serve_ssh
from tests.cluster.launch.second_host import FAR_HOST, Network, network
from tests.fuzz.fault import NAMES, STOPPED, Fault
from tests.fuzz.faults import DEATHS, KINDS, Table
from tests.fuzz.losses import endless
from tests.fuzz.rounds import CEILING_S, START, Fuzz, Outcome
from tests.support.kernel import Reply
from tests.support.processes import Footprint, footprint, until
from tests.support.script import command_lines, family

FAR_RANKS = (2, 3)
_LOST = rf"lost with its host '{FAR_HOST}': its agent "
_CLOSED, SILENT = rf"{_LOST}closed the connection", rf"{_LOST}has not responded for"
_SHORT_S = 2.0
_STEPS = 40

_LIMIT_S = 150.0
_SHORT_ENOUGH_S = 2.3
"""A cut that took longer, because the machine was busy, may lose the host."""
_JOIN = "host --join"
_STATE = (
    "(lambda s: (sorted(s.hosts), sorted(s.ranks)))(__import__('axon_nb').cluster.current.get().connection.agent.call("
    "__import__('axon_nb.records.protocol.agent', fromlist=['x']).GetInfo()))"
)


def _agent_killed(rng: random.Random, message: str) -> Fault:
    """The other host's agent is killed, and its ranks with it."""
    code, detail, names = endless(rng)
    after_s = rng.uniform(0, 0.8)
    return Fault(
        "other agent killed", detail, code, ("CellError",), _CLOSED, names=names, dies=FAR_RANKS,
        other_host="agent", loses_after_s=after_s,
    )  # fmt: skip


def _short_cut(rng: random.Random, message: str) -> Fault:
    """The link is cut for two seconds in the midst of training: nothing is lost."""
    names = tuple(rng.sample(NAMES, rng.randint(1, len(NAMES))))
    code = f"import time\nfor _ in range({_STEPS}):\n    train({list(names)!r}, 1)\n    time.sleep(0.05)"
    silently, after_s = rng.random() < 0.5, rng.uniform(0.2, 1.5)
    return Fault(
        "short cut", _cut("training", silently), code, ("",), "", names=names,
        other_host="short cut", silently=silently, loses_after_s=after_s, lasts_s=_SHORT_S,
    )  # fmt: skip


def _long_cut(rng: random.Random, message: str) -> Fault:
    """The link is cut until the cell has ended, and is back before the repair, or only after a repair without it."""
    code, detail, names = endless(rng)
    silently, after_s, what = rng.random() < 0.5, rng.uniform(0, 0.8), rng.choice(["long cut", "cut for good"])
    return Fault(
        what, _cut(detail, silently), code, ("CellError",), SILENT, names=names, dies=FAR_RANKS,
        other_host=what, silently=silently, loses_after_s=after_s,
    )  # fmt: skip


def _cut_and_interrupt(rng: random.Random, message: str) -> Fault:
    """The user presses the stop button while the link is cut; it is back soon, or late."""
    fault = _long_cut(rng, message)
    wait_s = rng.uniform(0, 3.5)
    return dataclasses.replace(
        fault, kind="cut and interrupt", detail=f"{fault.detail}, {wait_s:.1f} s before the interrupt",
        ends=("CellError", *STOPPED), says=f"{SILENT}|KeyboardInterrupt", other_host="cut and interrupt",
        lasts_s=wait_s, dies=(),
    )  # fmt: skip


def _idle_cut(rng: random.Random, message: str) -> Fault:
    """The link is cut while no cell runs; the next one says what was lost."""
    silently = rng.random() < 0.5
    return Fault(
        "cut between cells", _cut("no cell", silently), "dist.barrier()", ("CellError", "ClusterLostError"),
        SILENT, dies=FAR_RANKS, other_host="idle", silently=silently, lasts_s=rng.uniform(4.0, 6.0),
    )  # fmt: skip


def _lost_in_repair(rng: random.Random, message: str) -> Fault:
    """A rank dies, and during its repair the other host's agent, or the link for a while."""
    what = rng.choice(["agent", "short cut", "long cut"])
    rank, after_s = rng.randrange(4), rng.uniform(0, 1.0)
    action, says = rng.choice([("os.kill(os.getpid(), 9)", DEATHS["kill"]), ("os._exit(3)", DEATHS["leave"])])
    return Fault(
        "host lost in a repair", f"{what} {after_s:.2f} s into the repair of rank {rank}",
        f"import os\nif rank == {rank}: {action}\ndist.barrier()", ("CellError",), rf"rank {rank} {says}",
        dies=(rank,), other_host=f"{what} in a repair", silently=rng.random() < 0.5, loses_after_s=after_s,
        lasts_s=_SHORT_S if what == "short cut" else 5.0,
    )  # fmt: skip


def _cut(where: str, silently: bool) -> str:
    return f"{where}, {'packets lost' if silently else 'link down'}"


HOST_KINDS: Table = {
    "other agent killed": (_agent_killed, 0.25),
    "short cut": (_short_cut, 0.3),
    "long cut": (_long_cut, 0.35),
    "cut and interrupt": (_cut_and_interrupt, 0.2),
    "cut between cells": (_idle_cut, 0.1),
    "host lost in a repair": (_lost_in_repair, 0.2),
}
"""The kinds that need two hosts, and how often each is chosen, beside those of one host."""
_NOT_ACROSS_HOSTS = ("strangers", "wrong shape", "skipped call")
"""Gloo does not authenticate, and sizes, splits and reductions are compared in a file of one host (docs/faults.md)."""
KINDS_OF_TWO_HOSTS = {kind: made for kind, made in (KINDS | HOST_KINDS).items() if kind not in _NOT_ACROSS_HOSTS}


class FuzzOnTwoHosts(Fuzz):
    """A kernel with ranks 0 and 1 on its own host, 2 and 3 on the other.

    Args:
        seed: Of the run.
        folder: Where the ranks write the time of a fault, and both hosts' agents have their folders.
        link: The network between the hosts.
        server: The other host's sshd.
        kinds: The kinds of faults to choose from; empty: all.
    """

    table, options = KINDS_OF_TWO_HOSTS, "--hosts "

    def __init__(
        self, seed: int, folder: Path, link: Network, server: SshServer, *, kinds: tuple[str, ...] = ()
    ) -> None:
        self._link = link
        self._runtime = folder / "r"
        self._runtime.mkdir(mode=0o700)
        environment = {"IPYTHONDIR": str(server.ipython), "AXON_NB_RUNTIME_DIR": str(self._runtime)}
        start = f"{START} --hosts ssh:{FAR_HOST}"
        super().__init__(seed, folder, kinds=kinds, start=start, environment=environment)

    def _cell(self, fault: Fault, outcome: Outcome, cluster: Footprint | None, around: contextlib.ExitStack) -> Reply:
        kernel, what = self._kernel, fault.other_host
        if not what or what.endswith("in a repair"):
            return super()._cell(fault, outcome, cluster, around)
        cut = contextlib.ExitStack()
        around.push(cut)
        far_agent = self._far_agent()
        if what == "idle":
            cut.enter_context(self._link.cut(silently=fault.silently))
            time.sleep(fault.lasts_s)
        request = kernel.submit(f"%%distributed\n{fault.code}")
        kernel.wait_until_busy(request)
        time.sleep(fault.loses_after_s)
        began = time.time()
        if what == "agent":
            far_agent.send_signal(signal.SIGKILL)
        elif what != "idle":
            cut.enter_context(self._link.cut(silently=fault.silently))
            time.sleep(fault.lasts_s)  # 0 if it ends with the cell
        if what == "short cut":
            cut.close()
            self._cut_s = time.time() - began
        elif what == "cut and interrupt":
            began = time.time()
            kernel.interrupt()
        reply = kernel.collect(request, timeout=CEILING_S + 30)
        outcome.control_s = time.time() - began
        outcome.report = reply.traceback or reply.stdout
        if what == "cut for good":
            self._repair_without_the_host(outcome, elsewhere=fault.silently)
        return reply

    def _far_agent(self) -> psutil.Process:
        """The other host's agent, which forked the ranks there."""
        pids = footprint(self._kernel).pids
        agent = psutil.Process(next(pids[rank] for rank in FAR_RANKS if rank in pids)).parent()
        assert agent is not None
        return agent

    def _repair_without_the_host(self, outcome: Outcome, *, elsewhere: bool) -> None:
        """Repair while the host cannot be reached: it says so, and the ranks of this host are usable, or all here."""
        began = time.monotonic()
        reply = self._kernel.run("%distributed repair", timeout=_LIMIT_S)
        took = time.monotonic() - began
        if reply.ok or FAR_HOST not in reply.traceback:
            outcome.problems.append(f"a repair without the host does not name it: {reply.shown()}")
        if took > CEILING_S:
            outcome.problems.append(f"a repair without the host took {took:.1f} s")
        self._kernel.ok("%%distributed --ranks 0-1\nrank", timeout=_LIMIT_S)
        if elsewhere:
            self._kernel.ok(f"%distributed repair --on {socket.gethostname()}", timeout=_LIMIT_S)
            self._kernel.ok("%%distributed\ndist.barrier()", timeout=_LIMIT_S)
            self.repair_cell = f"%distributed repair --ranks 2,3 --on {FAR_HOST}"

    def _judge(self, fault: Fault, reply: Reply, outcome: Outcome) -> None:
        if fault.other_host == "short cut" and self._cut_s > _SHORT_ENOUGH_S and not reply.ok:
            outcome.report += f"\nthe link was cut for {self._cut_s:.2f} s, for the machine was busy"
            fault = dataclasses.replace(fault, ends=("CellError",), says=SILENT)
        super()._judge(fault, reply, outcome)

    def _repair(self, fault: Fault, outcome: Outcome) -> None:
        if fault.other_host.endswith("in a repair"):
            self._lose_in_repair(fault, outcome)
        elif fault.other_host in ("cut and interrupt", "short cut"):
            self._repair_what_is_left(fault, outcome)
        elif self.repair_cell == Fuzz.repair_cell:
            super()._repair(fault, outcome)
        else:
            assert until(lambda: FAR_HOST in self._kernel.value(_STATE)[0]), "the host does not join again"
            super()._repair(fault, outcome)
            self.repair_cell = Fuzz.repair_cell

    def _repair_what_is_left(self, fault: Fault, outcome: Outcome) -> None:
        """Repair after a cut that may have been too short for a loss; the news of one may come late."""
        for attempt in range(3):
            reply = self._kernel.run("%%distributed\n'alive'", timeout=_LIMIT_S)
            if reply.ok and not attempt and not fault.dies:
                return
            if reply.ok:
                break
            outcome.report += f"\n{reply.traceback}"
            self._kernel.run("%distributed repair", timeout=_LIMIT_S)
        else:
            raise AssertionError(f"a plain repair does not make it whole: {reply.traceback[:2000]}")
        self._build()

    def _lose_in_repair(self, fault: Fault, outcome: Outcome) -> None:
        kernel, far_agent = self._kernel, self._far_agent()
        request = kernel.submit("%distributed repair")
        time.sleep(fault.loses_after_s)
        if fault.other_host.startswith("agent"):
            far_agent.send_signal(signal.SIGKILL)
        else:
            with self._link.cut(silently=fault.silently):
                time.sleep(fault.lasts_s)
        outcome.report += f"\n{kernel.collect(request, timeout=_LIMIT_S).shown()}"
        self._repair_what_is_left(fault, outcome)

    def _check(self, fault: Fault, outcome: Outcome) -> None:
        super()._check(fault, outcome)
        code = "import os\nos.environ.get('AXON_NB_HOST', '')"
        self._kernel.ok(f"%%distributed --out placed\n{code}", timeout=_LIMIT_S)
        placed = self._kernel.value("dict(placed.values)")
        if placed != {rank: FAR_HOST if rank in FAR_RANKS else "" for rank in range(4)}:
            outcome.problems.append(f"the ranks are on {placed}")
        if not until(lambda: not self._left(), timeout=_LIMIT_S):
            outcome.problems.append(f"left behind: {self._left()}")

    def _build(self) -> None:
        super()._build()
        self._known = self._there()

    def _there(self) -> dict[str, int]:
        """How much there is of each kind: processes of either host, and folders of their agents."""
        far = [_runs_there(process) for process in family(self._kernel.mark) if _is_python(process)]
        return {
            "processes here": far.count(False),
            f"processes on {FAR_HOST}": far.count(True),
            "folders": sum(1 for path in self._runtime.glob("*/*") if path.is_dir()),
        }

    def _left(self) -> list[str]:
        """What is missing, or there besides the ranks and one agent on each host."""
        hosts, ranks = self._kernel.value(_STATE)
        left = [] if (hosts, ranks) == ([FAR_HOST], [0, 1, 2, 3]) else [f"agents of {hosts}, ranks {ranks}"]
        return left + [f"{now} {what} instead of {self._known[what]}"
                       for what, now in self._there().items() if now != self._known[what]]  # fmt: skip


def _is_python(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith("python")
    return False


def _runs_there(process: psutil.Process) -> bool:
    return _JOIN in " ".join(command_lines([process]))


@contextlib.contextmanager
def fuzz_on_two_hosts(seed: int, folder: Path, *, kinds: tuple[str, ...] = ()) -> Iterator[FuzzOnTwoHosts]:
    """A second host, and the fuzz on both, for as long as it lasts."""
    with network() as link:
        (sshd := folder / "sshd").mkdir()
        with serve_ssh(link, sshd) as server, FuzzOnTwoHosts(seed, folder, link, server, kinds=kinds) as fuzz:
            yield fuzz
