"""The cells of one cluster: begun, run side by side, ended.

How a cell that is over has failed, as the exception that the notebook raises.

Whether the ranks outside a cell can have any part in its communication.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Sequence
from typing import Unpack

from axon_nb.cluster.cells import kernel_interrupts
from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.cells.abort import Ending
from axon_nb.cluster.cells.deadlock import DeadlockWatch
from axon_nb.cluster.cells.driver import CellHandle, drive, drive_blocking
from axon_nb.cluster.cells.options import CellOptions
from axon_nb.cluster.cells.result import CellResult, measured
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.cells.values import last_values
from axon_nb.cluster.failures.hints import context_hint, hint_for, lost_contexts, shared_draws
from axon_nb.cluster.failures.report import cell_error, interrupt_error
from axon_nb.cluster.launch.compatibility import after_failure, collective_timeout
from axon_nb.cluster.output import CellOutput, NotebookSink, RecordingSink
from axon_nb.cluster.output.wait_notice import WaitNotice
from axon_nb.cluster.recovery.recovery import Recovery
from axon_nb.cluster.recovery.repair import auto_repair, replace_stuck
from axon_nb.cluster.rpc.requests import ask
from axon_nb.cluster.settings import settings as process_settings
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import ClusterLostError, UsageError
from axon_nb.records.protocol.cells import CellFacts, Measurement
from axon_nb.records.protocol.inspection import WaitsRequest
from axon_nb.records.ranks import format_ranks, resolve_ranks

__all__ = ["LEFT", "CellManager", "failure_of", "nobody_else"]


def failure_of(run: CellRun, replaced: Sequence[str], *, way_back: str) -> BaseException | None:
    """The exception; None when the cell did not fail.

    Args:
        run: The cell.
        replaced: What was told of ranks that had to be replaced to end it.
        way_back: What gives a dead or stuck rank back, as a sentence.
    """
    if run.interrupted_at is not None:
        return interrupt_error(run.errors, run.ranks, replaced)
    if not run.errors and not run.explanation:
        return None
    return cell_error(
        run.errors,
        first=run.failed_order,
        explanation=run.explanation,
        hint=context_hint(run.errors) or hint_for(run.errors.values(), way_back=way_back),
        timeout_s=run.timeout_s if run.timed_out else None,
    )


_LIMIT_S = 2.0
"""Ranks that run nothing answer in milliseconds, unless the machine is busy."""


def nobody_else(state: ClusterState, run: CellRun) -> bool:
    """Whether a blocking cell of some ranks, about to be sent, is the only one that can communicate until it is over.

    Never said of a cell that another may legitimately meet: not while one runs in the background on other ranks, nor
    when a rank outside has begun a call that it has not waited for, or has a thread of the user's. In doubt: no.
    """
    outside = [rank for rank in state.ranks if rank not in run.ranks]
    others = [cell for cell in list(state.active_cells) if cell is not run]
    if not outside or state.backend != "gloo" or any(other.unfinished for other in others):
        return False
    living = [rank for rank in outside if rank not in state.health.dead]
    answers = ask(state.connection.client, living, WaitsRequest(), limit_s=_LIMIT_S)
    if set(answers) != set(living):
        return False
    seen = [answer.waits for answer in answers.values()]
    return not any(waits.pending or waits.threads or waits.running for waits in seen)


LEFT = "was left running"
"""Why there is no cluster any more, when it goes on without this notebook."""
_BACK = "`%distributed attach` gets both back"
_AFRESH = "`%distributed start` starts a new one"


class CellManager:
    """Sends cells to the ranks of one cluster, and brings each to its end.

    Args:
        state: The cluster.
    """

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """See `Cluster.run`."""
        with kernel_interrupts.caught() as pressed:
            run = self._begin(code, options)
            drive_blocking(run, pressed)
            return self.end(run, options)

    async def run_async(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """See `Cluster.run_async`."""
        with kernel_interrupts.caught() as pressed:
            run = self._begin(code, options)
            await drive(run, pressed)
            return self.end(run, options)

    def run_noblock(self, code: str, **options: Unpack[CellOptions]) -> CellHandle:
        """See `Cluster.run_noblock`."""
        with kernel_interrupts.caught() as pressed:
            run = self._begin(code, options)
            pressed.hand_to(run.interrupt)
            return CellHandle(run, lambda: self.end(run, options))

    def cancel(self) -> list[int]:
        """Interrupt every cell that runs, those in the background too; returns the ranks that ran one."""
        ranks = self.state.busy
        for run in list(self.state.active_cells):
            run.interrupt()
        return ranks

    def lose(self, reason: str) -> None:
        """Wait no longer for the cells that run, because the cluster is gone for this `reason`. From any thread."""
        for run in list(self.state.active_cells):
            run.on_lost(reason)

    def _begin(self, code: str, options: CellOptions) -> CellRun:
        """Send a cell; it is to be stepped to its end, and `end` gives its result."""
        state = self.state
        quiet, timeout, cell = options.get("quiet", False), options.get("timeout"), options.get("cell")
        cell_code.check(code, name="cell" if cell is None else f"Cell In[{cell}]")
        chosen = resolve_ranks(options.get("ranks"), state.world_size)
        if process_settings.auto_repair:
            auto_repair(state)
        state.health.refuse(chosen)
        if timeout is not None and timeout <= 0:
            raise UsageError(f"timeout {timeout:g}: it is a number of seconds above 0.")
        ahead = [rank for other in list(state.active_cells) for rank in other.unfinished if rank in chosen]
        run = self.new_run(chosen, options)
        if ahead and not quiet:
            print(f"Queued behind the cell that still runs on ranks {format_ranks(ahead)}.")
        alone = options.get("alone", False) and nobody_else(state, run)
        number = cell if cell is not None else next(self._numbers)
        is_debugger = options.get("is_debugger", False)
        facts = CellFacts(
            cell=number,
            token=run.token if options.get("values", True) else None,
            alone=alone,
            keep_failure=process_settings.debug and not is_debugger,
            is_debugger=is_debugger,
            output_limit=state.settings.output_limit,
            measurement=options.get("measurement", Measurement()),
        )
        run.send(code, facts)
        state.health.tell(run)  # what has happened while we were sending
        return run

    def new_run(self, chosen: list[int], options: CellOptions) -> CellRun:
        """A cell that is still to be sent, or adopted; it counts as running until `end`."""
        quiet = options.get("quiet", False)
        sink = RecordingSink() if quiet else NotebookSink()
        run = CellRun(
            self.state.client,
            chosen,
            CellOutput(chosen, sink, quiet=quiet, limit_bytes=self.state.settings.output_limit),
            self._ending(chosen),
            timeout_s=options.get("timeout"),
            view=options.get("view"),
            show_value=options.get("show_value", False),
            recover=lambda: self.recovery(run),
            notice=None if quiet else WaitNotice(sink),
        )
        with self._lock:
            self.state.active_cells.append(run)
        return run

    def _ending(self, chosen: Sequence[int]) -> Ending:
        state = self.state
        watch = DeadlockWatch(state.client, state.living, chosen, dead=state.health.dead)
        # A cut needs Python in each operation, which NCCL's do not have.
        return Ending(state.client, chosen, watch=watch, cuttable=state.backend == "gloo" and chosen == state.ranks)

    def recovery(self, ended: CellRun | None = None) -> Recovery:
        """The forming anew of all groups, to be stepped to its end.

        Args:
            ended: The cell after which it is needed; None: it was left half-way by a notebook that is gone.
        """
        state = self.state
        for run in state.active_cells:
            state.health.follow_stuck(run)
        limit_s = collective_timeout(state.settings, recoverable=False)
        if note := after_failure(state.places, state.backend, timeout_s=limit_s):
            print(note, file=sys.stderr)
        if state.backend == "nccl":
            state.health.tell_unproven()
            state.health.lost.update(lost_contexts(ended.errors) if ended is not None else [])
        return Recovery(state.client, state.ranks, state.health, patient=state.backend == "nccl")

    def end(self, run: CellRun, options: CellOptions) -> CellResult:
        """The result of a cell that has been stepped to its end; raises as `run` does."""
        state = self.state
        run.finish()
        with self._lock, contextlib.suppress(ValueError):
            state.active_cells.remove(run)
        if run.lost:
            way_back = _BACK if run.lost == LEFT else _AFRESH
            raise ClusterLostError(f"The cluster {state.name!r} {run.lost} while the cell ran: {way_back}.")
        state.health.follow_stuck(run)
        replaced = replace_stuck(state, run.to_replace)
        failure = failure_of(run, replaced, way_back=state.health.way_back)
        if failure is not None and (options.get("check", True) or isinstance(failure, KeyboardInterrupt)):
            raise failure
        with_value = run.ranks_with_value if options.get("values", True) else []
        fetched = last_values(state, with_value, run.token)
        if not options.get("quiet", False):
            state.health.hint("draws", shared_draws(run.told, run.ranks))
        text = {rank: run.output.text(rank) for rank in run.ranks}
        return CellResult(fetched, run.errors, run.seconds, text, **measured(run.told))
