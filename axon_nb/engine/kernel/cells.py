"""Runs each cell on a rank: its number, its span, its value, hints on its failure, and a reply of bounded size.

The last cells are logged with their latest output and outcome, for a notebook that reconnects. If a cell ran out of
memory, what that held is measured while the cell's frames still hold their tensors. Random numbers that replicas of a
model should not share are detected for a hint; `%distributed seed` seeds Python's, NumPy's and torch's generators on
every device.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from json import loads  # by name: a cell may replace functions of the module
from typing import Any

import numpy as np
import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn

from axon_nb.engine.debugger import Breakpoints, PostMortem
from axon_nb.engine.groups import recovery
from axon_nb.engine.kernel.interrupts import InterruptHandler
from axon_nb.engine.kernel.shell import Tracebacks, bind_subgroup, describe_exit
from axon_nb.engine.live_objects import DDP, FSDP
from axon_nb.engine.output import OutputBudget
from axon_nb.engine.session import CellFeature, RankSession, current, overwritten_variables, user_variables
from axon_nb.engine.sharding import loaded_class
from axon_nb.records.memory import MemoryShortage
from axon_nb.records.protocol import cells as protocol
from axon_nb.records.protocol.wire import decode, encode
from axon_nb.records.spans import Span, emit

_MAX_CELLS = 4
_MAX_SIZE = 64 << 10
"""Characters of output saved per cell."""
_MAX_REPLAY_SIZE = 4 << 20
"""Characters saved while a notebook replays them; more than a cell may print."""
_REPLAY_TIMEOUT_S = 5.0
_MESSAGE_OVERHEAD = 64
"""Size counted per message besides its text: many small messages take memory, too."""
_OUTPUT_TYPES = ("clear_output", "display_data", "execute_result", "stream", "update_display_data")
_DELIMITER = b"<IDS|MSG>"
_NAMES = frozenset({"MemoryError", "OutOfMemoryError"})
_WORD = re.compile(r"\w+")
_TEXT = re.compile(r"can't allocate memory|not enough memory")
"""In a RuntimeError of torch's allocator for CPUs."""
_SHARDED = "axon_nb.compat.sharded_tensors"
_MAX_MODULES = 5000
_NUMPY_SEEDS = 1 << 32
_SPLIT_MODELS = "axon_nb.compat.transformers"
"""Loaded once transformers has split a model over ranks."""
FEATURES = {
    "log_to": "axon_nb.engine.trackers:MetricsWriter",
    "protect": "axon_nb.engine.protection.protection:Protection",
    "watch_numbers": "axon_nb.engine.divergence:NumberWatch",
}
"""What surrounds a cell while it is switched on: by the field of `CellFacts` that does so, a `CellFeature`.

Where nothing is switched on, nothing is called, and the modules are not imported."""
_MAX_EVALUE = 16_000
_MAX_TRACEBACK = 200_000
_MAX_VALUES = 16
"""Number of cells whose values are kept until they are fetched; the oldest are dropped first."""
_NOTHING_MEASURED = protocol.Measurement()
_BEHIND_A_FAILURE = "not run, because the cell that it was queued behind did not finish here: run it again"
_SETS_VARIABLES = ("RANK", "WORLD_SIZE", "env", "%run")
"""Words of cells that may set a launcher's variables; only these cells are checked for it."""


class _Message(Struct):
    number: int
    kind: str
    content: dict[str, Any] | bytes
    """Bytes: as sent, unparsed."""
    size: int


class _CellRecord(Struct):
    """One cell."""

    facts: protocol.CellFacts
    """The request's metadata from the notebook."""
    started_ns: int
    messages: deque[_Message] = field(default_factory=deque)
    size: int = 0
    last: int = 0
    """Number of the last message; the first is 1."""
    fetched: int = 0
    replay_until: float = 0.0
    omitted: protocol.Omitted = field(default_factory=protocol.Omitted)
    """Over the whole cell."""
    newly_omitted: protocol.Omitted = field(default_factory=protocol.Omitted)
    """Since the last request of a replay."""
    sent: int = 0
    """How many messages were sent on the output channel, those included that are not saved."""
    reply: dict[str, Any] | None = None
    finished_ns: int = 0

    def add(self, kind: str, content: dict[str, Any] | bytes, size: int) -> None:
        self.last += 1
        message = _Message(self.last, kind, content, size)
        room = _MAX_REPLAY_SIZE if time.monotonic() < self.replay_until else _MAX_SIZE
        if isinstance(content, bytes) and size > room // 2:
            self._count_omitted(message, content)  # a large picture would displace everything else
            return
        self.messages.append(message)
        self.size += size
        self.trim()

    def trim(self) -> None:
        is_replaying = time.monotonic() < self.replay_until
        while self.size > _MAX_SIZE:
            oldest = self.messages[0]
            if is_replaying and oldest.number > self.fetched and self.size <= _MAX_REPLAY_SIZE:
                return
            room = _MAX_SIZE - (self.size - oldest.size) - _MESSAGE_OVERHEAD
            if not is_replaying and room > 0 and isinstance(oldest.content, dict):
                self._shorten(oldest, room)
                return
            self.messages.popleft()
            self.size -= oldest.size
            self._count_omitted(oldest, oldest.content)
            self._drop_rest_of_line(oldest)

    def _drop_rest_of_line(self, dropped: _Message) -> None:
        # One `print` may arrive as several messages: the rest of a line whose start was discarded is meaningless.
        first = self.messages[0] if self.messages else None
        if first is None or not isinstance(first.content, dict) or not isinstance(dropped.content, dict):
            return
        text, before = first.content["text"], dropped.content
        end = text.find("\n") + 1
        if before.get("name") == first.content.get("name") and before["text"][-1:] != "\n" and 0 < end < len(text):
            self._cut_front(first, end)

    def _cut_front(self, message: _Message, at: int) -> None:
        assert isinstance(message.content, dict)
        text = message.content["text"]
        self._count_omitted(message, {"text": text[:at]})
        message.content = {**message.content, "text": text[at:]}
        self.size -= at
        message.size -= at

    def _shorten(self, message: _Message, room: int) -> None:
        assert isinstance(message.content, dict)
        text = message.content["text"]
        at = len(text) - room
        line_end = text.find("\n", at - 1)
        if -1 < line_end < len(text) - 1:
            at = line_end + 1
        self._cut_front(message, at)

    def _count_omitted(self, message: _Message, content: dict[str, Any] | bytes) -> None:
        for omitted in (self.omitted, self.newly_omitted) if message.number > self.fetched else (self.omitted,):
            if isinstance(content, dict):
                omitted.lines += content["text"].count("\n")
                omitted.size += len(content["text"])
            elif message.kind != "clear_output":
                omitted.displays += 1
                omitted.size += len(content)

    def report(self, since: int) -> protocol.CellReport:
        """Report messages after number `since` (0: all saved ones), the amount omitted before them, and the outcome."""
        self.fetched, self.replay_until = since, time.monotonic() + _REPLAY_TIMEOUT_S
        omitted, self.newly_omitted = (self.newly_omitted if since else self.omitted), protocol.Omitted()
        return protocol.CellReport(
            run=self.facts.run,
            facts=self.facts if not since else None,
            elapsed_ns=(self.finished_ns or time.monotonic_ns()) - self.started_ns,
            messages=[
                [message.kind, message.content if isinstance(message.content, dict) else loads(message.content)]
                for message in self.messages
                if message.number > since
            ],
            last=self.last,
            omitted=replace(omitted),  # the cell may go on
            outcome=None if self.reply is None else protocol.read_outcome(self.reply),
        )


class CellLog:
    """Sees every message of the output channel; saves the latest output of each cell, at most 64 Ki characters."""

    def __init__(self) -> None:
        self.sees_all = False
        """Whether `tap` is called with each message, which a later ipykernel may not allow."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._records: dict[str, _CellRecord] = {}

    def begin(self, message_id: str, facts: protocol.CellFacts) -> None:
        """Start recording a cell.

        Args:
            message_id: Id of the request; output messages refer to it.
            facts: The notebook's metadata about the cell.
        """
        if not facts.run:
            return
        record = _CellRecord(facts, time.monotonic_ns())
        with self._lock:
            self._records[message_id] = record
            while len(self._records) > _MAX_CELLS:
                self._records.pop(next(iter(self._records)))

    def outputs(self, message_id: str) -> int | None:
        """Return how many messages of the cell were sent on the output channel; None if it is not known."""
        record = self._records.get(message_id)
        return record.sent if record is not None and self.sees_all else None

    def end(self, message_id: str, reply: dict[str, Any]) -> None:
        """Record the cell's reply; its output has been sent."""
        with self._lock:
            if (record := self._records.get(message_id)) is not None:
                record.finished_ns = time.monotonic_ns()
                record.reply = reply

    def tap(self, frames: list[Any]) -> None:
        """Record one outgoing message of the output channel; thread-safe."""
        if not self._records or os.getpid() != self._pid:  # nobody reads the copy in a forked worker
            return
        start = frames.index(_DELIMITER)
        _, header, parent, _, content = map(bytes, frames[start + 1 : start + 6])
        record = self._records.get(loads(parent).get("msg_id", ""))
        kind = loads(header)["msg_type"] if record is not None else "status"
        if record is None or kind == "status":
            return
        with self._lock:
            record.sent += 1
        if kind not in _OUTPUT_TYPES:
            return
        if kind == "stream":
            text = loads(content)
            size, what = len(text["text"]) + _MESSAGE_OVERHEAD, text
        else:
            size, what = len(content), content
        with self._lock:
            record.add(kind, what, size)

    def report(self, *, run: str | None, since: int, after_ns: int) -> list[protocol.CellReport]:
        """Report one cell, or all cells that had not finished before `after_ns`, oldest first.

        Args:
            run: The cell's run id; None for all cells.
            since: Number of the last message that the caller already has.
            after_ns: Monotonic time of this host in nanoseconds.
        """
        with self._lock:
            return [
                record.report(since)
                for record in self._records.values()
                if (
                    record.facts.run == run
                    if run is not None
                    else record.reply is None or record.finished_ns > after_ns
                )
            ]


def memory_shortage(session: RankSession, name: str, text: str) -> MemoryShortage | None:
    """Measure what this rank's memory holds; None if its cell failed for another reason.

    Call it on the main thread, before the failed cell's frames are released.

    Args:
        session: This rank.
        name: Name of the error that ended the cell.
        text: Its text.
    """
    if name not in _NAMES and not (name == "RuntimeError" and _TEXT.search(text)):
        return None
    from axon_nb.engine.inspection.memory import GradientReader, measure, modules_and_optimizers
    from axon_nb.engine.live_objects import LiveTensors

    modules, optimizers = modules_and_optimizers((), session)
    use = measure(modules, optimizers, session, gradients=GradientReader(session), live_tensors=LiveTensors())
    states = sharded = 0
    with contextlib.suppress(Exception):  # an unusual model, or no memory for the estimate: the measured part is enough
        from axon_nb.engine.inspection.memory_plan import sharded_estimate  # takes seconds

        states, sharded = sharded_estimate(modules, optimizers, session)
    return MemoryShortage(use, states, sharded, session.config.world_size)


class RandomDraws:
    """The random numbers drawn by one cell; create it when the cell starts.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._state()
        if (sharded := sys.modules.get(_SHARDED)) is not None:
            vars(sharded)["shard_draw"] = ""

    def report(self, shell: Any, code: str, *, communicated: bool) -> protocol.Draws | None:
        """Report at the end of the cell; None if nothing was drawn, or no model here is sharded or replicated.

        Args:
            shell: The rank's shell.
            code: The cell; what it names is named first.
            communicated: Whether the cell communicated; its models may be replicas only then.
        """
        digest = getattr(sys.modules.get(_SHARDED), "shard_draw", "")
        if digest:
            return protocol.Draws((digest, digest), "", "", into_shards=True)
        try:
            return self._find_shared_draws(shell, code) if communicated else None
        except Exception:  # a hint must never fail a cell
            return None

    def _find_shared_draws(self, shell: Any, code: str) -> protocol.Draws | None:
        before, after = (b"".join(one.numpy().tobytes() for one in state) for state in (self._before, self._state()))
        if after == before:
            return None
        named = frozenset(_WORD.findall(code))
        variables = dict(sorted(user_variables(shell).items(), key=lambda item: item[0] not in named))
        models = {name: value for name, value in variables.items() if isinstance(value, nn.Module)}
        replicas = {name: model for name, model in models.items() if _is_replicated(model)}
        if not replicas:
            return None
        dropout = next((name for name, model in replicas.items() if _uses_dropout(model)), "")
        loader = next((name for name, value in variables.items() if _shuffles_globally(value)), "")
        first, last = (hashlib.blake2b(state, digest_size=8).hexdigest() for state in (before, after))
        sampler = next(filter(None, (_shuffle_of(name, value) for name, value in variables.items())), "")
        return protocol.Draws((first, last), dropout, loader, sampler=sampler) if dropout or loader or sampler else None

    def _state(self) -> list[torch.Tensor]:
        try:
            states = [torch.default_generator.get_state()]
            if self._device.type == "cuda" and torch.cuda.is_initialized():
                states.append(torch.cuda.get_rng_state(self._device))
            return states
        except Exception:  # a torch mode that stays on between cells, such as fake tensors
            return []


def _is_replicated(model: nn.Module) -> bool:
    """Whether ranks train replicas of the model, each on its own data."""
    kinds = (loaded_class(*DDP), loaded_class(*FSDP))
    return any(isinstance(module, kinds) for module, _ in zip(model.modules(), range(_MAX_MODULES), strict=False))


def _uses_dropout(model: nn.Module) -> bool:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    parts = (module for module, _ in zip(model.modules(), range(_MAX_MODULES), strict=False))
    return any(isinstance(part, kinds) and part.training and part.p > 0 for part in parts)


def _shuffles_globally(value: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(value, data.DataLoader):
        return False
    sampler = value.sampler
    return isinstance(sampler, data.RandomSampler) and sampler.generator is None and value.generator is None


def _shuffle_of(name: str, value: Any) -> str:
    data = sys.modules.get("torch.utils.data")
    sampler = value.sampler if data is not None and isinstance(value, data.DataLoader) else None
    if data is None or not isinstance(sampler, data.DistributedSampler) or not sampler.shuffle:
        return ""
    is_split = sampler.num_replicas == current().config.world_size
    return f"`{name}` has seed {sampler.seed} and epoch {sampler.epoch}" if is_split else ""


def seed(value: int, *, per_rank: bool = False) -> int:
    """Seed this rank with `value`, plus its rank if `per_rank`; return the seed."""
    rank_seed = value + current().config.rank if per_rank else value
    random.seed(rank_seed)
    np.random.seed(rank_seed % _NUMPY_SEEDS)
    torch.manual_seed(rank_seed)  # seeds all devices, too
    return rank_seed


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
        self._overwritten: dict[str, str] = {}
        self._failed: deque[str] = deque(maxlen=64)
        """Runs that have failed here, or did not run."""

    async def run(self, metadata: dict[str, Any], execute: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Run one request; the reply says whether there is a value to fetch, and how long the cell took in seconds."""
        session, shell = self._session, self._session.kernel.shell
        request = session.kernel.get_parent("shell")
        facts: protocol.CellFacts = decode(protocol.CellFacts, metadata.get(protocol.KEY, {}))
        message_id, code, cell = request["header"]["msg_id"], request["content"]["code"], facts.cell
        self._log.begin(message_id, facts)
        if cell is not None:
            # Tracebacks then show the notebook's own prompt: "Cell In[12], line 3".
            shell.execution_count = cell
        # IPython looks here for the semicolon that suppresses a value.
        shell.history_manager.input_hist_parsed[-1:] = [code]
        if facts.run in self._interrupts.rejected_runs:
            return self._refuse(message_id, facts.run, "KeyboardInterrupt", "")
        if any(run in self._failed for run in facts.behind):  # this one's collectives would meet those of that one
            return self._refuse(message_id, facts.run, "UsageError", _BEHIND_A_FAILURE)
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
            if any(word in code for word in _SETS_VARIABLES):
                self._note_overwritten()
            self._budget.end()
            slowed = f"slowed: {facts.slowness}" if facts.slowness else ""
            emit(Span(session.config.rank, "cell", f"In [{cell}]", start, end, slowed))
        aborted_at = self._tracebacks.end_cell(reply)
        value = getattr(getattr(shell, "last_execution_result", None), "result", None)
        has_value = is_ok and value is not None
        if has_value and facts.token is not None:
            self._keep_value(facts.token, value)
        communicated = recovery.num_calls() - calls
        end_report = protocol.CellEnd(
            seconds=(end - start) / 1e9,
            calls=max(0, communicated),
            aborted_at=aborted_at,
            has_value=has_value,
            draws=draws.report(shell, code, communicated=communicated > 0),
            model_calls=() if (split_models := sys.modules.get(_SPLIT_MODELS)) is None else split_models.take_calls(),
            threads=() if is_ok else session.groups.calls.calling_threads(),
            left=session.groups.calls.left(),
            shortage=None if is_ok else memory_shortage(session, reply["ename"], reply["evalue"]),
            outputs=self._log.outputs(message_id),
            **(measured if is_ok else {}),
        )
        describe_exit(reply, shell)
        if not is_ok:
            self._failed.append(facts.run)
            self._post_mortem.release(
                shell,
                was_aborted=aborted_at is not None,
                keep_text=reply["evalue"] if facts.keep_failure else None,
            )
        return self._end(message_id, _limit_reply(reply), end_report)

    def _note_overwritten(self) -> None:
        """Say once which variables of a launcher the cell has set: libraries then take this rank for another."""
        found = overwritten_variables(self._session.config)
        if found and found != self._overwritten:
            own = "RANK=str(rank), LOCAL_RANK=str(local_rank), WORLD_SIZE=str(world_size)"
            with contextlib.suppress(Exception):  # the cell may have replaced what prints
                print(
                    f"axon_nb: the cell has set {', '.join(f'{name}={text}' for name, text in found.items())}, which "
                    "misleads libraries: leave such lines out, as each rank has its own values. "
                    f"`os.environ.update({own})` restores them."
                )
        self._overwritten = found

    def _refuse(self, message_id: str, run: str, name: str, text: str) -> dict[str, Any]:
        self._failed.append(run)
        reply: dict[str, Any] = {"status": "error", "ename": name, "evalue": text, "traceback": []}
        return self._end(message_id, reply, protocol.CellEnd(outputs=self._log.outputs(message_id)))

    def _end(self, message_id: str, reply: dict[str, Any], report: protocol.CellEnd) -> dict[str, Any]:
        reply[protocol.KEY] = encode(report)
        self._log.end(message_id, reply)
        return reply

    async def _execute(
        self, facts: protocol.CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], measured: dict[str, Any]
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

    def _begin(self, facts: protocol.CellFacts, code: str) -> Sequence[CellFeature]:
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

    def _prepare(self, facts: protocol.CellFacts) -> dict[str, Any] | None:
        """Set up before the cell's own code runs; return an error reply if that fails."""
        self._session.groups.begin_run(facts.run)
        try:
            bind_subgroup(self._session, facts.ranks, wanted=facts.subgroup)
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
