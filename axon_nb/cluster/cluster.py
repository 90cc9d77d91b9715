"""A running cluster as the notebook sees it: run cells on its ranks, move data, inspect, stop."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from axon_nb.cluster import transfer
from axon_nb.cluster.cells.driver import CellHandle
from axon_nb.cluster.cells.manager import LEFT_RUNNING, CellManager
from axon_nb.cluster.cells.options import CellOptions
from axon_nb.cluster.cells.result import CellResult
from axon_nb.cluster.history import History, session_facts
from axon_nb.cluster.inspection import status
from axon_nb.cluster.inspection.completion import CompletionClient
from axon_nb.cluster.inspection.status import cluster_info, rank_stacks, status_frame
from axon_nb.cluster.inspection.variables import difference_frame, variables_frame
from axon_nb.cluster.launch.engines import shut_down_foreign
from axon_nb.cluster.ranks.transitions import Lost
from axon_nb.cluster.recovery.new_ranks import RepairReport
from axon_nb.cluster.recovery.repair import repair
from axon_nb.cluster.recovery.resize import ResizeReport, resize
from axon_nb.cluster.settings import Settings
from axon_nb.cluster.snapshot import undo
from axon_nb.cluster.state import ClusterState
from axon_nb.cluster.transfer import SyncReport, join_values, seed, split_value, sync
from axon_nb.records.protocol.agent import EngineInfo, Signal
from axon_nb.records.protocol.recovery import CallResizeFunctions
from axon_nb.records.protocol.wire import cell_source
from axon_nb.records.ranks import resolve_ranks
from axon_nb.records.telemetry import RankState

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.inspection.feeds import SpanFeed
    from axon_nb.cluster.launch.placement import Layout
    from axon_nb.records.stacks import Stacks
    from axon_nb.records.telemetry import ClusterInfo


class Cluster:
    """N ranks that persist between cells. Made by `axon_nb.start` and `axon_nb.attach`."""

    def __init__(self, state: ClusterState, cells: CellManager, history: History) -> None:
        self.state = state
        """The notebook's state of the cluster, which the functions of this package take."""
        self.cells = cells
        """Runs cells on the ranks."""
        self.completion = CompletionClient(state)
        """Requests completions and help from the ranks."""
        self._history = history
        self.backend = state.backend
        self.engines = state.engines
        """Name of the ipyparallel launcher that runs the ranks; ``axon``: forked from the host agent."""
        self.connection = state.connection
        self.health = state.health
        self.running_cell: CellHandle | None = None
        """The cell that was running, or had finished meanwhile, when this notebook attached; None: there was none."""

    def __repr__(self) -> str:
        how = self.health.disconnect_reason or "running"
        return f"Cluster({self.name!r}, {self.world_size} ranks, {self.backend}, {how})"

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, str], dict[str, Any]]:
        from axon_nb.cluster.inspection.status import cluster_card

        # The export of a saved notebook needs these facts.
        return cluster_card(self.info(), measured=False), {"axon_nb": session_facts(self.state).to_json()}

    @property
    def name(self) -> str:
        """The name by which `%distributed attach` and `axon-nb` find it."""
        return self.state.name

    @property
    def client(self) -> Any:
        """The ipyparallel client; engine ids are ranks."""
        return self.state.client

    @property
    def rank_info(self) -> tuple[EngineInfo, ...]:
        """What each rank reported when it joined: host, pid, device, cores, gpus."""
        return self.state.rank_info

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.state.world_size

    @property
    def layout(self) -> Layout:
        """The ranks, their devices and the backend."""
        return self.state.layout

    @property
    def settings(self) -> Settings:
        """The cluster's own copy of the settings."""
        return self.state.settings

    @cached_property
    def spans(self) -> SpanFeed:
        """Fetches what the ranks' spans show."""
        from axon_nb.cluster.inspection.feeds import SpanFeed  # loads NumPy

        return SpanFeed(self.state)

    @property
    def ranks(self) -> list[int]:
        """All ranks of the world."""
        return self.state.ranks

    @property
    def busy(self) -> list[int]:
        """The ranks that are running a cell."""
        return self.state.busy

    @property
    def running(self) -> bool:
        """Whether cells can be sent."""
        return self.state.running

    def run(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """Run `code` on ranks and wait for it.

        Args:
            code: Python as in a cell; `await`, `!cmd` and `%magic` lines work.
            **options: The fields of `CellOptions`.

        Raises:
            CellError: a rank failed.
            CellInterrupt: the user interrupted the cell; also with `check=False`.
            ClusterLostError: the cluster is gone.
        """
        options.setdefault("undoable", True)
        return self.cells.run(code, **options)

    async def run_async(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """Run a cell as `run` does, without blocking the event loop; `%%distributed` cells await this."""
        options.setdefault("undoable", True)
        return await self.cells.run_async(code, **options)

    def run_noblock(self, code: str, **options: Unpack[CellOptions]) -> CellHandle:
        """Run a cell in the background and return a handle at once; its output goes to the current notebook cell."""
        options.setdefault("undoable", True)
        return self.cells.run_noblock(code, **options)

    def push(
        self, variables: Mapping[str, Any], *, ranks: str | Iterable[int] | None = None, as_is: bool = False
    ) -> None:
        """Send variables (tensors, arrays, anything that pickles) to the namespace of ranks.

        Args:
            variables: Their values by name.
            ranks: Which, as for `run`.
            as_is: Whether arrays on a GPU of other libraries than torch, such as CuPy's, stay such arrays; else NumPy
                arrays arrive.
        """
        targets = resolve_ranks(ranks, self.world_size)
        transfer.push(self.cells, dict.fromkeys(targets, variables), as_is=as_is)
        self._history.record_push(variables, targets)

    def pull(
        self,
        name: str,
        *,
        ranks: str | int | Iterable[int] | None = None,
        shards: bool = False,
        numpy: bool = False,
        as_is: bool = False,
    ) -> Any:
        """Fetch a variable, or the value of an expression, with its tensors on the CPU.

        Args:
            name: A name or an expression.
            ranks: One rank, or which, as for `run`.
            shards: Whether to return each rank's own part of a distributed tensor, rather than the full tensor.
            numpy: Whether to return tensors as NumPy arrays; otherwise the first tensor loads torch here.
            as_is: Whether arrays on a GPU of other libraries than torch, such as CuPy's, stay such arrays; else NumPy
                arrays arrive, and nothing but NumPy is needed here.

        Returns:
            The values by rank, or the value itself if `ranks` is one number.

        Raises:
            UsageError: a rank does not have it, or it cannot be pickled.
        """
        sources = resolve_ranks([ranks] if isinstance(ranks, int) else ranks, self.world_size)
        values, _ = transfer.pull(self.cells, sources, name, shards=shards, arrays=numpy, as_is=as_is)
        return values[sources[0]] if isinstance(ranks, int) else values

    def scatter(self, variables: Mapping[str, Any], *, ranks: str | Iterable[int] | None = None, dim: int = 0) -> None:
        """Split variables and send each rank its part, in rank order; tensors and arrays are split along `dim`."""
        targets = resolve_ranks(ranks, self.world_size)
        parts = {name: split_value(value, len(targets), dim=dim, name=name) for name, value in variables.items()}
        transfer.push(self.cells, {rank: {n: p[index] for n, p in parts.items()} for index, rank in enumerate(targets)})
        self._history.record_push(variables, targets, scatter_dim=dim)

    def gather(self, name: str, *, ranks: str | Iterable[int] | None = None, dim: int = 0, numpy: bool = False) -> Any:
        """Fetch a variable of each rank as `pull` does, and concatenate the values in rank order.

        Returns:
            Tensors and arrays concatenated along `dim`, tables by rows, lists and tuples end to end. A list of anything
            else. A distributed tensor is already complete and returned as it is.
        """
        sources = resolve_ranks(ranks, self.world_size)
        values, is_full = transfer.pull(self.cells, sources, name, arrays=numpy)
        return values[sources[0]] if is_full else join_values(list(values.values()), dim=dim)

    def repair(
        self,
        ranks: str | Iterable[int] | None = None,
        *,
        from_rank: int | None = None,
        names: Iterable[str] = (),
        host: str | None = None,
    ) -> RepairReport:
        """Replace dead ranks with new ones and rebuild all groups; the other ranks keep their state.

        Args:
            ranks: Which, as for `run`; None: the dead ones. A live one is killed first.
            from_rank: A rank whose variables and random state the replaced ranks get; None: they start empty.
            names: Which variables; empty: all that can be copied.
            host: The host of the cluster on which the new ranks start; None: where the old ones ran.

        Returns:
            What was replaced and copied, and what is lost because only those ranks held it; displays as text.
        """
        targets = None if ranks is None else resolve_ranks(ranks, self.world_size)
        return repair(self.state, targets, source=from_rank, names=list(names), host=host)

    def resize(self, size: int) -> ResizeReport:
        """Change the number of ranks; the lowest ones stay, with all their state, and new ones get rank 0's variables.

        Args:
            size: How many ranks there are afterwards.

        Returns:
            What was carried over, and what was not; displays as text.

        Raises:
            UsageError: that is not possible, or a variable cannot be carried over; nothing has changed.
            StartError: it failed; the message says which world there is.
            CellError: the world has `size` ranks now, but a function registered with `axon_nb.on_resize` failed.
        """
        old = self.world_size
        report = resize(self.state, size)
        self._history.record_resize(session_facts(self.state))
        if report.functions:
            self.cells.run(cell_source(CallResizeFunctions(old, size)))
        return report

    def undo(self, count: int = 1) -> str:
        """Take back the last cells on all their ranks, bit for bit: variables, tensors and random states.

        What cannot be taken back is printed before anything changes. `config undo_memory` bounds what ranks keep.

        Args:
            count: How many cells.

        Returns:
            What was undone, as a sentence.

        Raises:
            UsageError: a rank cannot; nothing has changed.
        """
        report = undo(self.state, count)
        self._history.record_undo(report)
        return report

    def sync(self, from_rank: int = 0, names: Iterable[str] = ()) -> SyncReport:
        """Copy models, optimizers and schedulers of one rank to all others, in place; empty `names`: all of them."""
        return sync(self.cells, from_rank, list(names))

    def seed(self, value: int, *, per_rank: bool = False) -> None:
        """Seed `random`, NumPy and torch (every device) on all ranks.

        Args:
            value: The seed.
            per_rank: Whether each rank's seed is `value` plus its rank.

        Raises:
            UsageError: torch does not accept the seed.
        """
        seed(self.cells, value, per_rank=per_rank)

    def sample(self, ranks: Iterable[int] | None = None) -> dict[int, RankState]:
        """Return what each rank is doing right now; ranks that do not reply within a second are left out."""
        selection = self.ranks if ranks is None else list(ranks)
        return status.request_states(self.client, [rank for rank in selection if rank not in self.health.dead])

    def info(self) -> ClusterInfo:
        """Return everything about the cluster in one record, with the current state of the ranks."""
        return cluster_info(self.state)

    def status(self) -> pd.DataFrame:
        """Return a table with one row per rank: host, pid, device, backend, state, memory in bytes, current cell."""
        return status_frame(self.info())

    def variables(self) -> pd.DataFrame:
        """Return a table of all variables: type, shape, dtype, device, placements, bytes, and whether ranks agree."""
        return variables_frame(self.state)

    def diff(self, name: str, from_rank: int = 0) -> pd.DataFrame:
        """Return a table of where a variable differs from that of `from_rank`; empty if it does not."""
        return difference_frame(self.state, name, from_rank)

    def stacks(self, ranks: str | Iterable[int] | None = None) -> Stacks:
        """Return where each rank is: its Python stack and its communication call, even while it is stuck.

        Args:
            ranks: The same as for `run`.

        Returns:
            The stacks by rank; printed, ranks with the same stack share one entry.
        """
        selection = resolve_ranks(ranks, self.world_size)
        return rank_stacks(self.client, selection, self.ranks, self.health.dead)

    def signal(self, rank: int, number: int = signal.SIGTERM) -> None:
        """Send a signal to one rank's process (forked ranks only)."""
        resolve_ranks([rank], self.world_size)
        self.connection.agent.call(Signal(rank, int(number)))

    def stop(self) -> None:
        """Stop all ranks, the controller and the agent, and remove their files. A second call does nothing."""
        if self.health.disconnect_reason:
            return
        self.health.feed(Lost("was stopped"))
        shut_down_foreign(self.client, self.state.launched, engines=self.engines, num_ranks=self.world_size)
        self.connection.stop()
        self.cells.mark_lost("was stopped")

    def detach(self) -> None:
        """Disconnect; the cluster and its cell keep running for the keep-alive time. `axon_nb.attach` reconnects."""
        self.leave_cells()
        self.health.feed(Lost(LEFT_RUNNING))
        self.connection.close()

    def leave_cells(self) -> None:
        """Stop waiting for the running cells; they continue on the ranks. Call it from any thread."""
        self.cells.mark_lost(LEFT_RUNNING)

    def cancel(self) -> list[int]:
        """Interrupt all running cells, including those in the background; return the ranks that were running one."""
        return self.cells.cancel()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
