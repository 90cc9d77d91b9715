"""Traces of one model at many batch sizes: two or three are made, the others are interpolated linearly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import describe_units, make_units
from axon_nb.plan.hardware.rates import Work
from axon_nb.plan.tracing.subject import ModelSource, checked_module_filter
from axon_nb.plan.tracing.trace import ModelTrace, TensorFacts, trace_model

_Facts = dict[str, tuple[TensorFacts, ...]]
_Key = TypeVar("_Key")


class _NotLinearError(Exception):
    """The traces do not lie on a line."""


class TraceInterpolator:
    """Traces of a step by batch size.

    A batch of one sample is always traced itself: size 1 can avoid copies.

    Args:
        source: The model; its batch is replaced.
        optimizer: Its step does not depend on the batch and is traced once.
        dtype: Compute dtype of forward and backward; None: as the model makes it.
    """

    def __init__(
        self, source: ModelSource, optimizer: Callable[..., Optimizer] | None, dtype: torch.dtype | None
    ) -> None:
        self._source, self._optimizer, self._dtype = source, optimizer, dtype
        self._made: dict[int, ModelTrace] = {}
        self._ends: list[int] = []

    @property
    def first(self) -> ModelTrace | None:
        """The trace that was made first; None: none was."""
        return next(iter(self._made.values()), None)

    def at(self, batch: int) -> ModelTrace:
        """Return the trace with a batch of this many samples.

        Raises:
            UsageError: the model cannot be traced, or its inputs do not depend on the batch.
        """
        if batch not in self._made:
            interpolated = self._interpolated(batch) if batch > 1 and len(self._ends) == 2 else None
            self._made[batch] = interpolated or self._traced(batch)
        return self._made[batch]

    def units(self, wrap: Any) -> tuple[str, ...]:
        """Describe the FSDP units of the model, if it was traced.

        Args:
            wrap: The same as in `FSDP`; a class may be given by name.
        """
        if self.first is None:
            return ()
        model = self.first.model
        return (describe_units(make_units(model, checked_module_filter(model, wrap, "wrap"))),)

    def _interpolated(self, batch: int) -> ModelTrace | None:
        low, high = self._ends
        return interpolate(self._made[low], self._made[high], (batch - low, high - low))

    def _traced(self, batch: int) -> ModelTrace:
        first = self.first
        trace = trace_model(
            replace(self._source, batch=batch), optimizer=None if first else self._optimizer, dtype=self._dtype
        )
        if not trace.has_inputs:
            raise UsageError(
                "inputs= is required, because the time of a step depends on the batch: TensorSpec(('batch', 1024))."
            )
        if batch > 1 and len(self._ends) < 2:
            self._ends.append(batch)
        if first is None:
            return trace
        if trace.inputs.get("") == first.inputs.get(""):
            raise UsageError(
                "inputs= must depend on the batch: describe it by shape, such as TensorSpec(('batch', 1024)) or "
                "TensorSpec(('batch', 'seq'), 'int64')."
            )
        trace.grad_uses = first.grad_uses
        trace.work |= {phase: work for phase, work in first.work.items() if phase == "optimizer"}
        if trace.ready == first.ready:
            trace.cache = first.cache
            trace.model = first.model
        return trace


def interpolate(low: ModelTrace, high: ModelTrace, share: tuple[int, int]) -> ModelTrace | None:
    """Return the trace on the line through two others of the same model; None: they do not lie on one.

    Sizes, bytes and FLOPs are linear in the number of samples, because every sample is computed alike.

    Args:
        low: The trace of one batch.
        high: The trace of another.
        share: (m, n): m / n of the way from `low` to `high`.
    """
    if low.ready != high.ready or low.cache is not high.cache:
        return None
    try:
        return replace(
            low,
            inputs=_facts(low.inputs, high.inputs, share),
            outputs=_facts(low.outputs, high.outputs, share),
            saved={key: _interpolate_int(a, b, share) for key, (a, b) in _pairs(low.saved, high.saved).items()},
            work={
                phase: {child: _work(a, b, share) for child, (a, b) in _pairs(one, other).items()}
                for phase, (one, other) in _pairs(low.work, high.work).items()
            },
        )
    except _NotLinearError:
        return None


def _pairs(low: Mapping[_Key, Any], high: Mapping[_Key, Any]) -> dict[_Key, tuple[Any, Any]]:
    if low.keys() != high.keys():
        raise _NotLinearError
    return {key: (value, high[key]) for key, value in low.items()}


def _facts(low: _Facts, high: _Facts, share: tuple[int, int]) -> _Facts:
    facts = {}
    for name, (one, other) in _pairs(low, high).items():
        if len(one) != len(other):
            raise _NotLinearError
        facts[name] = tuple(_fact(a, b, share) for a, b in zip(one, other, strict=True))
    return facts


def _fact(low: TensorFacts, high: TensorFacts, share: tuple[int, int]) -> TensorFacts:
    if low == high:
        return low
    if (low.dtype, low.requires_grad, len(low.shape)) != (high.dtype, high.requires_grad, len(high.shape)):
        raise _NotLinearError
    shape = tuple(_interpolate_int(a, b, share) for a, b in zip(low.shape, high.shape, strict=True))
    return TensorFacts(shape, low.dtype, low.requires_grad)


def _interpolate_int(low: int, high: int, share: tuple[int, int]) -> int:
    value, rest = divmod(low * share[1] + (high - low) * share[0], share[1])
    if rest or value < 0:
        raise _NotLinearError
    return value


def _work(low: Work, high: Work, share: tuple[int, int]) -> Work:
    if low == high:
        return low
    part = share[0] / share[1]
    return Work(*(a + (b - a) * part for a, b in zip(_numbers(low), _numbers(high), strict=True)))


def _numbers(work: Work) -> tuple[float, float, float]:
    return work.flops, work.bytes, work.ops
