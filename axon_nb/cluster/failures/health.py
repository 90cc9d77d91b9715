"""Which ranks are available: which died and why, which are stuck, and whether the cluster is still there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from axon_nb.cluster.failures.deaths import describe_death
from axon_nb.cluster.failures.report import REPAIR_HINT, RankError
from axon_nb.errors import ClusterLostError
from axon_nb.records.protocol.cluster import AgentEvent, ControllerExit, Exit, IdleStop, Stopped
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import format_seconds
from axon_nb.troubleshooting import more

NCCL_UNTESTED = (
    "NCCL recovery is untested on multiple GPUs. The step in progress was lost, and ranks may be one step apart. "
    "If a rank does not come back, run `%distributed repair` or `%distributed restart`. (Shown once.)"
)
"""Shown when a cell fails on an NCCL cluster for the first time."""


class ActiveCell(Protocol):
    """A cell that runs on ranks and is notified of their deaths."""

    ranks: list[int]
    on_late_reply: Callable[[int], None]
    """Called with a rank that finishes the cell after the notebook stopped waiting for it."""

    @property
    def errors(self) -> Mapping[int, RankError]:
        """Failures by rank."""

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not finished the cell."""

    def on_output(self, rank: int, msg_type: str, content: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Process something that a rank printed or displayed; called from the IO thread."""

    def on_death(self, rank: int, reason: str) -> None:
        """Record that the rank's process died; called from any thread."""

    def on_lost(self, reason: str) -> None:
        """Record that the whole cluster is gone; called from any thread."""

    def interrupt(self) -> None:
        """Abort the cell on the user's behalf."""


class Health:
    """The state of a cluster's ranks, fed from any thread by the host agent's events and ipyparallel's registrations.

    Running cells are notified of each death.
    """

    def __init__(self, name: str, runs: Callable[[], list[ActiveCell]], *, remedy: str = REPAIR_HINT) -> None:
        self._name = name
        self._runs = runs
        self.remedy = remedy
        """How to get a dead or stuck rank back, as a sentence."""
        self.dead: dict[int, str] = {}
        """Why each dead rank died; reads after its name."""
        self.absent: set[int] = set()
        """Numbers of ranks that are not in the world: they left it, or do not belong to it yet."""
        self.expected_deaths: set[int] = set()
        """Ranks that are being terminated on request: their death is not reported."""
        self.stuck: set[int] = set()
        """Ranks that did not abort an earlier cell and have not replied since."""
        self.lost_contexts: set[int] = set()
        """Ranks that lost their CUDA context, on NCCL: they run cells but cannot communicate."""
        self.groups_disabled = ""
        """Why the process groups of all ranks are disabled; empty if they are not."""
        self.rebuild_when_back = False
        """Whether the next cell rebuilds disabled groups, if no rank is missing and the host agent responds."""
        self.leaks_reported = 0
        """How often threads that cannot be freed were reported."""
        self.disconnect_reason = ""
        """Why the cluster is gone; reads after its name. Empty while it is there."""
        self.lost_when = ""
        """When that happened, unless somebody stopped it; reads after the reason."""
        self._hinted: set[str] = set()

    def hint(self, kind: str, text: str) -> None:
        """Print a hint; each kind is shown once."""
        if text and kind not in self._hinted:
            self._hinted.add(kind)
            print("\n".join([text, *more(text)]))

    def on_event(self, event: AgentEvent) -> None:
        """Process an event of the host agent."""
        if self.disconnect_reason:
            return
        if isinstance(event, Exit):
            self.mark_dead(event.rank, describe_death(event))
        elif isinstance(event, ControllerExit):
            self.mark_lost(f"lost its ipyparallel controller (it {describe_death(event)})")
        elif isinstance(event, IdleStop):
            self.mark_lost(f"stopped itself after {format_seconds(event.idle_s)} without a cell (setting idle_stop)")
        elif isinstance(event, Stopped):
            self.mark_lost("was stopped by another program")
            self.lost_when = ""
        else:
            self.mark_lost("lost its host agent")

    def on_registration(self, event: dict[str, Any]) -> None:
        """Process a registration event of ipyparallel, the only sign that an engine of another launcher died."""
        if event["event"] == "unregister" and not self.disconnect_reason:
            self.mark_dead(int(event["id"]), "disconnected (its engine unregistered)")

    def mark_dead(self, rank: int, reason: str) -> None:
        """Record a death and notify the running cells; print it if the rank was idle."""
        if rank in self.absent:
            return
        is_new = rank not in self.dead
        self.dead.setdefault(rank, reason)
        self.stuck.discard(rank)
        runs = self._runs()
        for run in runs:
            run.on_death(rank, self.dead[rank])
        if rank in self.expected_deaths:
            self.expected_deaths.discard(rank)
        elif is_new and not any(rank in run.ranks for run in runs):
            text = f"Idle rank {rank} {reason}. {self.remedy}"
            print("\n".join([text, *more(text)]), file=sys.stderr, flush=True)

    def report_to(self, run: ActiveCell) -> None:
        """Notify a new cell of what is already known."""
        for rank, reason in list(self.dead.items()):
            run.on_death(rank, reason)
        if self.disconnect_reason:
            run.on_lost(self.disconnect_reason)

    def mark_lost(self, reason: str) -> None:
        """Record that the cluster is gone, and notify the running cells."""
        runs = self._runs()
        idle = "" if runs else ", while no cell was running"
        self.lost_when = f"at {time.strftime('%H:%M:%S')}{idle}"
        self.disconnect_reason = reason
        for run in runs:
            run.on_lost(reason)

    def ensure_available(self, ranks: Sequence[int]) -> None:
        """Check that a cell can run on these ranks.

        Raises:
            ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
        """
        if self.disconnect_reason:
            raise ClusterLostError(
                f"The cluster {self._name!r} {self.disconnect_reason}. Run `%distributed start` to start a new one."
            )
        dead = [rank for rank in ranks if rank in self.dead]
        if dead:
            reasons = " ".join(f"Rank {rank} {self.dead[rank]}." for rank in dead)
            raise ClusterLostError(f"{reasons} {self.remedy} Use `--ranks` to run a cell on the remaining ranks.")
        stuck = [rank for rank in ranks if rank in self.stuck]
        if stuck:
            repair = f"Run `%distributed repair --ranks {format_ranks(stuck)}` to replace {name_ranks(stuck)}."
            raise ClusterLostError(
                f"{name_ranks(stuck).capitalize()} {'is' if len(stuck) == 1 else 'are'} still stuck in an earlier cell "
                f"(`%distributed status` shows where). {repair if self.remedy == REPAIR_HINT else self.remedy}"
            )

    def warn_nccl_untested(self) -> None:
        """Print once that NCCL recovery is untested; on the notebook's thread."""
        self.hint("nccl_untested", NCCL_UNTESTED)

    def track_stuck(self, run: ActiveCell) -> None:
        """Remember the ranks that are stuck in `run`; a late reply clears them, also between two calls of this."""
        stuck = {error.rank for error in run.errors.values() if error.kind == "stuck"}
        if stuck:
            run.on_late_reply = self.stuck.discard
            self.stuck |= stuck
            self.stuck -= stuck - set(run.unfinished)  # replied before they were added
