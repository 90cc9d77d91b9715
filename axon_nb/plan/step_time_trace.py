"""One training step of a model on fake tensors, which have shapes and no data: what it computes, in which order.

Nothing is allocated or computed, so that models of any size are traced on a laptop; no process group takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils.module_tracker import ModuleTracker

from axon_nb.errors import UsageError
from axon_nb.plan.simulate_convert import patched_apply
from axon_nb.plan.step_time_counting import OpCounter, tensors_in
from axon_nb.plan.step_time_model import ModelSource, first_line
from axon_nb.plan.step_time_work import Work
from axon_nb.plan.without_cards import WithoutCuda

__all__ = ["ModelTrace", "TensorFacts", "trace_model"]


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor without its data."""

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
    """What a step of a model does, on one process, unsharded."""

    model: nn.Module
    """On fake tensors."""
    called: bool = False
    """Whether it is known what the model is called with, and so all that follows."""
    ready: list[str] = field(default_factory=list)
    """Names of the parameters that get a gradient, in the order in which they get it."""
    inputs: dict[str, tuple[TensorFacts, ...]] = field(default_factory=dict)
    """By module: the tensors that it is called with."""
    outputs: dict[str, tuple[TensorFacts, ...]] = field(default_factory=dict)
    """By module: the tensors that it returns."""
    saved: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    """Bytes that forward keeps for backward, parameters aside, each storage once: by the module that keeps them, and
    the modules with parameters from whose outputs they were computed, as far as no other is between."""
    grad_uses: dict[str, int] = field(default_factory=dict)
    """How often the optimizer's step takes each parameter's gradient; empty without an optimizer."""
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    """By phase, then by child of the model; what is outside of all children is under an empty name."""
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What `once` has worked out."""

    def once(self, name: Any, make: Callable[[], Any]) -> Any:
        """What follows from the model alone, worked out when it is first asked for.

        Args:
            name: Of it, with all that it depends on besides.
            make: Works it out.
        """
        if name not in self.cache:
            self.cache[name] = make()
        return self.cache[name]

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The model's, with their names."""
        found: list[tuple[str, nn.Parameter]] = self.cached("parameters", lambda: list(self.model.named_parameters()))
        return found

    @cached_property
    def largest_outputs(self) -> dict[str, int]:
        """By child of the model: bytes of the largest tensor that a module in it returns; of the model under ""."""
        found: dict[str, int] = {}
        for name, facts in self.outputs.items():
            child = name.partition(".")[0]
            found[child] = max([found.get(child, 0), *(fact.nbytes for fact in facts)])
        return found

    def total(self, phase: str) -> Work:
        """Of all children."""
        return sum(self.work.get(phase, {}).values(), Work())


def trace_model(
    given: ModelSource, *, optimizer: Callable[..., Optimizer] | None = None, dtype: torch.dtype | None = None
) -> ModelTrace:
    """Build a model on fake tensors and take one step.

    Args:
        given: The model, what it is called with, and its loss. Without inputs it is built and not called.
        optimizer: Made from the parameters; its second step is counted, too.
        dtype: In which forward and backward compute, as with FSDP's mixed precision; the optimizer has the parameters
            as they are made. None: all as it is made.

    Raises:
        UsageError: the model cannot be built or run without data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, patched_apply(), WithoutCuda():
        subject = given.fake(mode)
        told = ModelTrace(subject.model)
        if subject.args is None:
            return told
        if dtype is not None:
            subject = given.fake(mode).computing_in(dtype)
    counted = OpCounter(subject.model)
    handles = list(_watched(subject.model, told, counted))
    try:
        with ExitStack() as stack:
            stack.enter_context(mode)
            stack.enter_context(WithoutCuda())
            counted.tracker = stack.enter_context(ModuleTracker())
            stack.enter_context(counted)
            with torch.autograd.graph.saved_tensors_hooks(counted.keep, lambda kept: kept):
                number = subject.loss(subject.model(*(subject.args or ())))
            if number.requires_grad:
                counted.phase = "backward"
                number.backward()
            _step(told.model, subject.model, optimizer, counted)
    except Exception as error:
        raise UsageError(
            f"{type(subject.model).__name__} cannot run a step on tensors without data: {type(error).__name__}: "
            f"{first_line(error)}; see that inputs= and loss= fit it, and that no value decides what is computed."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    told.work, told.saved, told.has_inputs = counted.found, dict(counted.saved), True
    names = {id(parameter.grad): name for name, parameter in told.parameters}
    told.grad_uses = {name: counted.uses[key] for key, name in names.items() if key in counted.uses}
    return told


def _step(
    model: nn.Module, computed: nn.Module, optimizer: Callable[..., Optimizer] | None, counted: OpCounter
) -> None:
    counted.phase = ""
    if optimizer is None:
        return
    if computed is not model:
        for own, other in zip(model.parameters(), computed.parameters(), strict=True):
            own.grad = None if other.grad is None else torch.zeros_like(own)
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if not trained:
        return
    made = optimizer(trained)
    made.step()  # makes the states
    counted.phase = "optimizer"
    made.step()


def _facts(value: Any) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors_in(value))


def _watched(model: nn.Module, told: ModelTrace, counted: OpCounter) -> Iterator[Any]:
    for name, module in model.named_modules():

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            told.inputs[name], told.outputs[name] = _facts((args, kwargs)), _facts(output)
            if module._parameters:
                counted.note_output(name, output)

        yield module.register_forward_hook(note, with_kwargs=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.ready.append(name))
