"""Traces one training step of a model on fake tensors, which have shapes and no data.

Nothing is allocated or computed, so models of any size can be traced on a laptop; no process group is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils.module_tracker import ModuleTracker

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import make_units
from axon_nb.plan.hardware.rates import Work
from axon_nb.plan.tracing.fake_tensors import WithoutCuda, as_with_data, patched_apply, without_tracebacks
from axon_nb.plan.tracing.model_parts import equal_blocks
from axon_nb.plan.tracing.op_counter import OpCounter, tensors_in
from axon_nb.plan.tracing.subject import ModelSource, first_line


@dataclass(frozen=True, slots=True)
class TensorFacts:
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
    trace.unknown = counted.unknown
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
