"""Rounds: a fault, then everything that must hold afterwards. Each round can be run again alone, by seed and number."""

from __future__ import annotations

import ast
import contextlib
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from axon_nb.records.ranks import name_ranks
from tests.fuzz.fault import Fault
from tests.fuzz.faults import KINDS, make_fault
from tests.fuzz.interference import connections, repair_with_a_kill, stopped
from tests.fuzz.losses import lose
from tests.fuzz.mistakes import MOST_DISPLAYED, MOST_TEXT
from tests.support.kernel import Kernel, Reply
from tests.support.processes import Footprint, footprint, until

CEILING_S = 60.0
"""A cell must be over so many seconds after its fault; times are recorded, and only this is asserted."""
_PATIENCE_S = 150.0
_RENEW_EVERY = 100
"""After so many rounds the cluster is restarted: each recovery leaves threads behind, which end with the ranks."""
SENT = [Path(__file__).with_name(name) for name in ("workload.py", "blocking.py")]
"""Run on the ranks as cells, in this order."""
_STARTS = 8
START = "%distributed start -n 4 --devices cpu"


@dataclass
class Bounds:
    """What a rank may hold, given what it held at first."""

    threads: int
    fds: int
    rss: int
    leaked: int
    groups: int
    recoveries: int = 0

    def breaches(self, now: dict[str, Any]) -> list[str]:
        """What has grown beyond its bound: 2 threads a group given up, 4 descriptors a new group, 2 MiB a recovery."""
        groups = now["groups"] - self.groups + now["leaked"] - self.leaked
        limits = {
            "threads": self.threads + 2 * groups + 16,
            "fds": self.fds + 4 * (now["groups"] - self.groups) + 24,
            "rss": self.rss + (192 << 20) + self.recoveries * (2 << 20),
        }
        return [f"{what} {now[what]} > {limit}" for what, limit in limits.items() if now[what] > limit]


@dataclass
class Outcome:
    """What one round gave."""

    seed: int
    number: int
    fault: Fault
    control_s: float = 0.0
    """From the fault to the end of the cell, the recovery included."""
    apart: bool = False
    """Whether ranks were left at different steps of one object."""
    kinds: tuple[str, ...] = ()
    """What the fault was chosen from; empty: all kinds."""
    options: str = ""
    """Of the command that runs this round again."""
    problems: list[str] = field(default_factory=list)
    report: str = ""

    def __str__(self) -> str:
        fault = self.fault
        head = f"seed {self.seed} round {self.number}: {fault.kind} ({fault.detail}), {self.control_s:.2f} s"
        kinds = f" --kinds {' '.join(map(repr, self.kinds))}" if self.kinds else ""
        again = f"again, alone: python -m tests.fuzz {self.options}--seed {self.seed} --only {self.number}{kinds}"
        return "\n".join([head, *self.problems, fault.code, self.report, again])


class _FuzzKernel(Kernel):
    def wait_until_busy(self, request: str) -> None:
        """Return when the kernel has begun with the request."""
        end = time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            message = self._get(self.client.get_iopub_msg)
            if message is None or message["parent_header"].get("msg_id") != request:
                continue
            self._early.append(message)
            if message["msg_type"] == "execute_input":
                return
        raise TimeoutError("the kernel has not begun with the cell")


class Fuzz:
    """A kernel with 4 ranks whose objects live through all rounds.

    Args:
        seed: Of the run.
        folder: Where the ranks write the time of a fault.
        kinds: The kinds of faults to choose from; empty: all.
        start: The cell that starts the ranks.
        environment: What the kernel gets besides this process's environment.
    """

    table, options, repair_cell = KINDS, "", "%distributed repair"
    """The kinds of faults, the options of the command that runs such rounds, and what replaces ranks that died."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        *,
        kinds: tuple[str, ...] = (),
        start: str = START,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.seed = seed
        self.outcomes: list[Outcome] = []
        self.restarts = 0
        self._kinds = kinds
        self._clock = folder / "clock"
        self._start_cell = start
        self._environment = dict(environment or {})
        self._kernel = _FuzzKernel(env=self._environment)
        self._bounds: dict[int, Bounds] = {}
        self._since_start = 0
        self._start = 0

    def __enter__(self) -> Fuzz:
        self._kernel.__enter__()
        self._kernel.load_and_warm_up()
        self._kernel.ok(self._start_cell, timeout=_PATIENCE_S)
        self._build()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._kernel.__exit__(kind, error, trace)

    def _build(self) -> None:
        for path in SENT:
            self._kernel.ok(f"%%distributed\n{path.read_text()}", timeout=_PATIENCE_S)
        self._kernel.ok(f"%%distributed\nCLOCK = {str(self._clock)!r}\nbuild()", timeout=_PATIENCE_S)
        self._bounds = {}
        self._start = 0
        for rank, now in self._look().items():
            self._bounds[rank] = Bounds(now["threads"], now["fds"], now["rss"], now["leaked"], now["groups"])

    def _restart(self) -> None:
        self._kernel.ok("%distributed restart", timeout=_PATIENCE_S)
        self.restarts += 1
        self._since_start = 0
        self._build()

    def _look(self) -> dict[int, dict[str, Any]]:
        """Run the check of `workload.after` on all ranks."""
        self._kernel.ok(f"%%distributed --out looked\nafter({self._start})", timeout=_PATIENCE_S)
        return dict(ast.literal_eval(self._kernel.ok("looked.values", timeout=_PATIENCE_S).result))

    def round(self, number: int, kinds: tuple[str, ...] = ()) -> Outcome:
        """Run one round; what is wrong is in the outcome's `problems`, and the next round begins from a good state.

        Args:
            number: Of the round.
            kinds: The kinds of faults to choose from, if not those of all rounds.
        """
        if self._since_start >= _RENEW_EVERY:
            self._restart()
        self._since_start += 1
        kinds = kinds or self._kinds
        fault = make_fault(self.seed, number, kinds, table=self.table)
        outcome = Outcome(self.seed, number, fault, kinds=kinds, options=self.options)
        self.outcomes.append(outcome)
        try:
            reply = self._strike(fault, outcome)
            self._judge(fault, reply, outcome)
            self._repair(fault, outcome)
            self._check(fault, outcome)
            self._start = random.Random(f"{self.seed}/{number}").randrange(_STARTS)
        except (AssertionError, TimeoutError) as error:
            outcome.problems.append(f"{type(error).__name__}: {str(error)[:3000]}")
        if outcome.problems:
            self._renew()
        return outcome

    def _strike(self, fault: Fault, outcome: Outcome) -> Reply:
        kernel = self._kernel
        self._clock.unlink(missing_ok=True)
        cluster = footprint(kernel) if fault.loses or fault.stops or fault.connects else None
        with contextlib.ExitStack() as around:
            if cluster is not None and fault.connects:
                around.enter_context(connections(cluster))
            return self._cell(fault, outcome, cluster, around)

    def _cell(self, fault: Fault, outcome: Outcome, cluster: Footprint | None, around: contextlib.ExitStack) -> Reply:
        kernel = self._kernel
        began = time.time()
        request = kernel.submit(f"%%distributed {fault.options}\n{fault.code}")
        if cluster is not None and fault.loses:
            kernel.wait_until_busy(request)
            time.sleep(fault.loses_after_s)
            began = time.time()
            reply, ended = lose(kernel, cluster, fault, request, start=self._start_cell)
            outcome.control_s = ended - began
            outcome.report = reply.traceback or reply.stdout
            return reply
        if fault.interrupts:
            kernel.wait_until_busy(request)
            for delay in fault.interrupts:
                time.sleep(delay)  # a person's hand, not a wait for something
                if cluster is not None and fault.stops:
                    around.enter_context(stopped(cluster, fault.stops))
                began = time.time()
                kernel.interrupt()
        try:
            reply = kernel.collect(request, timeout=CEILING_S + 30)
        except TimeoutError as error:
            outcome.problems.append(f"not over by itself: {error}")
            kernel.interrupt()
            reply = kernel.collect(request, timeout=_PATIENCE_S)
        ended = time.time()
        around.close()
        if fault.interrupts:  # when the last came after the end of the cell, it is the next one's
            kernel.run("%%distributed\npass", timeout=_PATIENCE_S)
        at = float(self._clock.read_text()) if self._clock.exists() and not fault.interrupts else began
        outcome.control_s = ended - at
        outcome.report = reply.traceback or reply.stdout
        return reply

    def _judge(self, fault: Fault, reply: Reply, outcome: Outcome) -> None:
        if outcome.control_s > CEILING_S:
            outcome.problems.append(f"control came back after {outcome.control_s:.1f} s")
        if reply.ename not in fault.ends:
            outcome.problems.append(f"ended with {reply.ename or reply.status}, not with {' or '.join(fault.ends)}")
        elif not re.search(fault.says, reply.traceback):
            outcome.problems.append(f"the report does not say {fault.says!r}")
        text, displayed = len(reply.stdout) + len(reply.stderr), sum(len(str(display)) for display in reply.displays)
        if text > MOST_TEXT or displayed > MOST_DISPLAYED:
            outcome.problems.append(f"the cell shows {text:,} characters of text and {displayed:,} of displays")

    def _repair(self, fault: Fault, outcome: Outcome) -> None:
        if fault.loses in ("agent", "controller"):  # the cluster is a new one
            self.restarts += 1
            self._since_start = 0
            self._build()
        if fault.undo:
            self._kernel.ok(f"%%distributed\n{fault.undo}", timeout=_PATIENCE_S)
            self._kernel.run("%distributed repair", timeout=_PATIENCE_S)  # refuses if there is nothing to repair
        if fault.stops:  # it goes on now, and replies within moments
            assert until(lambda: self._kernel.run("%%distributed\n'alive'", timeout=_PATIENCE_S).ok)
        if not fault.dies:
            return
        if fault.during_repair:
            repair_with_a_kill(self._kernel, fault)
            self._build()
            return
        began = time.monotonic()
        reply = self._kernel.ok(self.repair_cell, timeout=_PATIENCE_S)
        assert name_ranks(fault.dies) in reply.stdout, reply.stdout
        left = [rank for rank in range(4) if rank not in fault.dies]
        code = "[name for name in NAMES if place(name) < 0]"
        self._kernel.ok(f"%%distributed --ranks {','.join(map(str, left))} --out torn\n{code}", timeout=_PATIENCE_S)
        for rank, names in ast.literal_eval(self._kernel.ok("torn.values").result).items():
            if names:
                outcome.problems.append(f"rank {rank} has survived, and {names} are at no place of an undisturbed run")
        outcome.report += f"\nrepaired in {time.monotonic() - began:.2f} s"
        self._build()

    def _check(self, fault: Fault, outcome: Outcome) -> None:
        looked = self._look()
        for rank, now in looked.items():
            if now["pending"]:
                outcome.problems.append(f"rank {rank} still has {now['pending']} in progress")
            if torn := [name for name, place in now["found"].items() if place < 0]:
                outcome.problems.append(f"rank {rank}: {torn} at no place of an undisturbed run {now['inside']}")
            if wrong := [name for name, well in now["again"].items() if not well]:
                outcome.problems.append(f"rank {rank}: {wrong} step on differently than an undisturbed run")
            bounds = self._bounds[rank]
            bounds.recoveries += 1
            outcome.problems += [f"rank {rank}: {text}" for text in bounds.breaches(now)]
        found = [tuple(sorted(now["found"].items())) for now in looked.values()]
        outcome.apart = len(set(found)) > 1

    def _renew(self) -> None:
        """After a failed round: a fresh cluster, so that the next round is judged by itself."""
        try:
            self._restart()
        except (AssertionError, TimeoutError):
            self._kernel.__exit__(None, None, None)
            self._kernel = _FuzzKernel(env=self._environment)
            self.__enter__()
            self._since_start = 0
