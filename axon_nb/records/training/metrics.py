"""Training metrics reported with `axon_nb.log`, kept in a bounded ring."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from axon_nb.errors import UsageError
from axon_nb.records.telemetry import running_cell
from axon_nb.records.training.job import RateMeter

_CAPACITY = 8192


class Logged(NamedTuple):
    """One call of `log`."""

    step: int
    """As given, or counted per name."""
    run: tuple[int, int]
    """Training run: the cell in which it started, and a count within that cell; increases when steps restart."""
    is_first: bool
    """Whether this is the process's first run."""
    values: dict[str, Any]
    """Numbers by name; values on other devices than the CPU stay tensors until read."""


class MetricRing:
    """Keeps the most recent calls of `log`; readers continue from a position and learn how many they missed."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.pace = RateMeter()
        """Throughput in steps and items per second."""
        self._records: deque[Logged] = deque(maxlen=capacity)
        self._lock = threading.Lock()
        self._next = 0
        self._last: dict[str, int] = {}
        self._ahead: dict[str, int] = {}
        self._run, self._is_first = (0, 0), True

    def add(self, values: dict[str, Any], *, step: int | None = None, items: float = 0.0) -> None:
        """Add the numbers of one step; takes the arguments of `log`."""
        with self._lock:
            if not self._last and self._is_first:
                self._run = (running_cell(), 0)
            if step is None:
                step = max((self._last.get(name, -1) + 1 for name in values), default=0)
            elif any(step < self._last.get(name, step) for name in values):
                self._start_run()
            self._count(values, step, items)
            if values:
                self._records.append(Logged(step, self._run, self._is_first, values))
                self._next += 1

    def _start_run(self) -> None:
        cell = running_cell()
        # Never decreases: cell numbers restart with the kernel while ranks keep running.
        self._run = (cell, 0) if cell > self._run[0] else (self._run[0], self._run[1] + 1)
        self._is_first = False
        self._last.clear()
        self._ahead.clear()

    def _count(self, values: dict[str, Any], step: int, items: float) -> None:
        before = max(self._ahead.values(), default=0)
        for name in values:
            last = self._last.get(name)
            self._ahead[name] = self._ahead.get(name, 0) + (1 if last is None else step - last)
            self._last[name] = step
        more = max(self._ahead.values(), default=0) - before
        if more or items:
            self.pace.mark(time.monotonic_ns(), steps=more, items=items)

    @property
    def end(self) -> int:
        """The position after the last call."""
        return self._next

    def read(self, position: int, limit: int = 2000) -> tuple[list[Logged], int, int]:
        """Calls from `position` on, oldest first: (calls, next position, number of lost calls)."""
        with self._lock:
            first = self._next - len(self._records)
            position = position if position <= self._next else 0
            begin = max(position, first)
            records = list(itertools.islice(self._records, begin - first, begin - first + limit))
        for record in records:
            for name, value in record.values.items():
                if not isinstance(value, float):
                    record.values[name] = float(value.item())  # synchronises with the device, on the reader's thread
        return records, begin + len(records), begin - position


metrics = MetricRing()
"""The ring of this process."""


def log(*, step: int | None = None, items: float = 0, **values: Any) -> None:
    """Log metrics of a training step: `axon_nb.log(loss=loss, lr=0.1, items=len(batch))`.

    On ranks `%watch` plots them live; under torchrun and in plain Python they are only kept in memory. A tensor on the
    CPU is read at once. A tensor on another device is copied there and read later, so that the step does not wait for
    it.

    Args:
        step: Step number, 0 or above; None counts steps per name. A lower number than before starts new curves.
        items: Number of samples or tokens that this rank processed in the step, for the throughput.
        **values: Numbers or one-element tensors, by name.

    Raises:
        UsageError: a value is not a number, or `step` is not an integer >= 0.
    """
    if step is not None:
        step = _step_number(step)
    numbers = {name: _number(name, value) for name, value in values.items()}
    metrics.add(numbers, step=step, items=float(_number("items", items)))


def _step_number(step: Any) -> int:
    try:
        number = step.__index__()
    except (AttributeError, TypeError, RuntimeError):
        number = -1
    if number < 0:
        raise UsageError(f"step={step!r}: must be an integer >= 0; omit it to count steps automatically.")
    return int(number)


def _number(name: str, value: Any) -> Any:
    """A float, or a copy of a tensor on its device."""
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    kind = type(value).__name__
    refused = UsageError(f"{name} has type {kind}: `axon_nb.log` accepts numbers and one-element tensors.")
    if not hasattr(value, "item") or isinstance(value, type):
        raise refused
    placements = getattr(value, "placements", ())
    if placements:
        if not all(placement.is_replicate() for placement in placements):
            raise UsageError(f"{name} is sharded over ranks: log {name}.full_tensor().")
        value = value.to_local()
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise UsageError(f"{name} has shape {shape}: log a single number, such as {name}.mean().")
    if getattr(getattr(value, "device", None), "type", "cpu") not in ("cpu", "meta") and hasattr(value, "detach"):
        return value.detach().clone()
    try:
        return float(value.item())
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        raise refused from None
