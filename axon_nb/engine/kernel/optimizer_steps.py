"""Optimizer steps on this rank: whole or not at all when an interrupt comes, and counted."""

from __future__ import annotations

import hashlib
import itertools
import sys
import time
import weakref
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.engine.groups import activity, recovery
from axon_nb.engine.groups.abort import step_depth
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import apart_in_wrappers, why_apart
from axon_nb.records.protocol.recovery import OptimizerReport, RecoveryReport

__all__ = ["OptimizerSteps", "recover"]

_HOLD_S = 5.0
"""An interrupt is held so long at most: the closure of a step may loop for ever."""


class OptimizerSteps:
    """Holds interrupts that land within a step until it is over, and counts the steps of each optimizer."""

    def __init__(self) -> None:
        self._held_since: float | None = None
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._calls = 0
        self._communicated = False

    def install(self) -> None:
        """Look after all steps from now on."""
        register_optimizer_step_pre_hook(self._raise_held)
        register_optimizer_step_post_hook(self._after_step)

    def begin_cell(self) -> None:
        """A cell begins: growth counts from here, and what was held is over with its cell."""
        self._held_since = None
        self._before = weakref.WeakKeyDictionary(self._steps)
        self._calls = activity.started()

    def end_cell(self) -> None:
        """The cell is over: whether it has communicated is known, and forming groups anew does not count."""
        self._communicated = activity.started() > self._calls

    def holds(self, frame: FrameType | None) -> bool:
        """From the handler of an interrupt that has landed on `frame`: whether it is held, and raised after the step.

        After a step that raises itself that is before the next, if the abort that is sent again does not come earlier.
        """
        if not step_depth(frame):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = time.monotonic()
        return time.monotonic() - self._held_since < _HOLD_S

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)
        self._steps[optimizer] = self.of(optimizer) + 1
        self._raise_held()

    def _raise_held(self, *_: Any) -> None:
        # An optimizer that steps another one, such as ZeroRedundancyOptimizer, is to be whole as well.
        if self._held_since is not None and step_depth(sys._getframe(1)) < 2:
            self._held_since = None
            raise KeyboardInterrupt

    def end_of_step(self) -> None:
        """A step that is no optimizer's of torch ends: what was held comes now."""
        self._raise_held()

    def of(self, optimizer: Optimizer) -> int:
        """How many steps this optimizer has made."""
        return self._steps.get(optimizer, 0)

    def set(self, optimizer: Optimizer, steps: int) -> None:
        """The optimizer was brought to where another rank's is, which has made so many steps."""
        self._steps[optimizer] = steps
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._next)

    def report(self) -> tuple[OptimizerReport, ...]:
        """Of each optimizer that has stepped and lives, and of those with a name that have not stepped yet."""
        names = _named_optimizers()
        optimizers = {id(one): one for one in (*self._steps, *(named for named, _ in names.values()))}
        if not optimizers:
            return ()
        in_wrappers = apart_in_wrappers()
        return tuple(
            OptimizerReport(
                number=self._numbers.get(optimizer, -1),
                name=names[key][1] if key in names else "",
                before=self._before.get(optimizer, 0),
                steps=self.of(optimizer),
                shapes=_digest(_parameters(optimizer)),
                apart=why_apart(_parameters(optimizer), in_wrappers),
                communicated=self._communicated,
            )
            for key, optimizer in optimizers.items()
        )


def recover(epoch: int) -> RecoveryReport:
    """Form the groups anew after an ended cell; as `groups.recovery.recover`, with this rank's steps besides."""
    return RecoveryReport(recovery.recover(epoch), current().steps.report())


def _named_optimizers() -> dict[int, tuple[Optimizer, str]]:
    # By their type: `isinstance` asks a lazy object for its class, which is the user's code.
    values = list(current().kernel.shell.user_ns.items())
    return {id(v): (v, name) for name, v in values if name[:1] != "_" and issubclass(type(v), Optimizer)}


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    shapes = ",".join(f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in tensors)
    return hashlib.sha256(shapes.encode()).hexdigest()[:16]
