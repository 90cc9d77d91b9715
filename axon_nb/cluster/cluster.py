"""A running cluster as the notebook sees it: run cells on its ranks, move data, ask, stop."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from axon_nb.cluster import code as cell_code
from axon_nb.cluster import transfer
from axon_nb.cluster.cell import CellRun
from axon_nb.cluster.connection import Connection
from axon_nb.cluster.cuda_errors import context_hint, lost_contexts
from axon_nb.cluster.deadlock import DeadlockWatch
from axon_nb.cluster.drive import drive, drive_blocking
from axon_nb.cluster.ending import Ending
from axon_nb.cluster.failures import REPAIR, cell_error, interrupt_error
from axon_nb.cluster.handle import CellHandle
from axon_nb.cluster.health import Health
from axon_nb.cluster.layout import Layout
from axon_nb.cluster.options import CellOptions
from axon_nb.cluster.output import CellOutput, NotebookSink, RecordingSink
from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.cluster.recovery import Recovery
from axon_nb.cluster.repair import repair
from axon_nb.cluster.result import CellResult
from axon_nb.cluster.settings import Settings
from axon_nb.cluster.status import cluster_info, status_frame
from axon_nb.errors import ClusterGone, UsageError
from axon_nb.records.ranks import format_ranks
from axon_nb.records.state import RankState

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.records.cluster_info import ClusterInfo

__all__ = ["Cluster"]


class Cluster:
    """N ranks that persist between cells. Made by `axon_nb.start` and `axon_nb.attach`."""

    def __init__(
        self,
        connection: Connection,
        layout: Layout,
        settings: Settings,
        *,
        name: str,
        engines: str,
        places: Sequence[Mapping[str, Any]],
    ) -> None:
        self.name = name
        self.world_size = layout.num_ranks
        self.backend = layout.backend
        self.engines = engines
        """Name of the ipyparallel launcher that runs the ranks; ``axon``: forked from the host agent."""
        self.layout = layout
        self.connection = connection
        self.settings = settings
        self.launched: Any = None
        """ipyparallel's own object of the engines, in the process that launched them; None after an attach."""
        self._places = list(places)
        self._numbers = itertools.count(1)
        self._runs: list[CellRun] = []
        self._lock = threading.Lock()
        self.health = Health(name, lambda: list(self._runs))
        connection.agent.on_event(self.health.on_event)
        connection.client.on_registration(self.health.on_registration)

    def __repr__(self) -> str:
        state = self.health.gone or "running"
        return f"Cluster({self.name!r}, {self.world_size} ranks, {self.backend}, {state})"

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, str]:
        from axon_nb.cluster.card import cluster_card

        return cluster_card(self.info())

    @property
    def client(self) -> Any:
        """The ipyparallel client; engine ids are ranks."""
        return self.connection.client

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world."""
        return list(range(self.world_size))

    @property
    def running(self) -> bool:
        """Whether cells can be sent."""
        return not self.health.gone

    def run(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """Run `code` on ranks and wait for it.

        Args:
            code: Python as in a cell; `await`, `!cmd` and `%magic` lines work.
            **options: The fields of `CellOptions`: `ranks` (``"0,2-3"`` or ``[0, 2]``; all if left out), `quiet` (show
                nothing), `timeout` (seconds), `check` (False: failures are returned in `errors`, not raised), `cell`
                (number for tracebacks), `view` (a live view), `values` (False: do not fetch them), `show_value`.

        Raises:
            CellError: a rank failed.
            ClusterGone: the cluster ended.
        """
        run = self._begin(code, options)
        drive_blocking(run)
        return self._end(run, options)

    async def run_async(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """As `run`, without blocking the event loop; what a `%%distributed` cell awaits."""
        run = self._begin(code, options)
        await drive(run)
        return self._end(run, options)

    def run_noblock(self, code: str, **options: Unpack[CellOptions]) -> CellHandle:
        """As `run`, in the background: returns a handle at once; output goes to the notebook cell that started it."""
        run = self._begin(code, options)
        return CellHandle(run, lambda: self._end(run, options))

    def _begin(self, code: str, options: CellOptions) -> CellRun:
        quiet, timeout, cell = options.get("quiet", False), options.get("timeout"), options.get("cell")
        cell_code.check(code, name="cell" if cell is None else f"Cell In[{cell}]")
        chosen = resolve_ranks(options.get("ranks"), self.world_size)
        self.health.refuse(chosen)
        if timeout is not None and timeout <= 0:
            raise UsageError(f"timeout {timeout:g}: it is a number of seconds above 0.")
        sink = RecordingSink() if quiet else NotebookSink()
        output = CellOutput(chosen, sink, quiet=quiet, limit_bytes=self.settings.output_limit)
        run = CellRun(
            self.connection.client,
            chosen,
            output,
            self._ending(chosen),
            timeout_s=timeout,
            view=options.get("view"),
            show_value=options.get("show_value", False),
            recover=lambda: self._recovery(run),
        )
        with self._lock:
            ahead = [rank for other in self._runs for rank in other.unfinished if rank in chosen]
            self._runs.append(run)
        if ahead and not quiet:
            print(f"Queued behind the cell that still runs on ranks {format_ranks(ahead)}.")
        run.send(code, cell if cell is not None else next(self._numbers), keep_value=options.get("values", True))
        for rank, reason in list(self.health.dead.items()):  # one that died while we were sending
            run.on_death(rank, reason)
        if self.health.gone:
            run.on_lost(self.health.gone)
        return run

    def _ending(self, chosen: Sequence[int]) -> Ending:
        client = self.connection.client
        living = [rank for rank in self.ranks if rank not in self.health.dead]
        watch = DeadlockWatch(client, living, chosen)
        # A cut needs Python in each operation, which NCCL's do not have.
        return Ending(client, chosen, watch=watch, cuttable=self.backend == "gloo" and chosen == self.ranks)

    def _recovery(self, ended: CellRun) -> Recovery:
        for run in self._runs:
            self.health.follow_stuck(run)
        if self.backend == "nccl":
            self.health.tell_unproven()
            self.health.lost.update(lost_contexts(ended.errors))
        return Recovery(self.connection.client, self.ranks, self.health, patient=self.backend == "nccl")

    def _end(self, run: CellRun, options: CellOptions) -> CellResult:
        check = options.get("check", True)
        run.finish()
        with self._lock, contextlib.suppress(ValueError):
            self._runs.remove(run)
        if run.lost:
            raise ClusterGone(
                f"The cluster {self.name!r} {run.lost} while the cell ran: `%distributed start` starts a new one."
            )
        self.health.follow_stuck(run)
        if run.interrupted_at is not None and check:
            raise interrupt_error(run.errors, run.ranks)
        if (run.errors or run.explanation) and check:
            raise cell_error(
                run.errors,
                first=run.failed_order,
                explanation=run.explanation,
                hint=_hint(run),
                timeout_s=run.timeout_s if run.timed_out else None,
            )
        fetched = (
            transfer.last_values(self.connection.client, run.ranks_with_value, run.token)
            if options.get("values", True)
            else {}
        )
        text = {rank: run.output.text(rank) for rank in run.ranks}
        return CellResult(fetched, run.errors, run.seconds, text)

    def push(self, variables: Mapping[str, Any], *, ranks: str | Iterable[int] | None = None) -> None:
        """Put variables into the namespace of ranks.

        Args:
            variables: Names and values: tensors, arrays, anything that pickles.
            ranks: As for `run`.
        """
        chosen = resolve_ranks(ranks, self.world_size)
        self.health.refuse(chosen)
        transfer.push(self.connection.client, chosen, variables)

    def pull(self, name: str, *, ranks: str | int | Iterable[int] | None = None) -> Any:
        """Fetch a variable, or the value of an expression: by rank, or the value itself when `ranks` is one number.

        Raises:
            UsageError: a rank does not have it, or it does not pickle.
        """
        single = isinstance(ranks, int)
        chosen = resolve_ranks([ranks] if isinstance(ranks, int) else ranks, self.world_size)
        self.health.refuse(chosen)
        values = transfer.pull(self.connection.client, chosen, name)
        return values[chosen[0]] if single else values

    def repair(self, ranks: str | Iterable[int] | None = None) -> list[int]:
        """Replace dead ranks by fresh ones and form all groups anew; the other ranks keep everything.

        Args:
            ranks: Which, as for `run`; None: those that are dead. One that lives is killed first.

        Returns:
            The replaced ranks. They start empty: what only they held is lost.
        """
        return repair(self, None if ranks is None else resolve_ranks(ranks, self.world_size))

    def replaced(self, rank: int, place: Mapping[str, Any]) -> None:
        """A fresh process has taken the place of `rank`."""
        self._places[rank] = place
        self.health.dead.pop(rank, None)
        self.health.stuck.discard(rank)
        self.health.lost.discard(rank)
        self.connection.agent.call("set_info", info={"places": self._places})

    def sample(self, ranks: Iterable[int] | None = None) -> dict[int, RankState]:
        """What each rank does right now; ranks that do not answer within a second are left out."""
        chosen = self.ranks if ranks is None else list(ranks)
        return transfer.sample(self.connection.client, [rank for rank in chosen if rank not in self.health.dead])

    def info(self) -> ClusterInfo:
        """Everything about the cluster in one record, asked of the ranks now."""
        return cluster_info(self, self._places, self.health.dead)

    def status(self) -> pd.DataFrame:
        """One row a rank: host, pid, device, backend, state, memory in bytes, current cell."""
        return status_frame(self.info())

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to one rank's process (forked ranks only)."""
        resolve_ranks([rank], self.world_size)
        self.connection.agent.call("signal", rank=rank, signal=int(number))

    def stop(self) -> None:
        """End all ranks, the controller and the agent; nothing is left behind. A second call does nothing."""
        if self.health.gone:
            return
        self.health.gone = "was stopped"
        transfer.shut_down_foreign(self)
        self.connection.stop()
        for run in list(self._runs):
            run.on_lost("was stopped")

    def detach(self) -> None:
        """Leave the cluster running for its keep-alive time; `axon_nb.attach` gets it back."""
        self.health.gone = "was left running"
        self.connection.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _hint(run: CellRun) -> str:
    if hint := context_hint(run.errors):
        return hint
    return REPAIR if {error.kind for error in run.errors.values()} & {"died", "stuck"} else ""
