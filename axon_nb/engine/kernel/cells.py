"""Runs each cell on a rank: its number, its span, its value, and a reply of bounded size."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from axon_nb.engine.debugger.breakpoints import Breakpoints
from axon_nb.engine.debugger.post_mortem import PostMortem
from axon_nb.engine.groups import recovery
from axon_nb.engine.kernel import subgroup
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.measure import Measured, run_measured
from axon_nb.engine.kernel.memory_shortage import memory_shortage
from axon_nb.engine.kernel.random_state import RandomDraws
from axon_nb.engine.kernel.shell import describe_exit
from axon_nb.engine.kernel.tracebacks import Tracebacks
from axon_nb.engine.output.budget import OutputBudget
from axon_nb.engine.session import RankSession
from axon_nb.engine.trackers import MetricsWriter
from axon_nb.records.protocol.cells import KEY, CellEnd, CellFacts
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.spans import Span, emit

__all__ = ["CellRunner"]

_MAX_EVALUE = 16_000
_MAX_TRACEBACK = 200_000
_NOT_STARTED = {KEY: encode(CellEnd())}
_MAX_VALUES = 16
"""Number of cells whose values are kept until they are fetched; the oldest are dropped first."""


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
        self._metrics = MetricsWriter(session.config.rank)
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
            reply: dict[str, Any] = {
                "status": "error",
                "ename": "KeyboardInterrupt",
                "evalue": "",
                "traceback": [],
                **_NOT_STARTED,
            }
            self._log.end(message_id, reply)
            return reply
        if not facts.is_debugger:
            self._post_mortem.discard()
        self._begin(facts, code)
        session.cell = cell if cell is not None else 0
        start = time.monotonic_ns()
        calls, draws, measured = recovery.num_calls(), RandomDraws(session.device), Measured()
        self._interrupts.begin_cell(facts.run)
        try:
            reply = await self._execute(facts, execute, measured)
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
            self._metrics.end_cell()
            self._budget.end()
            slowed = f"slowed: {facts.slowness}" if facts.slowness else ""
            emit(Span(session.config.rank, "cell", f"In [{cell}]", start, end, slowed))
        aborted_at = self._tracebacks.end_cell(reply)
        value = getattr(getattr(shell, "last_execution_result", None), "result", None)
        has_value = reply["status"] == "ok" and value is not None
        if has_value and facts.token is not None:
            self._keep_value(facts.token, value)
        is_ok = reply["status"] == "ok"
        for kept in (session.protection, session.numbers):
            kept.end_cell(is_ok=is_ok)
        end_report = CellEnd(
            seconds=(end - start) / 1e9,
            calls=max(0, recovery.num_calls() - calls),
            aborted_at=aborted_at,
            has_value=has_value,
            draws=draws.report(shell) if recovery.num_calls() > calls else None,
            cpu_seconds=measured.cpu_seconds if is_ok else None,
            repetitions=measured.repetitions if is_ok else None,
            profile=measured.profile if is_ok else None,
            threads=() if is_ok else session.groups.calls.calling_threads(),
            left=session.groups.calls.left(),
            shortage=None if is_ok else memory_shortage(session, reply["ename"], reply["evalue"]),
        )
        reply[KEY] = encode(end_report)
        describe_exit(reply, shell)
        if not is_ok:
            self._post_mortem.release(
                shell,
                was_aborted=aborted_at is not None,
                keep_text=reply["evalue"] if facts.keep_failure else None,
            )
        reply = _limit_reply(reply)
        self._log.end(message_id, reply)
        return reply

    async def _execute(
        self, facts: CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], measured: Measured
    ) -> dict[str, Any]:
        slowdown = self._session.groups.slowdown
        self._breakpoints.begin_cell(facts)
        slowdown.begin_cell(facts.slowness, facts.delays, self._session.config.rank)
        try:
            return self._prepare(facts) or await run_measured(self._session, facts, execute, measured)
        finally:
            slowdown.end_cell()
            self._breakpoints.end_cell()

    def _begin(self, facts: CellFacts, code: str) -> None:
        session = self._session
        if facts.undo_memory is not None:
            session.snapshots.before_cell(facts.run, facts.cell or 0, facts.ranks, facts.undo_memory, code)
        if facts.log_to is not None:
            self._metrics.begin_cell(facts.log_to)
        session.groups.calls.begin_cell()
        session.steps.begin_cell()
        self._budget.begin(facts.output_limit)
        session.protection.begin_cell(facts.run, facts.ranks, facts.protect)
        session.numbers.begin_cell(facts.run, facts.watch_numbers)

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
