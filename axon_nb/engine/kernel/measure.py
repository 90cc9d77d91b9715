"""Implements `--time`, `--repeat` and `--profile` on the rank."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.kernel.shell import get_subgroup
from axon_nb.engine.session import RankSession
from axon_nb.records.protocol.cells import CellFacts, Profile, ProfiledOperation

_RUNS_NAME, _RUN_NAME = "__axon_nb_runs__", "__axon_nb_run__"
"""Names that a repeated cell uses; removed after it."""
_MAX_OPERATIONS = 15
"""Operations reported from a profile."""


async def run_measured(
    session: RankSession, facts: CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], measured: dict[str, Any]
) -> dict[str, Any]:
    """Run a cell and return its reply.

    Args:
        session: This rank.
        facts: The notebook's metadata about the cell.
        execute: Runs the cell and returns its reply.
        measured: Receives the measurements: fields of `CellEnd`, by name.
    """
    try:
        return await _run_measured(session, facts, execute, measured)
    except Exception as error:  # the cell's own errors are in its reply, without which the notebook would wait forever
        message = f"the cell ran, but measuring it failed: {type(error).__name__}: {error}"
        return {"status": "error", "ename": type(error).__name__, "evalue": message, "traceback": [message]}


async def _run_measured(
    session: RankSession, facts: CellFacts, execute: Callable[[], Awaitable[dict[str, Any]]], measured: dict[str, Any]
) -> dict[str, Any]:
    wanted = facts.measurement
    with contextlib.ExitStack() as stack:
        if wanted.repeat:
            stack.enter_context(_repeated(session, facts, measured))
        if session.config.rank in wanted.profiled:
            stack.enter_context(_profiled(session, Path(wanted.folder), measured))
        cpu = time.process_time()
        reply = await execute()
        if wanted.is_timed:
            _synchronize(session.device)
        measured["cpu_seconds"] = time.process_time() - cpu
    return reply


def _synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.synchronize(device)


def _timed_runs(
    count: int, seconds: list[float], barrier: Callable[[], None], synchronize: Callable[[], None]
) -> Iterator[int]:
    """Drive the loop around the cell: ranks start each run together, and each run is timed."""
    for number in range(count):
        barrier()
        start = time.perf_counter()
        yield number
        synchronize()
        seconds.append(time.perf_counter() - start)


class _LoopTransformer(ast.NodeTransformer):
    """Puts the next cell's statements into a loop; their line numbers stay."""

    def __init__(self) -> None:
        self._done = False

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Wrap the body of a cell, which IPython passes as a module."""
        head = [line for line in node.body if isinstance(line, ast.ImportFrom) and line.module == "__future__"]
        body = [line for line in node.body if line not in head]
        if self._done or not body:
            return node
        self._done = True
        target, runs = ast.Name(_RUN_NAME, ast.Store()), ast.Name(_RUNS_NAME, ast.Load())
        loop = ast.copy_location(ast.For(target=target, iter=runs, body=body, orelse=[]), body[0])
        node.body = [*head, loop]
        return ast.fix_missing_locations(node)


@contextlib.contextmanager
def _repeated(session: RankSession, facts: CellFacts, measured: dict[str, Any]) -> Iterator[None]:
    ranks = facts.ranks
    shell, seconds = session.kernel.shell, list[float]()

    def barrier() -> None:
        if len(ranks) > 1:
            device = [session.device.index] if session.config.backend == "nccl" else None
            dist.barrier(group=get_subgroup(session, ranks), device_ids=device)

    loop = _LoopTransformer()
    shell.user_ns[_RUNS_NAME] = _timed_runs(
        facts.measurement.repeat, seconds, barrier, lambda: _synchronize(session.device)
    )
    shell.ast_transformers.append(loop)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # IPython removes a transformer that fails
            shell.ast_transformers.remove(loop)
        for name in (_RUNS_NAME, _RUN_NAME):
            shell.user_ns.pop(name, None)
    measured["repetitions"] = tuple(seconds)


@contextlib.contextmanager
def _profiled(session: RankSession, folder: Path, measured: dict[str, Any]) -> Iterator[None]:
    from torch.profiler import ProfilerActivity, profile

    on_device = session.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profile(activities=activities) as profiler:
        yield
        _synchronize(session.device)
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard's plugin reads files of this name from its log folder; they are Chrome traces.
    trace = folder / f"rank{session.config.rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
    profiler.export_chrome_trace(str(trace))
    averages = sorted(profiler.key_averages(), key=lambda entry: -_self_us(entry, on_device))
    measured["profile"] = Profile(
        tuple(_operation(entry, on_device) for entry in averages[:_MAX_OPERATIONS]), str(trace)
    )


def _self_us(entry: Any, on_device: bool) -> float:
    cpu_us = float(entry.self_cpu_time_total)
    return cpu_us + float(entry.self_device_time_total) if on_device else cpu_us


def _operation(entry: Any, on_device: bool) -> ProfiledOperation:
    return ProfiledOperation(
        str(entry.key),
        int(entry.count),
        self_cpu_ms=round(entry.self_cpu_time_total / 1e3, 3),
        cpu_ms=round(entry.cpu_time_total / 1e3, 3),
        self_device_ms=round(entry.self_device_time_total / 1e3, 3) if on_device else None,
    )
