"""The model, inputs and loss of a traced step, and what users select by name or class: optimizers, dtypes, modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from axon_nb.errors import UsageError
from axon_nb.parallel.activation_checkpoint import matches
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.plan.errors import PlanError
from axon_nb.plan.hugging_face import HuggingFaceModel, next_token_loss
from axon_nb.plan.models import CapturedModel


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    text = str(error).strip().splitlines()
    return text[0] if text else repr(error)


def sum_of(output: Any) -> torch.Tensor:
    """Reduce a model's output to a scalar that depends on every tensor in it that has a gradient."""
    parts = [
        leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())


@dataclass(frozen=True)
class BuiltModel:
    """A model, its arguments and its loss function."""

    model: nn.Module
    args: tuple[Any, ...] | None
    """None: the inputs are unknown."""
    loss: Callable[[Any], torch.Tensor]

    def computing_in(self, dtype: torch.dtype) -> BuiltModel:
        """Convert parameters and floating-point inputs to a dtype; buffers stay."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        made: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            # Not `Module.to`: it swaps tensors, which fails for fake tensors with weak references.
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    known = made.setdefault(
                        id(parameter), nn.Parameter(cast(parameter.detach()), requires_grad=parameter.requires_grad)
                    )
                    module._parameters[name] = known
        return BuiltModel(self.model, tree_map_only(torch.Tensor, cast, self.args), self.loss)


@dataclass(frozen=True)
class ModelSource:
    """A model and its inputs, in the forms that users may give them."""

    model: Any
    """A function that makes a model, a model, a `CapturedModel`, or a `GPTConfig`."""
    inputs: Any = None
    """A tensor, a tuple of arguments, or a function that makes either. Objects with ``shape`` and ``dtype`` describe
    tensors; in a shape, ``"batch"`` and ``"seq"`` stand for those sizes."""
    target: Any = None
    """The same forms; None: the loss takes only the output."""
    loss: Callable[..., torch.Tensor] | None = None
    batch: int = 1
    seq: int | None = None

    def real(self) -> BuiltModel:
        """Build the model with data, to run and measure it."""
        return self._subject(None)

    def fake(self, mode: FakeTensorMode) -> BuiltModel:
        """Build the model on fake tensors.

        Raises:
            UsageError: the model cannot be built in this way.
        """
        return self._subject(mode)

    def _subject(self, mode: FakeTensorMode | None) -> BuiltModel:
        source = self
        if isinstance(self.model, GPTConfig):
            source = self._of_config(self.model)
        elif isinstance(self.model, CapturedModel):
            source = self._of_captured(self.model)
        elif isinstance(self.model, HuggingFaceModel) and self.inputs is None:
            source = self._of_hugging_face(self.model)
        elif is_dataclass(self.model) and isinstance(self.model, type):
            name = self.model.__name__
            raise UsageError(f"model must be an instance of {name}, not the class: {name}(…).")
        elif is_dataclass(self.model):
            raise UsageError(
                f"model has type {type(self.model).__name__}, but the only config supported is "
                "axon_nb.parallel.models.GPTConfig: give a function that makes the model, and inputs=."
            )
        model = source._build(mode)
        if source.inputs is None:
            return BuiltModel(model, None, sum_of)
        args = source._tensors(source.inputs, mode)
        return BuiltModel(model, args if isinstance(args, tuple) else (args,), source._loss_of(mode))

    def _of_config(self, config: GPTConfig) -> ModelSource:
        seq = self.seq or config.context
        if seq > config.context:
            raise UsageError(f"seq must be at most the model's context, {config.context} tokens; got {seq}.")
        tokens = _Described((self.batch, seq), torch.int64)
        target = tokens if self.target is None and self.loss is None else self.target
        loss = next_byte_loss if self.loss is None else self.loss
        return ModelSource(lambda: GPT(config), self.inputs or tokens, target, loss, self.batch, self.seq)

    def _of_hugging_face(self, model: HuggingFaceModel) -> ModelSource:
        tokens = _Described((self.batch, model.seq(self.seq)), torch.int64)
        return replace(self, inputs=tokens, target=self.target or tokens, loss=self.loss or next_token_loss)

    def _of_captured(self, captured: CapturedModel) -> ModelSource:
        factory = pickle.loads(captured.factory)
        if self.inputs is None:
            with torch.device("meta"):
                config = getattr(factory(), "config", None)
            if isinstance(config, GPTConfig):
                return replace(self._of_config(config), model=factory)
        return replace(self, model=factory)

    def _build(self, mode: FakeTensorMode | None) -> nn.Module:
        if isinstance(self.model, nn.Module):
            # A copy, because measuring trains it.
            return copy.deepcopy(self.model) if mode is None else _without_data(self.model, mode)
        if not callable(self.model):
            raise UsageError(
                f"model must be a function without arguments that makes one, or a GPTConfig(…); got {self.model!r}."
            )
        try:
            if mode is None:
                built = self.model()
            else:
                with mode:
                    built = self.model()
        except Exception as error:
            raise UsageError(
                f"The model cannot be built ({type(error).__name__}: {first_line(error)}): pass a function without "
                "arguments that makes it without loading weights."
            ) from error
        if not isinstance(built, nn.Module):
            raise UsageError(f"model() must return a torch.nn.Module; it returned {type(built).__name__}.")
        return built

    def _loss_of(self, mode: FakeTensorMode | None) -> Callable[[Any], torch.Tensor]:
        loss = self.loss
        if loss is None:
            return sum_of
        if self.target is None:
            return loss
        target = self._tensors(self.target, mode)
        return lambda output: loss(output, target)

    def _tensors(self, value: Any, mode: FakeTensorMode | None) -> Any:
        described = isinstance(value, torch.Tensor) or hasattr(value, "shape")
        try:
            made = value() if callable(value) and not described else value
        except Exception as error:
            raise UsageError(
                f"inputs= or target= failed ({type(error).__name__}: {first_line(error)}): each must be a function "
                "without arguments, tensors, or TensorSpecs."
            ) from error
        parts = made if isinstance(made, tuple) else (made,)
        sizes = {"batch": self.batch, "seq": self.seq}
        tensors = tuple(_made(part, sizes) for part in parts)
        if mode is not None:
            known = mode
            tensors = tree_map_only(
                torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else known.from_tensor(t), tensors
            )
        return tensors if isinstance(made, tuple) else tensors[0]


@dataclass(frozen=True)
class _Described:
    shape: tuple[int | str, ...]
    dtype: torch.dtype


def _made(spec: Any, sizes: Mapping[str, int | None]) -> Any:
    """Return a tensor of zeros for a description; anything else unchanged."""
    if isinstance(spec, torch.Tensor) or not hasattr(spec, "shape"):
        return spec
    shape: list[Any] = [sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape]
    unknown = [name for name, size in zip(spec.shape, shape, strict=True) if not isinstance(size, int)]
    if unknown:
        raise UsageError(f"{spec} needs a size for {unknown[0]!r}: give {unknown[0]}=….")
    dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else getattr(torch, str(spec.dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{spec}: {spec.dtype!r} is not a torch dtype.")
    return torch.zeros(shape, dtype=dtype)


def _without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy a model onto fake tensors."""
    fakes: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach())
        fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    fakes |= {id(buffer): mode.from_tensor(buffer) for buffer in model.buffers()}
    return copy.deepcopy(model, fakes)


def resolve_optimizer(optimizer: Any) -> Callable[..., Optimizer] | None:
    """Return what creates an optimizer: the callable given, or the class of that name in `torch.optim`; or None.

    Raises:
        PlanError: there is no such optimizer, or it is neither a name nor callable.
    """
    if isinstance(optimizer, Optimizer):
        raise PlanError(f"optimizer must be a class or a name, not an instance; got a {type(optimizer).__name__}.")
    if optimizer is None or (callable(optimizer) and not isinstance(optimizer, str)):
        made: Callable[..., Optimizer] | None = optimizer
        return made
    known: dict[str, Callable[..., Optimizer]] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if not isinstance(optimizer, str) or optimizer.lower() not in known:
        raise PlanError(
            f"optimizer must be a class, a function, or one of {', '.join(sorted(known))}; got {optimizer!r}."
        )
    return known[optimizer.lower()]


def resolve_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating-point dtype from itself or its name; None stays None.

    Raises:
        PlanError: it is not a floating-point dtype.
    """
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError(f"mixed_precision must be a floating-point dtype, such as torch.bfloat16; got {value!r}.")
    return dtype


def module_filter(value: Any, name: str) -> Any:
    """Return what selects the modules, with a class name turned into a function.

    Raises:
        PlanError: it is none of these.
    """
    if isinstance(value, str):
        return lambda module: type(module).__name__ == value
    kinds = tuple(value) if isinstance(value, list) else value
    known = all(isinstance(kind, type) for kind in kinds) if isinstance(kinds, tuple) else isinstance(kinds, int | type)
    if kinds is None or known or callable(kinds):
        return kinds
    raise PlanError(f"{name} must be a class, its name, classes, or a function of a module; got {value!r}.")


def checked_module_filter(model: nn.Module, value: Any, name: str) -> Any:
    """Return the same, after checking that the model has modules of the named classes.

    Raises:
        PlanError: it has none, or the option is invalid.
    """
    kinds = module_filter(value, name)
    named = isinstance(value, str | type | tuple | list)  # a function may select none: then the model is one unit
    if not named or any(matches(module, kinds) for module in model.modules()):
        return kinds
    names = sorted({type(module).__name__ for module in model.modules()} - {type(model).__name__})
    raise PlanError(f"{name}={value!r} matches no module of {type(model).__name__}, which has {', '.join(names)}.")
