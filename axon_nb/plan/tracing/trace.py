"""Traces one training step of a model on fake tensors, which have shapes and no data.

Nothing is allocated or computed, so models of any size can be traced on a laptop; no process group is used. For many
batch sizes two or three traces are made; the others are interpolated linearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils.module_tracker import ModuleTracker

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import describe_units, make_units
from axon_nb.plan.hardware import Work
from axon_nb.plan.muon import groups, is_muon, matrix_names
from axon_nb.plan.tracing.fake_tensors import WithoutCuda, as_with_data, patched_apply, without_tracebacks
from axon_nb.plan.tracing.operations import OpCounter, tensors_in
from axon_nb.plan.tracing.subject import ModelSource, checked_module_filter, equal_blocks, first_line


class TensorFacts(Struct, frozen=True):
    """A tensor's metadata."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass
class ModelTrace:
    """What a step of a model does on one process, unsharded."""

    model: nn.Module
    """On fake tensors."""
    has_inputs: bool = False
    """Whether the inputs, and so all fields below, are known."""
    ready: list[str] = field(default_factory=list)
    """Names of the parameters that get a gradient, in the order in which they get it."""
    inputs: dict[str, tuple[TensorFacts, ...]] = field(default_factory=dict)
    """By module: its input tensors."""
    outputs: dict[str, tuple[TensorFacts, ...]] = field(default_factory=dict)
    """By module: its output tensors."""
    saved: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    """Bytes that forward saves for backward, without parameters, each storage once. By the saving module and the
    nearest modules with parameters from whose outputs the tensor was computed."""
    grad_uses: dict[str, int] = field(default_factory=dict)
    """How often the optimizer's step reads each parameter's gradient; empty without an optimizer."""
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    """By phase, then by innermost module; work outside the model, and that of the optimizer, has an empty name."""
    attention: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By module: bytes of the keys and values of each attention, and of one element."""
    unknown: dict[str, float] = field(default_factory=dict)
    """Bytes moved by operations whose FLOPs are unknown, by name."""
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Results of `cached`, which do not depend on the batch."""
    sums: dict[Any, Work] = field(default_factory=dict, init=False, repr=False)
    """Known sums of `work`."""

    def cached(self, name: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` computes, once per name.

        Args:
            name: The key, with everything else that the result depends on.
            make: Computes it.
        """
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The model's named parameters."""
        parameters: list[tuple[str, nn.Parameter]] = self.cached(
            "parameters", lambda: list(self.model.named_parameters())
        )
        return parameters

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the model's children and blocks, which divide its work."""

        def named() -> tuple[str, ...]:
            inside = set(map(id, (*make_units(self.model, None), *self.model.children())))
            return tuple(name for name, module in self.model.named_modules() if id(module) in inside)

        parts: tuple[str, ...] = self.cached("parts", named)
        return parts

    @property
    def blocks(self) -> frozenset[str]:
        """Names of the model's equal blocks: those that activation checkpointing recomputes."""
        blocks: frozenset[str] = self.cached("blocks", lambda: equal_blocks(self.model))
        return blocks

    def total(self, phase: str) -> Work:
        """The work of all children."""
        return sum(self.work.get(phase, {}).values(), Work())


def trace_model(
    source: ModelSource, *, optimizer: Callable[..., Optimizer] | None = None, dtype: torch.dtype | None = None
) -> ModelTrace:
    """Build a model on fake tensors and trace one step.

    Args:
        source: The model, its inputs and its loss. Without inputs it is built and not called.
        optimizer: Made from the parameters; its second step is counted too.
        dtype: Compute dtype of forward and backward, as with FSDP's mixed precision; the optimizer steps the original
            parameters. None: as the model makes it.

    Raises:
        UsageError: the model cannot be built or run without data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, patched_apply(), WithoutCuda(), without_tracebacks():
        subject = source.fake(mode)
        trace = ModelTrace(subject.model)
        if subject.args is None:
            return trace
        if dtype is not None:
            subject = source.fake(mode).computing_in(dtype)
    counted = OpCounter(subject.model)
    handles = list(_watched(subject.model, trace, counted))
    try:
        with ExitStack() as stack:
            stack.enter_context(mode)
            stack.enter_context(WithoutCuda())
            stack.enter_context(as_with_data())
            stack.enter_context(without_tracebacks())
            counted.tracker = stack.enter_context(ModuleTracker())
            stack.enter_context(counted)
            with torch.autograd.graph.saved_tensors_hooks(counted.save, lambda saved: saved):
                number = subject.loss(subject.model(*(subject.args or ())))
            if number.requires_grad:
                counted.phase = "backward"
                number.backward()
            _step(trace.model, subject.model, optimizer, counted)
    except Exception as error:
        raise UsageError(
            f"{type(subject.model).__name__} cannot run a step on tensors without data ({type(error).__name__}: "
            f"{first_line(error)}): check that inputs= and loss= fit it, and that no control flow depends on values."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    trace.work, trace.saved, trace.has_inputs = counted.by_phase, dict(counted.saved), True
    trace.unknown, trace.attention = counted.unknown, counted.attention
    names = {id(parameter.grad): name for name, parameter in trace.parameters}
    trace.grad_uses = {name: counted.uses[key] for key, name in names.items() if key in counted.uses}
    return trace


def _step(
    model: nn.Module, computed: nn.Module, optimizer: Callable[..., Optimizer] | None, counted: OpCounter
) -> None:
    counted.phase = ""
    if optimizer is None:
        return
    if computed is not model:
        for target, other in zip(model.parameters(), computed.parameters(), strict=True):
            target.grad = None if other.grad is None else torch.zeros_like(target)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if is_muon(optimizer):  # by formula: `axon_nb.plan.muon`
        trained = [p for p in groups(model, matrix_names(model))[1]["params"] if p.grad is not None]
        optimizer = torch.optim.AdamW
    if not trained:
        return
    made = optimizer(trained)
    made.step()  # makes the states
    counted.phase = "optimizer"
    made.step()


def _facts(value: Any) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors_in(value))


def _watched(model: nn.Module, trace: ModelTrace, counted: OpCounter) -> Iterator[Any]:
    for name, module in model.named_modules():

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            trace.inputs[name], trace.outputs[name] = _facts((args, kwargs)), _facts(output)
            if module._parameters:
                counted.note_output(name, output)

        yield module.register_forward_hook(note, with_kwargs=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(lambda _, name=name: trace.ready.append(name))


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
        self.source, self._optimizer, self._dtype = source, optimizer, dtype
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
            replace(self.source, batch=batch), optimizer=None if first else self._optimizer, dtype=self._dtype
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
            **{
                name: _on_line(getattr(low, name), getattr(high, name), share)
                for name in ("inputs", "outputs", "attention", "saved", "work")
            },
        )
    except _NotLinearError:
        return None


def _on_line(low: Any, high: Any, share: tuple[int, int]) -> Any:
    """Return what lies on the line through two values, part by part."""
    if low == high:
        return low
    if isinstance(low, dict):
        if low.keys() != high.keys():
            raise _NotLinearError
        return {key: _on_line(value, high[key], share) for key, value in low.items()}
    if isinstance(low, tuple | list):
        if len(low) != len(high):
            raise _NotLinearError
        return type(low)(_on_line(a, b, share) for a, b in zip(low, high, strict=True))
    if isinstance(low, TensorFacts):
        if (low.dtype, low.requires_grad) != (high.dtype, high.requires_grad):
            raise _NotLinearError
        return TensorFacts(_on_line(low.shape, high.shape, share), low.dtype, low.requires_grad)
    if isinstance(low, Work):
        part = share[0] / share[1]
        return Work(*(a + (b - a) * part for a, b in zip(astuple(low), astuple(high), strict=True)))
    value, rest = divmod(low * share[1] + (high - low) * share[0], share[1])
    if rest or value < 0:
        raise _NotLinearError
    return value
