"""Around each cell on a rank: its number, its span, its value, and a reply of bounded size."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from axon_nb.engine.groups import activity, subgroup
from axon_nb.engine.groups import activity as membership
from axon_nb.engine.groups.size_check import cell_begins
from axon_nb.engine.kernel import post_mortem, streams
from axon_nb.engine.kernel.cell_log import CellLog
from axon_nb.engine.kernel.interrupts import Interrupts
from axon_nb.engine.kernel.measure import Measured, measured
from axon_nb.engine.kernel.post_mortem import release_failure
from axon_nb.engine.kernel.random_state import Draws
from axon_nb.engine.kernel.shell import tell_exit
from axon_nb.engine.kernel.streams import OutputBudget
from axon_nb.engine.kernel.tracebacks import take_place
from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.cells import KEY, CellEnd, CellFacts
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.spans import Span, emit

__all__ = ["CellRunner"]

_MAX_EVALUE = 16_000
_MAX_TRACEBACK = 200_000
_NEVER_BEGAN = {KEY: encode(CellEnd())}
_MAX_VALUES = 16
"""Values that nobody has fetched are kept for the last so many cells that asked for it."""


class CellRunner:
    """Runs one cell after the other; knows which one runs."""

    def __init__(self, session: RankSession, interrupts: Interrupts, budget: OutputBudget, log: CellLog) -> None:
        self._session = session
        self._interrupts = interrupts
        self._budget = budget
        self._log = log
        self._values: dict[str, Any] = {}

    async def run(self, metadata: dict[str, Any], execute: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Run one request; the reply tells whether there is a value to fetch, and how long it took in seconds."""
        session, shell = self._session, self._session.kernel.shell
        request = session.kernel.get_parent("shell")
        facts: CellFacts = decode(CellFacts, metadata.get(KEY, {}))
        message_id, code = request["header"]["msg_id"], request["content"]["code"]
        self._log.begin(message_id, facts)
        cell = facts.cell
        if cell is not None:
            # Tracebacks then name the notebook's own prompt: "Cell In[12], line 3".
            shell.execution_count = cell
        # IPython looks here for the semicolon that keeps a value from being shown.
        shell.history_manager.input_hist_parsed[-1:] = [code]
        if facts.run in self._interrupts.refused:
            reply: dict[str, Any] = {
                "status": "error",
                "ename": "KeyboardInterrupt",
                "evalue": "",
                "traceback": [],
                **_NEVER_BEGAN,
            }
            self._log.end(message_id, reply)
            return reply
        if not facts.is_debugger:
            post_mortem.forget()
        activity.begin_cell()
        session.steps.begin_cell()
        self._budget.begin(facts.output_limit)
        session.cell = cell if cell is not None else 0
        start = time.monotonic_ns()
        calls, draws, seen = activity.started(), Draws(session.device), Measured()
        self._interrupts.begin_cell()
        try:
            reply = self._prepare(facts) or await measured(session, facts, execute, seen)
        except BaseException as error:
            self._log.end(message_id, {"status": "error", "ename": type(error).__name__, "evalue": str(error)})
            raise
        finally:
            membership.leave()
            self._interrupts.end_cell()
            session.steps.end_cell()
            end = time.monotonic_ns()
            session.cell = None
            streams.drain(wait=True)
            self._budget.end()
            emit(Span(session.config.rank, "cell", f"In [{cell}]", start, end))
        value = getattr(getattr(shell, "last_execution_result", None), "result", None)
        has_value = reply["status"] == "ok" and value is not None
        if has_value and facts.token is not None:
            self._keep_value(facts.token, value)
        interruption = take_place()
        ok = reply["status"] == "ok"
        told = CellEnd(
            seconds=(end - start) / 1e9,
            calls=activity.started() - calls,
            interruption=interruption,
            has_value=has_value,
            draws=draws.report(shell) if activity.started() > calls else None,
            cpu_seconds=seen.cpu_seconds if ok else None,
            repetitions=seen.repetitions if ok else None,
            profile=seen.profile if ok else None,
        )
        reply[KEY] = encode(told)
        tell_exit(reply, shell)
        if not ok:
            release_failure(shell, from_outside=interruption is not None, keep=facts.keep_failure)
        reply = _bounded(reply)
        self._log.end(message_id, reply)
        return reply

    def _prepare(self, facts: CellFacts) -> dict[str, Any] | None:
        """What goes before the cell's own code; the reply when that fails."""
        cell_begins(facts.run)
        try:
            subgroup.bind(self._session, facts.ranks, wanted=facts.subgroup)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": [text]}
        membership.enter(facts.ranks if facts.alone else None)
        return None

    def _keep_value(self, token: str, value: Any) -> None:
        self._values[token] = value
        while len(self._values) > _MAX_VALUES:
            self._values.pop(next(iter(self._values)))

    def take_value(self, token: str) -> Any:
        """The value of the last expression of the cell with this token, once."""
        return self._values.pop(token, None)


def _bounded(reply: dict[str, Any]) -> dict[str, Any]:
    if reply["status"] != "error":
        return reply
    reply["evalue"] = _cut(reply.get("evalue", ""), _MAX_EVALUE)
    lines, room = [], _MAX_TRACEBACK
    for line in reply.get("traceback", []):
        lines.append(_cut(line, max(room, 200)))
        room -= len(line)
    reply["traceback"] = lines
    return reply


def _cut(text: str, limit: int) -> str:
    return (
        text
        if len(text) <= limit
        else f"{text[: limit // 2]} … {len(text) - limit:,} characters … {text[-limit // 2 :]}"
    )
