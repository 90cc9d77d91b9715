"""Makes optimizer steps on this rank atomic under interrupts, and counts them."""

from __future__ import annotations

import hashlib
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.engine.groups import recovery
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import unreplicated_parameters, unreplicated_reason
from axon_nb.engine.step_frames import step_depth
from axon_nb.records.protocol.recovery import OptimizerReport, RecoveryReport

_MAX_DEFER_S = 5.0
"""Longest time that an interrupt is deferred: the closure of a step may loop forever."""


class OptimizerSteps:
    """Defers interrupts that land inside a step until it is complete, and counts the steps of each optimizer."""

    def __init__(self) -> None:
        self._deferred_since: float | None = None
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._calls = 0
        self._communicated = False
        self.observers: list[Callable[[FrameType | None], None]] = []
        """Called after each step with the frame that made it, which belongs to no other step."""

    def install(self) -> None:
        """Hook into all optimizer steps from now on."""
        register_optimizer_step_pre_hook(self._raise_deferred)
        register_optimizer_step_post_hook(self._after_step)

    def begin_cell(self) -> None:
        """Start counting for a new cell, and drop any deferred interrupt of the last one."""
        self._deferred_since = None
        self._before = weakref.WeakKeyDictionary(self._steps) if self._steps else weakref.WeakKeyDictionary()
        self._calls = recovery.num_calls()

    def end_cell(self) -> None:
        """Note whether the cell communicated; rebuilding groups afterwards does not count."""
        self._communicated = recovery.num_calls() != self._calls

    def defers_interrupt(self, frame: FrameType | None) -> bool:
        """Whether to defer an interrupt that landed on `frame`; it is raised after the optimizer step.

        If the step itself raises, the interrupt is raised before the next step, unless the repeated abort comes first.
        """
        if not step_depth(frame):
            self._deferred_since = None
            return False
        if self._deferred_since is None:
            self._deferred_since = time.monotonic()
        return time.monotonic() - self._deferred_since < _MAX_DEFER_S

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.set(optimizer, self.of(optimizer) + 1)
        current().groups.slowdown.sleep()
        frame = sys._getframe(1)
        if step_depth(frame) < 2:
            for observe in self.observers:
                observe(frame.f_back)
        self._raise_deferred()

    def _raise_deferred(self, *_: Any) -> None:
        # An optimizer that steps another one, such as ZeroRedundancyOptimizer, must finish its step, too.
        if self._deferred_since is not None and step_depth(sys._getframe(1)) < 2:
            self._deferred_since = None
            raise KeyboardInterrupt

    def after_foreign_step(self) -> None:
        """Raise a deferred interrupt after a step that is not one of torch's optimizers."""
        self._raise_deferred()

    def of(self, optimizer: Optimizer) -> int:
        """Number of steps of this optimizer."""
        return self._steps.get(optimizer, 0)

    def set(self, optimizer: Optimizer, steps: int) -> None:
        """Set the number of steps."""
        self._steps[optimizer] = steps
        if steps and optimizer not in self._numbers:
            self._numbers[optimizer], self._next = self._next, self._next + 1

    def save(self, optimizers: Iterable[Optimizer]) -> Any:
        """Return the steps and numbers of optimizers, which the next process of this rank takes over."""
        return [(one, self.of(one), self._numbers.get(one, -1)) for one in optimizers], self._next

    def load(self, saved: Any) -> None:
        """Take over what `save` returned, so that numbers are those of the other ranks."""
        entries, count = saved
        for optimizer, steps, number in entries:
            self._steps[optimizer] = steps
            if number >= 0:
                self._numbers[optimizer] = self._next + number
        self._next += count

    def report(self) -> tuple[OptimizerReport, ...]:
        """Report each live optimizer that has stepped, and named ones that have not stepped yet."""
        names = _optimizers_by_id()
        optimizers = {id(optimizer): optimizer for optimizer in (*self._steps, *(named for named, _ in names.values()))}
        if not optimizers:
            return ()
        in_wrappers = unreplicated_parameters()
        return tuple(
            OptimizerReport(
                number=self._numbers.get(optimizer, -1),
                name=names[key][1] if key in names else "",
                before=self._before.get(optimizer, 0),
                steps=self.of(optimizer),
                shapes=_digest(_parameters(optimizer)),
                not_replicated=unreplicated_reason(_parameters(optimizer), in_wrappers),
                communicated=self._communicated,
            )
            for key, optimizer in optimizers.items()
        )


def recover(epoch: int) -> RecoveryReport:
    """Rebuild the groups after an aborted cell, as `groups.recovery.recover`; adds this rank's steps."""
    return RecoveryReport(recovery.recover(epoch), current().steps.report())


def _optimizers_by_id() -> dict[int, tuple[Optimizer, str]]:
    # type() instead of isinstance: the latter runs user code on lazy proxies.
    values = list(current().kernel.shell.user_ns.items())
    return {id(v): (v, name) for name, v in values if name[:1] != "_" and issubclass(type(v), Optimizer)}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    shapes = ",".join(f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in tensors)
    return hashlib.sha256(shapes.encode()).hexdigest()[:16]
