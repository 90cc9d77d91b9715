"""A running cluster as the notebook sees it: run cells on its ranks, move data, ask, stop."""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from axon_nb.cluster import code as cell_code
from axon_nb.cluster import presses, transfer
from axon_nb.cluster.cell import CellRun
from axon_nb.cluster.connection import Connection
from axon_nb.cluster.deadlock import DeadlockWatch
from axon_nb.cluster.drive import drive, drive_blocking
from axon_nb.cluster.ending import Ending
from axon_nb.cluster.handle import CellHandle
from axon_nb.cluster.health import Health
from axon_nb.cluster.layout import Layout
from axon_nb.cluster.options import CellOptions
from axon_nb.cluster.outcome import failure_of
from axon_nb.cluster.output import CellOutput, NotebookSink, RecordingSink
from axon_nb.cluster.ranks import resolve_ranks
from axon_nb.cluster.recovery import Recovery
from axon_nb.cluster.repair import auto_repair, repair, replace_stuck
from axon_nb.cluster.repair_report import RepairReport
from axon_nb.cluster.result import CellResult
from axon_nb.cluster.settings import Settings
from axon_nb.cluster.settings import settings as process_settings
from axon_nb.cluster.status import cluster_info, status_frame
from axon_nb.cluster.sync import SyncReport, sync
from axon_nb.errors import ClusterGone, UsageError
from axon_nb.records.ranks import format_ranks
from axon_nb.records.state import RankState

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.records.cluster_info import ClusterInfo

__all__ = ["Cluster"]

_LEFT = "was left running"
_BACK = "`%distributed attach` gets both back"
_AFRESH = "`%distributed start` starts a new one"


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
        self.places = list(places)
        """What each rank says of its host: host, pid, device, cores, gpus."""
        self.running_cell: CellHandle | None = None
        """The cell that was running, or had ended unseen, when this notebook attached; None: there was none."""
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

    @property
    def busy(self) -> list[int]:
        """The ranks that run a cell now."""
        return sorted({rank for run in list(self._runs) for rank in run.unfinished})

    def run(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """Run `code` on ranks and wait for it.

        Args:
            code: Python as in a cell; `await`, `!cmd` and `%magic` lines work.
            **options: The fields of `CellOptions`.

        Raises:
            CellError: a rank failed.
            CellInterrupt: the user pressed stop; with `check=False` too.
            ClusterGone: the cluster ended.
        """
        with presses.caught() as pressed:
            run = self._begin(code, options)
            drive_blocking(run, pressed)
            return self.end(run, options)

    async def run_async(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """As `run`, without blocking the event loop; what a `%%distributed` cell awaits."""
        with presses.caught() as pressed:
            run = self._begin(code, options)
            await drive(run, pressed)
            return self.end(run, options)

    def run_noblock(self, code: str, **options: Unpack[CellOptions]) -> CellHandle:
        """As `run`, in the background: returns a handle at once; output goes to the notebook cell that started it."""
        with presses.caught() as pressed:
            run = self._begin(code, options)
            pressed.hand_to(run.interrupt)
            return CellHandle(run, lambda: self.end(run, options))

    def _begin(self, code: str, options: CellOptions) -> CellRun:
        quiet, timeout, cell = options.get("quiet", False), options.get("timeout"), options.get("cell")
        cell_code.check(code, name="cell" if cell is None else f"Cell In[{cell}]")
        chosen = resolve_ranks(options.get("ranks"), self.world_size)
        if process_settings.auto_repair:
            auto_repair(self)
        self.health.refuse(chosen)
        if timeout is not None and timeout <= 0:
            raise UsageError(f"timeout {timeout:g}: it is a number of seconds above 0.")
        ahead = [rank for other in list(self._runs) for rank in other.unfinished if rank in chosen]
        run = self.new_run(chosen, options)
        if ahead and not quiet:
            print(f"Queued behind the cell that still runs on ranks {format_ranks(ahead)}.")
        run.send(code, cell if cell is not None else next(self._numbers), keep_value=options.get("values", True))
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
            recover=self.recovery if self.backend == "gloo" else None,
        )
        with self._lock:
            self._runs.append(run)
        return run

    def _ending(self, chosen: Sequence[int]) -> Ending:
        client, gloo = self.connection.client, self.backend == "gloo"
        watch = DeadlockWatch(client, [r for r in self.ranks if r not in self.health.dead], chosen) if gloo else None
        return Ending(client, chosen, watch=watch, cuttable=gloo and chosen == self.ranks)

    def recovery(self) -> Recovery:
        """The forming anew of all groups, to be stepped to its end."""
        for run in self._runs:
            self.health.follow_stuck(run)
        return Recovery(self.connection.client, self.ranks, self.health)

    def end(self, run: CellRun, options: CellOptions) -> CellResult:
        """The result of a cell that has been stepped to its end; raises as `run` does."""
        run.finish()
        with self._lock, contextlib.suppress(ValueError):
            self._runs.remove(run)
        if run.lost:
            way_back = _BACK if run.lost == _LEFT else _AFRESH
            raise ClusterGone(f"The cluster {self.name!r} {run.lost} while the cell ran: {way_back}.")
        self.health.follow_stuck(run)
        replaced = replace_stuck(self, run.to_replace)
        failure = failure_of(run, replaced)
        if failure is not None and (options.get("check", True) or isinstance(failure, KeyboardInterrupt)):
            raise failure
        with_value = run.ranks_with_value if options.get("values", True) else []
        fetched = transfer.last_values(self.connection.client, with_value, run.token)
        return CellResult(fetched, run.errors, run.seconds, {rank: run.output.text(rank) for rank in run.ranks})

    def push(self, variables: Mapping[str, Any], *, ranks: str | Iterable[int] | None = None) -> None:
        """Put variables (tensors, arrays, anything that pickles) into the namespace of ranks, given as for `run`."""
        chosen = resolve_ranks(ranks, self.world_size)
        self.health.refuse(chosen)
        transfer.push(self.connection.client, chosen, variables)

    def pull(self, name: str, *, ranks: str | int | Iterable[int] | None = None) -> Any:
        """Fetch a variable, or the value of an expression: by rank, or the value itself when `ranks` is one number.

        UsageError when a rank does not have it, or when it does not pickle.
        """
        chosen = resolve_ranks([ranks] if isinstance(ranks, int) else ranks, self.world_size)
        self.health.refuse(chosen)
        values = transfer.pull(self.connection.client, chosen, name)
        return values[chosen[0]] if isinstance(ranks, int) else values

    def repair(
        self, ranks: str | Iterable[int] | None = None, *, source: int | None = None, names: Iterable[str] = ()
    ) -> RepairReport:
        """Replace dead ranks by fresh ones and form all groups anew; the other ranks keep everything.

        Args:
            ranks: Which, as for `run`; None: those that are dead. One that lives is killed first.
            source: A rank whose variables and random state the replaced ranks get; None: they start empty.
            names: Which variables; empty: all that can be copied.

        Returns:
            What was replaced and copied, and what only those ranks held, which is lost; its text says so.
        """
        chosen = None if ranks is None else resolve_ranks(ranks, self.world_size)
        return repair(self, chosen, source=source, names=list(names))

    def sync(self, source: int = 0, names: Iterable[str] = ()) -> SyncReport:
        """Copy models, optimizers and schedulers of one rank to all others, in place; empty `names`: all possible."""
        return sync(self, source, list(names))

    def replaced(self, rank: int, place: Mapping[str, Any]) -> None:
        """A fresh process has taken the place of `rank`."""
        self.places[rank] = place
        self.health.dead.pop(rank, None)
        self.health.stuck.discard(rank)
        self.connection.agent.call("set_info", info={"places": self.places})

    def sample(self, ranks: Iterable[int] | None = None) -> dict[int, RankState]:
        """What each rank does right now; ranks that do not answer within a second are left out."""
        chosen = self.ranks if ranks is None else list(ranks)
        return transfer.sample(self.connection.client, [rank for rank in chosen if rank not in self.health.dead])

    def info(self) -> ClusterInfo:
        """Everything about the cluster in one record, asked of the ranks now."""
        return cluster_info(self, self.places, self.health.dead)

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
        """Leave the cluster running for its keep-alive time; `axon_nb.attach` gets it back, and the cell that runs."""
        self.leave_cells()
        self.health.gone = _LEFT
        self.connection.close()

    def leave_cells(self) -> None:
        """Wait no longer for the cells that run; they go on. From any thread."""
        for run in list(self._runs):
            run.on_lost(_LEFT)

    def cancel(self) -> list[int]:
        """Interrupt every cell that runs, those in the background too; returns the ranks that ran one."""
        ranks = {rank for run in self._runs for rank in run.unfinished}
        for run in list(self._runs):
            run.interrupt()
        return sorted(ranks)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
