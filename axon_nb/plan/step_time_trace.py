"""One training step of a model on fake tensors, which have shapes and no data: what it computes, in which order.

Nothing is allocated or computed, so that models of any size are traced on a laptop; no process group takes part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from axon_nb.errors import UsageError
from axon_nb.plan.step_time_model import Given, first_line
from axon_nb.plan.step_time_work import Work

__all__ = ["ModelTrace", "TensorFacts", "trace_model"]

aten = torch.ops.aten


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
    saved: dict[str, int] = field(default_factory=dict)
    """Bytes that forward keeps for backward, parameters aside, by child of the model; each storage once."""
    grad_uses: dict[str, int] = field(default_factory=dict)
    """How often the optimizer's step takes each parameter's gradient; empty without an optimizer."""
    work: dict[str, dict[str, Work]] = field(default_factory=dict)
    """By phase, then by child of the model; what is outside of all children is under an empty name."""

    def total(self, phase: str) -> Work:
        """Of all children."""
        return sum(self.work.get(phase, {}).values(), Work())


def trace_model(given: Given, *, optimizer: Callable[..., Optimizer] | None = None) -> ModelTrace:
    """Build a model on fake tensors and take one step.

    Args:
        given: The model, what it is called with, and its loss. Without inputs it is built and not called.
        optimizer: Made from the parameters; its second step is counted, too.

    Raises:
        UsageError: the model cannot be built or run without data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        subject = given.fake(mode)
    told = ModelTrace(subject.model)
    if subject.args is None:
        return told
    counted = _Counting(type(subject.model).__name__)
    handles = list(_watched(subject.model, told))
    try:
        with ExitStack() as stack:
            stack.enter_context(mode)
            counted.tracker = stack.enter_context(ModuleTracker())
            stack.enter_context(counted)
            with torch.autograd.graph.saved_tensors_hooks(counted.keep, lambda kept: kept):
                number = subject.loss(subject.model(*subject.args))
            if number.requires_grad:
                counted.phase = "backward"
                number.backward()
            _step(subject.model, optimizer, counted)
    except Exception as error:
        raise UsageError(
            f"{type(subject.model).__name__} cannot run a step on tensors without data: {type(error).__name__}: "
            f"{first_line(error)}; see that inputs= and loss= fit it, and that no value decides what is computed."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    told.work, told.saved, told.called = counted.found, dict(counted.saved), True
    names = {id(parameter.grad): name for name, parameter in subject.model.named_parameters()}
    told.grad_uses = {name: counted.uses[key] for key, name in names.items() if key in counted.uses}
    return told


def _step(model: nn.Module, optimizer: Callable[..., Optimizer] | None, counted: _Counting) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    counted.phase = ""
    if optimizer is None or not trained:
        return
    made = optimizer(trained)
    made.step()  # makes the states
    counted.phase = "optimizer"
    made.step()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _facts(value: Any) -> tuple[TensorFacts, ...]:
    return tuple(TensorFacts(tuple(one.shape), one.dtype, one.requires_grad) for one in _tensors(value))


def _watched(model: nn.Module, told: ModelTrace) -> Iterator[Any]:
    for name, module in model.named_modules():

        def note(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            told.inputs[name], told.outputs[name] = _facts((args, kwargs)), _facts(output)

        yield module.register_forward_hook(note, with_kwargs=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(lambda _, name=name: told.ready.append(name))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_back(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


# torch counts the attention of GPUs only.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_back,
}


class _Counting(TorchDispatchMode):
    """Counts what is computed."""

    def __init__(self, root: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        """What is counted now; empty: nothing."""
        self.found: dict[str, dict[str, Work]] = {}
        self.saved: Counter[str] = Counter()
        """Bytes kept for backward, by child."""
        self._kept: set[int] = set()
        self.uses: Counter[int] = Counter()
        """How often the optimizer takes each tensor, by its id."""
        self.tracker: Any = None
        self._prefix = f"{root}."

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.phase and not func.is_view:
            place = self.found.setdefault(self.phase, {})
            child = "" if self.phase == "optimizer" else self._child()
            if self.phase == "optimizer":
                self.uses.update(map(id, _tensors((args, kwargs))))
            place[child] = place.get(child, Work()) + _work_of(func._overloadpacket, args, kwargs, result)
        return result

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note a tensor that is saved for backward."""
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and storage._cdata not in self._kept:
            self._kept.add(storage._cdata)
            self.saved[self._child()] += storage.nbytes()
        return tensor

    def _child(self) -> str:
        for name in self.tracker.parents:
            if name.startswith(self._prefix):
                return str(name[len(self._prefix) :].partition(".")[0])
        return ""


def _work_of(packet: Any, args: Any, kwargs: Any, result: Any) -> Work:
    if packet in flop_registry:
        return Work(flops=float(flop_registry[packet](*args, **kwargs, out_val=result)), ops=1)
    if packet in _FORMULAS:
        return Work(flops=float(_FORMULAS[packet](*args, **kwargs)), ops=1)
    return Work(bytes=float(sum(tensor.nbytes for tensor in _tensors((args, kwargs, result)))), ops=1)
