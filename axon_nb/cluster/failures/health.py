"""Which ranks are there: who died and how, who is stuck, whether the cluster still is.

What a user of an NCCL cluster is told when a cell fails there for the first time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from axon_nb.cluster.failures.deaths import describe_death
from axon_nb.cluster.failures.report import REPAIR, RankError
from axon_nb.errors import ClusterLostError
from axon_nb.records.protocol.agent import AgentEvent, ControllerExit, Exit
from axon_nb.records.ranks import format_ranks

__all__ = ["UNPROVEN_ON_NCCL", "ActiveCell", "Health"]

UNPROVEN_ON_NCCL = (
    "Recovery on NCCL has not been tried on several GPUs. Lost is the step that was under way, and ranks may be a step "
    "apart; if a rank does not come back, `%distributed repair` or `%distributed restart` does it. Told once."
)


class ActiveCell(Protocol):
    """A cell that runs on ranks, and learns what becomes of them."""

    ranks: list[int]
    on_late_reply: Callable[[int], None]
    """Called with a rank that ends the cell after it was given up."""

    @property
    def errors(self) -> Mapping[int, RankError]:
        """Failures by rank."""

    @property
    def unfinished(self) -> list[int]:
        """The ranks that have not ended the cell."""

    def on_death(self, rank: int, reason: str) -> None:
        """From any thread: the rank's process is gone."""

    def on_lost(self, reason: str) -> None:
        """From any thread: the whole cluster is gone."""

    def interrupt(self) -> None:
        """The user wants the cell to end."""


class Health:
    """Fed by the host agent's events and by ipyparallel's registrations, from any thread; told to the running cells."""

    def __init__(self, name: str, runs: Callable[[], list[ActiveCell]], *, way_back: str = REPAIR) -> None:
        self._name = name
        self._runs = runs
        self.way_back = way_back
        """What gives a rank that is dead or stuck back, as a sentence."""
        self.dead: dict[int, str] = {}
        """Why each dead rank died; reads after its name."""
        self.awaited: set[int] = set()
        """Ranks that are being ended on request: their death is no news."""
        self.stuck: set[int] = set()
        """Ranks that an earlier cell was given up on, and that have not come back."""
        self.lost: set[int] = set()
        """Ranks whose CUDA context is lost, on NCCL: they run cells, and cannot communicate."""
        self.broken = ""
        """Why ranks cannot communicate; empty while they can."""
        self.leaks_told = 0
        """How often the user was told of threads that cannot be freed."""
        self.unproven_told = False
        """Whether the user knows what has not been tried on NCCL."""
        self._hinted: set[str] = set()
        self.gone = ""
        """Why there is no cluster any more; reads after its name. Empty while there is."""

    def hint(self, kind: str, text: str) -> None:
        """Tell the user something that may help; one of a kind."""
        if text and kind not in self._hinted:
            self._hinted.add(kind)
            print(text)

    def on_event(self, event: AgentEvent) -> None:
        """Take in one event of the host agent."""
        if self.gone:
            return
        if isinstance(event, Exit):
            self.die(event.rank, describe_death(event))
        elif isinstance(event, ControllerExit):
            self.lose(f"lost its ipyparallel controller, which {describe_death(event)},")
        else:
            self.lose("lost its host agent")

    def on_registration(self, event: dict[str, Any]) -> None:
        """Take in one registration event of ipyparallel; how engines of other launchers are seen to die."""
        if event["event"] == "unregister" and not self.gone:
            self.die(int(event["id"]), "is gone: its engine has left")

    def die(self, rank: int, reason: str) -> None:
        """A rank is dead."""
        news = rank not in self.dead
        self.dead.setdefault(rank, reason)
        self.stuck.discard(rank)
        runs = self._runs()
        for run in runs:
            run.on_death(rank, self.dead[rank])
        if rank in self.awaited:
            self.awaited.discard(rank)
        elif news and not any(rank in run.ranks for run in runs):
            print(f"rank {rank} {reason}, while it was idle. {self.way_back}", file=sys.stderr, flush=True)

    def tell(self, run: ActiveCell) -> None:
        """Tell a new cell what is known already."""
        for rank, reason in list(self.dead.items()):
            run.on_death(rank, reason)
        if self.gone:
            run.on_lost(self.gone)

    def lose(self, reason: str) -> None:
        """The cluster is gone."""
        self.gone = reason
        for run in self._runs():
            run.on_lost(reason)

    def refuse(self, ranks: Sequence[int]) -> None:
        """Say why a cell cannot run on these ranks.

        Raises:
            ClusterLostError: the cluster is gone, or one of the ranks is dead or stuck.
        """
        if self.gone:
            raise ClusterLostError(f"The cluster {self._name!r} {self.gone}: `%distributed start` starts a new one.")
        dead = [rank for rank in ranks if rank in self.dead]
        if dead:
            reasons = "; ".join(f"rank {rank} {self.dead[rank]}" for rank in dead)
            raise ClusterLostError(f"{reasons}. {self.way_back} `--ranks` runs a cell on those that are left.")
        stuck = [rank for rank in ranks if rank in self.stuck]
        if stuck:
            raise ClusterLostError(
                f"Ranks {format_ranks(stuck)} are still stuck in an earlier cell (`%distributed status` shows where). "
                + self.way_back.replace("repair`", "repair --ranks …`")
            )

    def tell_unproven(self) -> None:
        """Say once what has not been tried on NCCL; on the notebook's thread."""
        if not self.unproven_told:
            self.unproven_told = True
            print(UNPROVEN_ON_NCCL)

    def follow_stuck(self, run: ActiveCell) -> None:
        """Remember the ranks on which `run` was given up; a late answer frees them."""
        stuck = {error.rank for error in run.errors.values() if error.kind == "stuck"}
        if stuck:
            self.stuck |= stuck
            run.on_late_reply = self.stuck.discard
