"""The cells of one cluster: start them, run them side by side, and turn their failures into exceptions."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from axon_nb.cluster import failures
from axon_nb.cluster.cells import source as cell_code
from axon_nb.cluster.cells.abort import AbortController, DeadlockWatch
from axon_nb.cluster.cells.driver import CellHandle, run_to_completion, run_to_completion_async, stop_for
from axon_nb.cluster.cells.kernel_interrupts import KernelInterrupts
from axon_nb.cluster.cells.options import CellOptions
from axon_nb.cluster.cells.result import CellResult, cell_record, last_values
from axon_nb.cluster.cells.run import CellRun
from axon_nb.cluster.divergence import DivergenceWatch, sampler_hint
from axon_nb.cluster.launch.compatibility import after_failure, collective_timeout
from axon_nb.cluster.output import CellOutput, NotebookSink, RecordingSink
from axon_nb.cluster.output.sinks import WaitNotice
from axon_nb.cluster.ranks.transitions import ContextsLost, Disabled
from axon_nb.cluster.recovery.new_ranks import kept_of
from axon_nb.cluster.recovery.repair import AgentWatch, Recovery, auto_repair, rebuild_if_back, replace_stuck
from axon_nb.cluster.rpc import request_all
from axon_nb.cluster.settings import Settings
from axon_nb.cluster.snapshot import Trials
from axon_nb.cluster.state import ClusterState
from axon_nb.errors import CellError, CellInterrupt, ClusterLostError, UsageError
from axon_nb.records.environment import OUTPUT_AT_END
from axon_nb.records.protocol.cells import CellFacts
from axon_nb.records.protocol.inspection import WaitsRequest
from axon_nb.records.protocol.recovery import Pause, Resume
from axon_nb.records.protocol.wire import cell_source
from axon_nb.records.ranks import name_ranks, resolve_ranks
from axon_nb.records.units import format_bytes

_DEFAULTS = CellFacts()
_TIMEOUT_S = 2.0
"""Idle ranks reply in milliseconds, unless the machine is busy."""
_ENDING_POLL_S = 0.005
_ENDING_LIMIT_S = 5.0
"""A rank in C code may not let a cell end: after this long, the next one is sent anyway, and queued."""
LEFT_RUNNING = "was left running"
"""Why this notebook no longer has a cluster that keeps running without it."""
_ATTACH_HINT = "Run `%distributed attach` to reconnect to both."
_START_HINT = "Run `%distributed start` to start a new one."


def failure_of(
    run: CellRun, replaced: Sequence[str], kept: failures.Kept, missing: Callable[[], str]
) -> BaseException | None:
    """Return the exception that a finished cell raises in the notebook; None if it did not fail.

    Args:
        run: The cell.
        replaced: Lines about ranks that had to be replaced to abort it.
        kept: What is kept of ranks that died, and how to replace them.
        missing: Says which module only the notebook's host has.
    """
    if run.interrupted_at is not None:
        return failures.interrupt_error(run.errors, run.ranks, replaced)
    if not run.errors and not run.explanation:
        return None
    threads = [name for end in run.cell.ends.values() for name in end.threads]
    hints = (
        failures.hint_for(run.errors.values(), remedy=kept.remedy, threads=threads),
        failures.shortage_hint(run.cell.ends),
        missing(),
    )
    return failures.cell_error(
        run.errors,
        first=run.cell.failed,
        explanation=run.explanation,
        hint=failures.context_hint(run.errors) or " ".join(filter(None, hints)),
        timeout_s=run.timeout_s if run.cell.timed_out else None,
        kept=kept,
    )


def is_exclusive(state: ClusterState, run: CellRun) -> bool:
    """Whether a blocking cell of some ranks, about to be sent, is the only one that can communicate until it is done.

    False if another cell may legitimately communicate with it: one runs in the background on other ranks, or a rank
    outside has a pending call or a thread that runs user code. False in doubt.
    """
    outside = [rank for rank in state.ranks if rank not in run.ranks]
    others = [cell for cell in list(state.active_cells) if cell is not run]
    if not outside or state.backend == "nccl" or any(other.unfinished for other in others):
        return False
    live = [rank for rank in outside if rank not in state.health.dead]
    replies = request_all(state.connection.client, live, WaitsRequest(), timeout_s=_TIMEOUT_S)
    if set(replies) != set(live):
        return False
    reports = [reply.waits for reply in replies.values()]
    return not any(waits.pending or waits.threads or waits.running for waits in reports)


class CellManager:
    """Sends cells to the ranks of one cluster, and runs each to completion.

    Args:
        state: The cluster.
        settings: The settings of the notebook.
        interrupts: The interrupts of the notebook's kernel.
    """

    def __init__(self, state: ClusterState, settings: Settings, interrupts: KernelInterrupts) -> None:
        self.state = state
        self.settings = settings
        self._interrupts = interrupts
        self.last_run: str | None = None
        """Id of the run of the last cell of this notebook; None: there was none."""
        self.last_record: dict[str, Any] | None = None
        """The result for programs of the last cell that is done; None: there was none."""
        self._numbers = itertools.count(1)
        self._runs, self._suffix = itertools.count(random.getrandbits(32)), uuid.uuid4().hex
        self._output_at_end = OUTPUT_AT_END.is_enabled()
        self._lock = threading.Lock()

    def run(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """See `Cluster.run`."""
        with self._interrupts.capture() as interrupts:
            run = self._start(code, options)
            return run_to_completion(run, interrupts, lambda: self.finish(run, options))

    async def run_async(self, code: str, **options: Unpack[CellOptions]) -> CellResult:
        """See `Cluster.run_async`."""
        with self._interrupts.capture(awaited=True) as interrupts:
            run = self._start(code, options)
            return await run_to_completion_async(run, interrupts, lambda: self.finish(run, options))

    def run_noblock(self, code: str, **options: Unpack[CellOptions]) -> CellHandle:
        """See `Cluster.run_noblock`."""
        with self._interrupts.capture() as interrupts:
            run = self._start(code, options)
            interrupts.forward_to(run.interrupt)
            return CellHandle(run, lambda: self.finish(run, options))

    def cancel(self) -> list[int]:
        """Interrupt all running cells, including those in the background; return the ranks that were running one."""
        ranks = self.state.busy
        for run in list(self.state.active_cells):
            run.interrupt()
        return ranks

    def pause(self) -> str:
        """Give back what torch and NCCL keep for later on GPUs, NCCL until the next cell; return what is free then.

        Raises:
            UsageError: no rank computes on a GPU, or a cell is running.
        """
        state = self.state
        if not any(info.device.startswith("cuda") for info in state.rank_info):
            raise UsageError("%distributed pause gives back memory of GPUs, and these ranks compute on CPUs.")
        state.raise_if_busy("wait for it or interrupt it, then pause")
        try:
            free = self.run(cell_source(Pause()), quiet=True).values
        finally:
            state.is_paused = state.backend == "nccl"
        lines = [
            f"Free on the GPU of rank {rank}: {format_bytes(after)}, and {format_bytes(before)} before."
            for rank, (before, after, _) in free.items()
        ]
        if kept := next((why for _, _, why in free.values() if why), ""):
            lines.append(f"NCCL keeps its own memory, as it takes torch 2.13 and NCCL 2.29.7 to give it back: {kept}.")
        return "\n".join(lines)

    def _resume(self) -> None:
        state, health = self.state, self.state.health
        state.is_paused = False
        if health.world.missing:  # a repair makes new connections
            return
        try:
            self.run(cell_source(Resume()), quiet=True)
        except CellError:
            health.feed(Disabled("NCCL could not take its memory again", until_back=True))
            raise

    def mark_lost(self, reason: str) -> None:
        """Stop waiting for the running cells because the cluster is gone for this `reason`. Call it from any thread."""
        for run in list(self.state.active_cells):
            run.on_lost(reason)

    def _start(self, code: str, options: CellOptions) -> CellRun:
        """Send a cell. The caller steps it until it is done; `finish` then returns its result."""
        state = self.state
        timeout, cell = options.get("timeout"), options.get("cell")
        cell_code.check(code, name="cell" if cell is None else f"Cell In[{cell}]")
        ranks = resolve_ranks(options.get("ranks"), state.world_size)
        rebuild_if_back(state)
        if self.settings.auto_repair:
            auto_repair(state)
        if state.is_paused:
            self._resume()
        state.health.ensure_available(ranks)
        if state.connection.folder is not None:
            state.connection.folder.update()
        if timeout is not None and timeout <= 0:
            raise UsageError(f"timeout must be a number of seconds above 0; got {timeout:g}.")
        self._wait_for_ending(ranks)
        ahead = [other for other in self._active() if not {*ranks}.isdisjoint(other.unfinished)]
        if trials := options.get("restores"):
            options["restores"] = trials = Trials(state, ranks, self.settings.undo_memory) if trials is True else trials
            trials.begin()
        run = self.new_run(ranks, options)
        try:
            self._send(run, code, options, ahead)
        except BaseException as error:
            if run.abort.run is None:  # nothing was sent
                self._remove(run)
            else:
                stop_for(error, run, lambda: self.finish(run, options))
            raise
        return run

    def _wait_for_ending(self, ranks: Sequence[int]) -> None:
        """Wait for cells on these ranks that another thread ends: an abort would take along what is sent now."""
        me, limit = threading.current_thread(), time.monotonic() + _ENDING_LIMIT_S

        def is_in_the_way(run: CellRun) -> bool:
            stepper = run.stepper
            is_stepped = stepper is not None and stepper is not me and stepper.is_alive()
            return is_stepped and run.is_ending and not {*ranks}.isdisjoint(run.ranks)

        while any(map(is_in_the_way, self._active())) and time.monotonic() < limit:
            time.sleep(_ENDING_POLL_S)

    def _active(self) -> list[CellRun]:
        return [run for run in list(self.state.active_cells) if isinstance(run, CellRun)]

    def _send(self, run: CellRun, code: str, options: CellOptions, ahead: Sequence[CellRun]) -> None:
        state, ranks, quiet, cell = self.state, run.ranks, options.get("quiet", False), options.get("cell")
        self.add(run)
        if not quiet and (note := self._interrupts.subshell_note()):
            print(note)
        if not quiet and cell_code.DEPRECATED.search(code):
            for line in cell_code.deprecations(code):
                print(line, file=sys.stderr)
        if ahead and not quiet:
            busy = sorted({rank for other in ahead for rank in other.unfinished if rank in ranks})
            print(f"Queued behind the cell that is running on {name_ranks(busy)}.")
        exclusive = options.get("exclusive", False) and is_exclusive(state, run)
        number = cell if cell is not None else next(self._numbers)
        is_debugger = options.get("is_debugger", False)
        is_undoable = options.get("undoable", False) and not options.get("restores")
        facts = CellFacts(
            cell=number,
            token=run.token if options.get("values", True) else None,
            exclusive=exclusive,
            keep_failure=self.settings.debug and not is_debugger,
            is_debugger=is_debugger,
            pauses=options.get("pauses", _DEFAULTS.pauses),
            output_limit=state.settings.output_limit,
            measurement=options.get("measurement", _DEFAULTS.measurement),
            log_to=self.settings.log_to,
            undo_memory=self.settings.undo_memory if is_undoable else None,
            protect=self.settings.protect if is_undoable else None,
            slowness=state.slowness if options.get("undoable", False) else _DEFAULTS.slowness,
            watch_numbers=self.settings.watch_numbers if options.get("undoable", False) else "",
            behind=tuple(other.token for other in ahead),
        )
        if mode := facts.watch_numbers:
            run.abort.numbers = DivergenceWatch(state.client, run.token, ranks, stops=mode == "stop", quiet=quiet)
            run.abort.numbers.can_undo = bool(facts.undo_memory)
        if facts.slowness and not quiet:
            print(f"Slowed: {facts.slowness}. `%distributed slow off` ends it.")
        run.send(code, facts)
        if not run.is_call:
            self.last_run = run.token
        state.health.report_to(run)  # what has happened while we were sending

    def new_run(self, ranks: list[int], options: CellOptions) -> CellRun:
        """Create the run of a cell that the caller adds, and sends or reattaches to."""
        quiet = options.get("quiet", False)
        sink = RecordingSink() if quiet else NotebookSink()
        run = CellRun(
            self.state.client,
            ranks,
            CellOutput(
                ranks, sink, quiet=quiet, limit_bytes=self.state.settings.output_limit, at_end=self._output_at_end
            ),
            self._abort_controller(ranks),
            timeout_s=options.get("timeout"),
            view=options.get("view"),
            show_value=options.get("show_value", False),
            recover=lambda: self.recovery(run),
            notice=None if quiet else WaitNotice(sink),
            debugger=options.get("debugger"),
            token=f"{next(self._runs) & 0xFFFFFFFF:08x}{self._suffix}",
        )
        run.on_late_output = self.state.between_cells.feed
        if not quiet:
            self.state.between_cells.show(sink)
        return run

    def add(self, run: CellRun) -> None:
        """Count a cell as running, until `finish`."""
        with self._lock:
            self.state.active_cells.append(run)
        run.on_long = self.state.report_activity

    def _abort_controller(self, ranks: Sequence[int]) -> AbortController:
        state = self.state
        watch = DeadlockWatch(state.client, state.live_ranks, ranks, dead=lambda: state.health.dead)
        # A cut needs Python in each operation, which NCCL's do not have.
        can_cut = state.backend != "nccl" and ranks == state.ranks
        stopped = AgentWatch(state.connection.agent).stopped
        return AbortController(state.client, ranks, watch=watch, can_cut=can_cut, stopped=stopped)

    def recovery(self, aborted: CellRun | None = None) -> Recovery:
        """Create the recovery that rebuilds all groups; the caller steps it until it is done.

        Args:
            aborted: The cell after which it is needed; None: a notebook that is gone left one half-way.
        """
        state = self.state
        for run in state.active_cells:
            state.health.track_stuck(run)
        timeout_s = collective_timeout(state.settings, recoverable=False)
        if note := after_failure(state.rank_info, state.backend, timeout_s=timeout_s):
            print(note, file=sys.stderr)
        if state.backend == "nccl":
            state.health.warn_nccl_untested()
            lost = failures.lost_contexts(aborted.errors) if aborted is not None else []
            state.health.feed(ContextsLost(tuple(lost)))
        return Recovery(state, lambda: aborted is not None and aborted.interrupted_at is not None)

    def finish(self, run: CellRun, options: CellOptions) -> CellResult:
        """Return the result of a cell that is done; raises as `run` does."""
        try:
            return self._finish(run, options)
        finally:
            if isinstance(trials := options.get("restores"), Trials) and not run.cell.lost:
                trials.end()

    def _missing_module(self, run: CellRun) -> str:
        state = self.state
        if not state.hosts or not any(error.ename == "ModuleNotFoundError" for error in run.errors.values()):
            return ""
        from axon_nb.cluster.launch.folder_sync import missing_on_host

        hosts = {rank: host for rank in run.ranks if (host := state.layout.host_of(rank))}
        return missing_on_host(run.errors.values(), hosts, state.connection.folder)

    def _remove(self, run: CellRun) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self.state.active_cells.remove(run)
        self.state.report_activity()

    def _finish(self, run: CellRun, options: CellOptions) -> CellResult:
        state = self.state
        run.finish()
        self._remove(run)
        if run.cell.lost:
            hint = _ATTACH_HINT if run.cell.lost == LEFT_RUNNING else _START_HINT
            # The loss of ranks that were gone before the cell is noticed late.
            ran = any(progress.processed_at or progress.end for progress in run.cell.ranks.values())
            when = "while the cell was running" if ran else "before the cell ended"
            raise ClusterLostError(f"The cluster {state.name!r} {run.cell.lost} {when}. {hint}")
        state.health.track_stuck(run)
        replaced = replace_stuck(state, run.cell.to_replace)
        for hint in filter(
            None, (failures.left_calls_hint(run.cell.ends), failures.different_inputs_hint(run.cell.ends))
        ):
            print(hint, file=sys.stderr)
        numbers = run.abort.judge_numbers(failed=any(error.kind == "raised" for error in run.errors.values()))
        kept = kept_of(state, self.settings.protect, run.errors.values())
        failure = failure_of(run, replaced, kept, lambda: self._missing_module(run))
        record = cell_record(run, failure)
        if not run.is_call:
            self.last_record = record
        if isinstance(failure, CellError | CellInterrupt):
            failure.record = record
        if failure is not None and (options.get("check", True) or isinstance(failure, KeyboardInterrupt)):
            raise failure
        wanted, ends = options.get("values", True), run.cell.ends
        with_value = [rank for rank, end in ends.items() if wanted and end.has_value]
        fetched = last_values(state, with_value, run.token)
        if not options.get("quiet", False):
            state.health.hint("draws", failures.shared_draws_hint(ends, run.ranks))
            state.health.hint("samplers", sampler_hint(ends))
        text = {rank: run.output.text(rank) for rank in run.ranks}
        return CellResult(
            fetched,
            run.errors,
            run.cell.seconds,
            text,
            cpu_seconds={rank: end.cpu_seconds for rank, end in ends.items() if end.cpu_seconds is not None},
            repetitions={rank: end.repetitions for rank, end in ends.items() if end.repetitions is not None},
            profiles={rank: end.profile for rank, end in ends.items() if end.profile is not None},
            numbers=numbers,
            record=record,
        )
