"""`--time`, `--repeat` and `--profile` of a cell, on the rank."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.groups import subgroup
from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.cells import CellFacts, Profile

__all__ = ["Measured", "measured"]

_RUNS, _RUN = "__axon_nb_runs__", "__axon_nb_run__"
"""Names that the repeated cell uses, taken away after it."""
_TOP = 15
"""Operations of a profile that are told."""


@dataclass(slots=True)
class Measured:
    """What was measured of a cell; the fields of `CellEnd`."""

    cpu_seconds: float | None = None
    repetitions: tuple[float, ...] | None = None
    profile: Profile | None = None


async def measured(
    session: RankSession, facts: CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], found: Measured
) -> dict[str, Any]:
    """Run a cell; gives the reply.

    Args:
        session: This rank.
        facts: What the notebook says of the cell.
        execute: Runs it; gives the reply.
        found: Filled with what was measured.
    """
    try:
        return await _measured(session, facts, execute, found)
    except Exception as error:  # the cell's own failures are in its reply: without one the notebook would wait for ever
        told = f"the cell has run, and measuring it failed: {type(error).__name__}: {error}"
        return {"status": "error", "ename": type(error).__name__, "evalue": told, "traceback": [told]}


async def _measured(
    session: RankSession, facts: CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], found: Measured
) -> dict[str, Any]:
    wanted = facts.measurement
    with contextlib.ExitStack() as stack:
        if wanted.repeat:
            stack.enter_context(_repeated(session, facts, found))
        if session.config.rank in wanted.profiled:
            stack.enter_context(_profiled(session, Path(wanted.folder), found))
        cpu = time.process_time()
        reply = await execute()
        if wanted.is_timed:
            _finish(session.device)
        found.cpu_seconds = time.process_time() - cpu
    return reply


def _finish(device: torch.device) -> None:
    """Wait for what the device still does."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


class _Runs:
    """What the loop around the cell goes over: ranks begin each run together, and its time is taken."""

    def __init__(self, count: int, seconds: list[float], meet: Callable[[], None], finish: Callable[[], None]) -> None:
        self._count = count
        self._seconds = seconds
        self._meet = meet
        self._finish = finish
        self._began: float | None = None

    def __iter__(self) -> _Runs:
        return self

    def __next__(self) -> int:
        if self._began is not None:
            self._finish()
            self._seconds.append(time.perf_counter() - self._began)
        if len(self._seconds) == self._count:
            raise StopIteration
        self._meet()
        self._began = time.perf_counter()
        return len(self._seconds)


class _Loop(ast.NodeTransformer):
    """Puts the statements of the next cell into a loop; their line numbers stay."""

    def __init__(self) -> None:
        self._done = False

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """IPython gives each cell to its transformers as a module."""
        head = [line for line in node.body if isinstance(line, ast.ImportFrom) and line.module == "__future__"]
        body = [line for line in node.body if line not in head]
        if self._done or not body:
            return node
        self._done = True
        target, runs = ast.Name(_RUN, ast.Store()), ast.Name(_RUNS, ast.Load())
        loop = ast.copy_location(ast.For(target=target, iter=runs, body=body, orelse=[]), body[0])
        node.body = [*head, loop]
        return ast.fix_missing_locations(node)


@contextlib.contextmanager
def _repeated(session: RankSession, facts: CellFacts, found: Measured) -> Iterator[None]:
    ranks = facts.ranks
    shell, seconds = session.kernel.shell, list[float]()

    def meet() -> None:
        if len(ranks) > 1:
            device = [session.device.index] if session.config.backend == "nccl" else None
            dist.barrier(group=subgroup.of(session, ranks), device_ids=device)

    loop = _Loop()
    shell.user_ns[_RUNS] = _Runs(facts.measurement.repeat, seconds, meet, lambda: _finish(session.device))
    shell.ast_transformers.append(loop)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # IPython takes one away that fails
            shell.ast_transformers.remove(loop)
        for name in (_RUNS, _RUN):
            shell.user_ns.pop(name, None)
    found.repetitions = tuple(seconds)


@contextlib.contextmanager
def _profiled(session: RankSession, folder: Path, found: Measured) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    on_device = session.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities) as profiler:
        yield
        _finish(session.device)
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard's plugin reads files of this form from its log folder; they are chrome traces.
    trace = folder / f"rank{session.config.rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
    profiler.export_chrome_trace(str(trace))
    averages = sorted(profiler.key_averages(), key=lambda entry: -_self_us(entry, on_device))
    found.profile = Profile(tuple(_row(entry, on_device) for entry in averages[:_TOP]), str(trace))


def _self_us(entry: Any, on_device: bool) -> float:
    own = float(entry.self_cpu_time_total)
    return own + float(entry.self_device_time_total) if on_device else own


def _row(entry: Any, on_device: bool) -> dict[str, Any]:
    row = {
        "operation": str(entry.key),
        "calls": int(entry.count),
        "self CPU ms": round(entry.self_cpu_time_total / 1e3, 3),
        "CPU ms": round(entry.cpu_time_total / 1e3, 3),
    }
    if on_device:
        row["self device ms"] = round(entry.self_device_time_total / 1e3, 3)
    return row
