"""Runs each cell on a rank: its number, its span, its value, and a reply of bounded size."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from axon_nb.engine.debugger.breakpoints import Breakpoints
from axon_nb.engine.debugger.post_mortem import PostMortem
from axon_nb.engine.groups import recovery
from axon_nb.engine.kernel import subgroup
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.memory_shortage import memory_shortage
from axon_nb.engine.kernel.random_state import RandomDraws
from axon_nb.engine.kernel.shell import describe_exit
from axon_nb.engine.kernel.tracebacks import Tracebacks
from axon_nb.engine.output.budget import OutputBudget
from axon_nb.engine.session import CellFeature, RankSession
from axon_nb.records.protocol.cells import KEY, CellEnd, CellFacts, Measurement
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.spans import Span, emit

FEATURES = {
    "log_to": "axon_nb.engine.trackers:MetricsWriter",
    "protect": "axon_nb.engine.protection.protection:Protection",
    "watch_numbers": "axon_nb.engine.divergence.watch:NumberWatch",
}
"""What surrounds a cell while it is switched on: by the field of `CellFacts` that does so, a `CellFeature`.

Where nothing is switched on, nothing is called, and the modules are not imported."""

_MAX_EVALUE = 16_000
_MAX_TRACEBACK = 200_000
_MAX_VALUES = 16
"""Number of cells whose values are kept until they are fetched; the oldest are dropped first."""
_NOTHING_MEASURED = Measurement()


class CellRunner:
    """Runs cells one after the other, and tracks the running one."""

    def __init__(
        self,
        session: RankSession,
        interrupts: InterruptHandler,
        budget: OutputBudget,
        log: CellLog,
        *,
        tracebacks: Tracebacks,
        post_mortem: PostMortem,
        breakpoints: Breakpoints,
    ) -> None:
        self._session = session
        self._interrupts = interrupts
        self._budget = budget
        self._log = log
        self._tracebacks = tracebacks
        self._post_mortem = post_mortem
        self._breakpoints = breakpoints
        self._values: dict[str, Any] = {}

    async def run(self, metadata: dict[str, Any], execute: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Run one request; the reply says whether there is a value to fetch, and how long the cell took in seconds."""
        session, shell = self._session, self._session.kernel.shell
        request = session.kernel.get_parent("shell")
        facts: CellFacts = decode(CellFacts, metadata.get(KEY, {}))
        message_id, code, cell = request["header"]["msg_id"], request["content"]["code"], facts.cell
        self._log.begin(message_id, facts)
        if cell is not None:
            # Tracebacks then show the notebook's own prompt: "Cell In[12], line 3".
            shell.execution_count = cell
        # IPython looks here for the semicolon that suppresses a value.
        shell.history_manager.input_hist_parsed[-1:] = [code]
        if facts.run in self._interrupts.rejected_runs:
            reply: dict[str, Any] = {"status": "error", "ename": "KeyboardInterrupt", "evalue": "", "traceback": []}
            return self._end(message_id, reply, CellEnd(outputs=self._log.outputs(message_id)))
        if not facts.is_debugger:
            self._post_mortem.discard()
        features = self._begin(facts, code)
        session.cell = cell if cell is not None else 0
        start = time.monotonic_ns()
        calls, draws, measured = recovery.num_calls(), RandomDraws(session.device), dict[str, Any]()
        self._interrupts.begin_cell(facts.run)
        is_ok = False
        try:
            reply = await self._execute(facts, execute, measured)
            is_ok = reply["status"] == "ok"
        except BaseException as error:
            self._log.end(message_id, {"status": "error", "ename": type(error).__name__, "evalue": str(error)})
            raise
        finally:
            self._tracebacks.restore_error(shell)
            session.groups.calls.end_exclusive()
            self._interrupts.end_cell()
            session.steps.end_cell()
            end = time.monotonic_ns()
            session.cell = None
            for feature in features:
                feature.end_cell(is_ok=is_ok)
            self._budget.end()
            slowed = f"slowed: {facts.slowness}" if facts.slowness else ""
            emit(Span(session.config.rank, "cell", f"In [{cell}]", start, end, slowed))
        aborted_at = self._tracebacks.end_cell(reply)
        value = getattr(getattr(shell, "last_execution_result", None), "result", None)
        has_value = is_ok and value is not None
        if has_value and facts.token is not None:
            self._keep_value(facts.token, value)
        communicated = recovery.num_calls() - calls
        end_report = CellEnd(
            seconds=(end - start) / 1e9,
            calls=max(0, communicated),
            aborted_at=aborted_at,
            has_value=has_value,
            draws=draws.report(shell) if communicated > 0 else None,
            threads=() if is_ok else session.groups.calls.calling_threads(),
            left=session.groups.calls.left(),
            shortage=None if is_ok else memory_shortage(session, reply["ename"], reply["evalue"]),
            outputs=self._log.outputs(message_id),
            **(measured if is_ok else {}),
        )
        describe_exit(reply, shell)
        if not is_ok:
            self._post_mortem.release(
                shell,
                was_aborted=aborted_at is not None,
                keep_text=reply["evalue"] if facts.keep_failure else None,
            )
        return self._end(message_id, _limit_reply(reply), end_report)

    def _end(self, message_id: str, reply: dict[str, Any], report: CellEnd) -> dict[str, Any]:
        reply[KEY] = encode(report)
        self._log.end(message_id, reply)
        return reply

    async def _execute(
        self, facts: CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], measured: dict[str, Any]
    ) -> dict[str, Any]:
        self._breakpoints.begin_cell(facts)
        slowdown = self._session.groups.slowdown
        is_slowed = bool(facts.slowness)
        if is_slowed:
            slowdown.begin_cell(facts.slowness, self._session.config.rank)
        try:
            if (refusal := self._prepare(facts)) is not None:
                return refusal
            cpu = time.process_time()
            if facts.measurement == _NOTHING_MEASURED:
                reply = await execute()
                measured["cpu_seconds"] = time.process_time() - cpu
                return reply
            from axon_nb.engine.kernel.measure import run_measured

            return await run_measured(self._session, facts, execute, measured)
        finally:
            if is_slowed:
                slowdown.end_cell()
            self._breakpoints.end_cell()

    def _begin(self, facts: CellFacts, code: str) -> Sequence[CellFeature]:
        """Prepare for a cell; return what else surrounds it."""
        session = self._session
        if facts.undo_memory is not None:
            session.snapshots.before_cell(facts.run, facts.cell or 0, facts.ranks, facts.undo_memory, code)
        session.groups.calls.begin_cell()
        session.steps.begin_cell()
        self._budget.begin(facts.output_limit)
        if not facts.run:  # of another client
            return ()
        wanted = {kind for name, kind in FEATURES.items() if getattr(facts, name)}
        if not wanted and not session.parts:
            return ()
        kinds = [kind for kind in FEATURES.values() if kind in wanted or session.is_on(kind)]
        features: list[CellFeature] = [session.part(kind) for kind in kinds]
        for feature in features:
            feature.begin_cell(facts)
        return features

    def _prepare(self, facts: CellFacts) -> dict[str, Any] | None:
        """Set up before the cell's own code runs; return an error reply if that fails."""
        self._session.groups.begin_run(facts.run)
        try:
            subgroup.bind(self._session, facts.ranks, wanted=facts.subgroup)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": [text]}
        self._session.groups.calls.begin_exclusive(facts.ranks if facts.exclusive else None)
        return None

    def _keep_value(self, token: str, value: Any) -> None:
        self._values[token] = value
        while len(self._values) > _MAX_VALUES:
            self._values.pop(next(iter(self._values)))

    def take_value(self, token: str) -> Any:
        """Remove and return the value of the last expression of the cell with this token."""
        return self._values.pop(token, None)


def _limit_reply(reply: dict[str, Any]) -> dict[str, Any]:
    if reply["status"] != "error":
        return reply
    reply["evalue"] = _shorten(reply.get("evalue", ""), _MAX_EVALUE)
    lines, room = [], _MAX_TRACEBACK
    for line in reply.get("traceback", []):
        lines.append(_shorten(line, max(room, 200)))
        room -= len(line)
    reply["traceback"] = lines
    return reply


def _shorten(text: str, limit: int) -> str:
    return (
        text
        if len(text) <= limit
        else f"{text[: limit // 2]} … {len(text) - limit:,} characters … {text[-limit // 2 :]}"
    )
