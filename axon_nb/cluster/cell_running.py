"""The cells of one cluster: begun, run side by side, ended. The half of `Cluster` that deals with them."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from axon_nb.cluster import code as cell_code
from axon_nb.cluster import transfer
from axon_nb.cluster.alone import nobody_else
from axon_nb.cluster.cell import CellRun
from axon_nb.cluster.compatibility import after_failure, collective_timeout
from axon_nb.cluster.connection import Connection
from axon_nb.cluster.cuda_errors import lost_contexts
from axon_nb.cluster.deadlock import DeadlockWatch
from axon_nb.cluster.ending import Ending
from axon_nb.cluster.health import Health
from axon_nb.cluster.hints import shared_draws
from axon_nb.cluster.notice import WaitNotice
from axon_nb.cluster.options import CellOptions
from axon_nb.cluster.outcome import failure_of
from axon_nb.cluster.output import CellOutput, NotebookSink, RecordingSink
from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.cluster.recovery import Recovery
from axon_nb.cluster.repair import auto_repair, replace_stuck
from axon_nb.cluster.result import CellResult, measured
from axon_nb.cluster.settings import Settings
from axon_nb.cluster.settings import settings as process_settings
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster

__all__ = ["LEFT", "CellRunning"]

LEFT = "was left running"
"""Why there is no cluster any more, when it goes on without this notebook."""
_BACK = "`%distributed attach` gets both back"
_AFRESH = "`%distributed start` starts a new one"


class CellRunning:
    """See the module."""

    name: str
    world_size: int
    backend: str
    connection: Connection
    settings: Settings
    health: Health
    places: list[Mapping[str, Any]]

    def _keep_cells(self) -> None:
        self._numbers = itertools.count(1)
        self._runs: list[CellRun] = []
        self._lock = threading.Lock()

    @property
    def _whole(self) -> Cluster:
        return self  # type: ignore[return-value]  # its only subclass

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world."""
        return list(range(self.world_size))

    @property
    def busy(self) -> list[int]:
        """The ranks that run a cell now."""
        return sorted({rank for run in list(self._runs) for rank in run.unfinished})

    def begin(self, code: str, options: CellOptions) -> CellRun:
        """Send a cell; it is to be stepped to its end, and `end` gives its result."""
        quiet, timeout, cell = options.get("quiet", False), options.get("timeout"), options.get("cell")
        cell_code.check(code, name="cell" if cell is None else f"Cell In[{cell}]")
        chosen = resolve_ranks(options.get("ranks"), self.world_size)
        if process_settings.auto_repair:
            auto_repair(self._whole)
        self.health.refuse(chosen)
        if timeout is not None and timeout <= 0:
            raise UsageError(f"timeout {timeout:g}: it is a number of seconds above 0.")
        ahead = [rank for other in list(self._runs) for rank in other.unfinished if rank in chosen]
        run = self.new_run(chosen, options)
        if ahead and not quiet:
            print(f"Queued behind the cell that still runs on ranks {format_ranks(ahead)}.")
        alone = options.get("alone", False) and nobody_else(self._whole, run, list(self._runs))
        number = cell if cell is not None else next(self._numbers)
        now = {"keep_failure": process_settings.debug, "output_limit": self.settings.output_limit}
        facts = {**now, **options.get("facts", {})}
        run.send(code, number, keep_value=options.get("values", True), alone=alone, more=facts)
        self.health.tell(run)  # what has happened while we were sending
        return run

    def new_run(self, chosen: list[int], options: CellOptions) -> CellRun:
        """A cell that is still to be sent, or adopted; it counts as running until `end`."""
        quiet = options.get("quiet", False)
        sink = RecordingSink() if quiet else NotebookSink()
        run = CellRun(
            self.connection.client,
            chosen,
            CellOutput(chosen, sink, quiet=quiet, limit_bytes=self.settings.output_limit),
            self._ending(chosen),
            timeout_s=options.get("timeout"),
            view=options.get("view"),
            show_value=options.get("show_value", False),
            recover=lambda: self.recovery(run),
            notice=None if quiet else WaitNotice(sink),
        )
        with self._lock:
            self._runs.append(run)
        return run

    def _ending(self, chosen: Sequence[int]) -> Ending:
        client = self.connection.client
        living = [rank for rank in self.ranks if rank not in self.health.dead]
        watch = DeadlockWatch(client, living, chosen, dead=self.health.dead)
        # A cut needs Python in each operation, which NCCL's do not have.
        return Ending(client, chosen, watch=watch, cuttable=self.backend == "gloo" and chosen == self.ranks)

    def recovery(self, ended: CellRun | None = None) -> Recovery:
        """The forming anew of all groups, to be stepped to its end.

        Args:
            ended: The cell after which it is needed; None: it was left half-way by a notebook that is gone.
        """
        for run in self._runs:
            self.health.follow_stuck(run)
        limit_s = collective_timeout(self.settings, recoverable=False)
        if note := after_failure(self.places, self.backend, timeout_s=limit_s):
            print(note, file=sys.stderr)
        if self.backend == "nccl":
            self.health.tell_unproven()
            self.health.lost.update(lost_contexts(ended.errors) if ended is not None else [])
        return Recovery(self.connection.client, self.ranks, self.health, patient=self.backend == "nccl")

    def end(self, run: CellRun, options: CellOptions) -> CellResult:
        """The result of a cell that has been stepped to its end; raises as `run` does."""
        run.finish()
        with self._lock, contextlib.suppress(ValueError):
            self._runs.remove(run)
        if run.lost:
            way_back = _BACK if run.lost == LEFT else _AFRESH
            raise ClusterLostError(f"The cluster {self.name!r} {run.lost} while the cell ran: {way_back}.")
        self.health.follow_stuck(run)
        replaced = replace_stuck(self._whole, run.to_replace)
        failure = failure_of(run, replaced, way_back=self.health.way_back)
        if failure is not None and (options.get("check", True) or isinstance(failure, KeyboardInterrupt)):
            raise failure
        with_value = run.ranks_with_value if options.get("values", True) else []
        fetched = transfer.last_values(self._whole, with_value, run.token)
        if not options.get("quiet", False):
            self.health.hint("draws", shared_draws(run.told, run.ranks))
        text = {rank: run.output.text(rank) for rank in run.ranks}
        told: dict[str, Any] = measured(run.told)
        return CellResult(fetched, run.errors, run.seconds, text, **told)
