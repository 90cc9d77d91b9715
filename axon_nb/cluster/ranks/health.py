"""The health of a cluster's ranks: which died and why, which are stuck, and whether the cluster is still there."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from axon_nb.cluster.failures import REPAIR_HINT, RankError, describe_death
from axon_nb.cluster.ranks import transitions
from axon_nb.cluster.ranks.transitions import Died, Ended, Entry, Event, Perform, Tell, World, transition
from axon_nb.errors import ClusterLostError
from axon_nb.records.protocol import agent as protocol
from axon_nb.records.ranks import format_ranks, name_ranks
from axon_nb.records.units import format_seconds
from axon_nb.troubleshooting import more

_STORY_LENGTH = 100
NCCL_UNTESTED = (
    "NCCL recovery is untested on multiple GPUs. The step in progress was lost, and ranks may be one step apart. "
    "If a rank does not come back, run `%distributed repair` or `%distributed restart`. (Shown once.)"
)
"""Shown when a cell fails on an NCCL cluster for the first time."""


class ActiveCell(Protocol):
    """A cell that runs on ranks and is notified of their deaths."""

    ranks: list[int]
    on_late_reply: Callable[[int], object]
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
    """What is known of a cluster's ranks, fed from any thread, and the story of how it came about.

    `transition` decides; running cells are notified of each death.
    """

    def __init__(
        self, name: str, runs: Callable[[], list[ActiveCell]], *, size: int, remedy: str = REPAIR_HINT
    ) -> None:
        self.name = name
        self._runs = runs
        self.remedy = remedy
        """How to get a dead or stuck rank back, as a sentence."""
        self.world = World(size)
        self.story: deque[Entry] = deque(maxlen=_STORY_LENGTH)
        """What happened last, oldest first."""
        self._lock = threading.Lock()
        self.leaks_reported = 0
        """How often threads that cannot be freed were reported."""
        self.lost_when = ""
        """When the cluster was lost, unless somebody stopped it; reads after the reason."""
        self._hinted: set[str] = set()

    def feed(self, event: Event) -> Perform | Ended | None:
        """Record what happened; return the step of a repair or resize that is due, or its end."""
        with self._lock:
            before = self.world
            self.world, effects = transition(before, event)
            self.story.append(Entry(time.time(), before, event, self.world, effects))
        runs = self._runs()  # once: a cell that learns of a death may end before it is announced
        for effect in effects:
            if isinstance(effect, Perform | Ended):
                return effect
            if isinstance(effect, Tell):
                for run in runs:
                    run.on_death(effect.rank, effect.reason)
            elif not any(effect.rank in run.ranks for run in runs):
                text = f"Idle rank {effect.rank} {effect.reason}. {self.remedy}"
                print("\n".join([text, *more(text)]), file=sys.stderr, flush=True)
        return None

    @property
    def dead(self) -> dict[int, str]:
        """Why each dead rank died; reads after its name."""
        return self.world.dead

    @property
    def disconnect_reason(self) -> str:
        """Why the cluster is gone; reads after its name. Empty while it is there."""
        return self.world.lost

    def hint(self, kind: str, text: str) -> None:
        """Print a hint; each kind is shown once."""
        if text and kind not in self._hinted:
            self._hinted.add(kind)
            print("\n".join([text, *more(text)]))

    def on_event(self, event: protocol.AgentEvent) -> None:
        """Process an event of the host agent."""
        if self.disconnect_reason:
            return
        if isinstance(event, protocol.Exit):
            self.feed(Died(event.rank, describe_death(event)))
        elif isinstance(event, protocol.ControllerExit):
            self.mark_lost(f"lost its ipyparallel controller (it {describe_death(event)})")
        elif isinstance(event, protocol.IdleStop):
            self.mark_lost(f"stopped itself after {format_seconds(event.idle_s)} without a cell (setting idle_stop)")
        elif isinstance(event, protocol.Stopped):
            self.mark_lost("was stopped by another program")
            self.lost_when = ""
        else:
            self.mark_lost("lost its host agent")

    def on_registration(self, event: dict[str, Any]) -> None:
        """Process a registration event of ipyparallel, the only sign that an engine of another launcher died."""
        if event["event"] == "unregister" and not self.disconnect_reason:
            self.feed(Died(int(event["id"]), "disconnected (its engine unregistered)", may_be_old=True))

    def report_to(self, run: ActiveCell) -> None:
        """Notify a new cell of what is already known."""
        for rank, reason in self.dead.items():
            run.on_death(rank, reason)
        if self.disconnect_reason:
            run.on_lost(self.disconnect_reason)

    def mark_lost(self, reason: str) -> None:
        """Record that the cluster is gone, and notify the running cells."""
        runs = self._runs()
        idle = "" if runs else ", while no cell was running"
        self.lost_when = f"at {time.strftime('%H:%M:%S')}{idle}"
        self.feed(transitions.Lost(reason))
        for run in runs:
            run.on_lost(reason)

    def ensure_available(self, ranks: Sequence[int]) -> None:
        """Check that a cell can run on these ranks.

        Raises:
            ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
        """
        if self.disconnect_reason:
            raise ClusterLostError(
                f"The cluster {self.name!r} {self.disconnect_reason}. Run `%distributed start` to start a new one."
            )
        world = self.world
        if dead := {rank: reason for rank, reason in world.dead.items() if rank in ranks}:
            reasons = " ".join(f"Rank {rank} {reason}." for rank, reason in sorted(dead.items()))
            raise ClusterLostError(f"{reasons} {self.remedy} Use `--ranks` to run a cell on the remaining ranks.")
        if stuck := sorted(world.stuck.intersection(ranks)):
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
        if stuck := tuple(error.rank for error in run.errors.values() if error.kind == "stuck"):
            run.on_late_reply = lambda rank: self.feed(transitions.Replied((rank,)))
            self.feed(transitions.Stuck(stuck))
            self.feed(transitions.Replied(tuple({*stuck} - {*run.unfinished})))  # before they were recorded
