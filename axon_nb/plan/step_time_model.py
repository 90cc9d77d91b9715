"""A model, its inputs and its loss, made on fake tensors from the forms in which they may be given."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from axon_nb.errors import UsageError
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.plan.models import CapturedModel

__all__ = ["Given", "Subject", "first_line", "sum_of"]


def first_line(error: Exception) -> str:
    """What an exception says, without the rest."""
    text = str(error).strip().splitlines()
    return text[0] if text else repr(error)


def sum_of(output: Any) -> torch.Tensor:
    """A number that depends on all that a model returns and that has a gradient."""
    parts = [
        leaf.float().sum() for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    return sum(parts[1:], parts[0]) if parts else torch.zeros(())


@dataclass(frozen=True)
class Subject:
    """A model on fake tensors, and how its loss is computed."""

    model: nn.Module
    args: tuple[Any, ...] | None
    """None: it is not known what it is called with."""
    loss: Callable[[Any], torch.Tensor]

    def computing_in(self, dtype: torch.dtype) -> Subject:
        """The same model with its parameters converted, and floating point inputs with them; buffers stay."""

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        made: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            # Not `Module.to`: it swaps tensors, which fake ones that are referred to do not allow.
            for name, own in module._parameters.items():
                if own is not None:
                    known = made.setdefault(id(own), nn.Parameter(cast(own.detach()), requires_grad=own.requires_grad))
                    module._parameters[name] = known
        return Subject(self.model, tree_map_only(torch.Tensor, cast, self.args), self.loss)


@dataclass(frozen=True)
class Given:
    """What a user has given."""

    model: Any
    """A function without arguments that makes a model, a model, a `CapturedModel`, or a `GPTConfig`."""
    inputs: Any = None
    """A tensor, a tuple of arguments, a function that makes either; tensors may be described by objects that have a
    ``shape``, in which ``"batch"`` and ``"seq"`` stand for these sizes, and a ``dtype``."""
    target: Any = None
    """The same forms; None: the loss takes the output alone."""
    loss: Callable[..., torch.Tensor] | None = None
    batch: int = 1
    seq: int | None = None

    def real(self) -> Subject:
        """With data, to be run and measured."""
        return self._subject(None)

    def fake(self, mode: FakeTensorMode) -> Subject:
        """Without data.

        Raises:
            UsageError: the model cannot be built so.
        """
        return self._subject(mode)

    def _subject(self, mode: FakeTensorMode | None) -> Subject:
        given = self
        if isinstance(self.model, GPTConfig):
            given = self._of_config(self.model)
        elif isinstance(self.model, CapturedModel):
            given = self._of_captured(self.model)
        elif is_dataclass(self.model) and isinstance(self.model, type):
            name = self.model.__name__
            raise UsageError(f"model={name} is a class of configs: give one of it, {name}(…).")
        elif is_dataclass(self.model):
            raise UsageError(
                f"a {type(self.model).__name__}: the one config that is known is axon_nb.parallel.models.GPTConfig; "
                "give a function without arguments that makes the model, with inputs=."
            )
        model = given._build(mode)
        if given.inputs is None:
            return Subject(model, None, sum_of)
        args = given._tensors(given.inputs, mode)
        return Subject(model, args if isinstance(args, tuple) else (args,), given._loss_of(mode))

    def _of_config(self, config: GPTConfig) -> Given:
        seq = self.seq or config.context
        if seq > config.context:
            raise UsageError(
                f"seq={seq}: the model's context is {config.context} tokens; GPTConfig(context={seq}) has as many."
            )
        tokens = _Described((self.batch, seq), torch.int64)
        target = tokens if self.target is None and self.loss is None else self.target
        loss = next_byte_loss if self.loss is None else self.loss
        return Given(lambda: GPT(config), self.inputs or tokens, target, loss, self.batch, self.seq)

    def _of_captured(self, captured: CapturedModel) -> Given:
        factory = pickle.loads(captured.factory)
        if self.inputs is None:
            with torch.device("meta"):
                config = getattr(factory(), "config", None)
            if isinstance(config, GPTConfig):
                return replace(self._of_config(config), model=factory)
        return replace(self, model=factory)

    def _build(self, mode: FakeTensorMode | None) -> nn.Module:
        if isinstance(self.model, nn.Module):
            # A copy: what is measured takes steps.
            return copy.deepcopy(self.model) if mode is None else _without_data(self.model, mode)
        if not callable(self.model):
            raise UsageError(
                f"model={self.model!r}: give a function without arguments that makes one, or a GPTConfig(blocks=24)."
            )
        try:
            if mode is None:
                built = self.model()
            else:
                with mode:
                    built = self.model()
        except Exception as error:
            raise UsageError(
                f"the model cannot be built: {type(error).__name__}: {first_line(error)}; a plan needs a function "
                "without arguments that makes it from shapes alone, and loads no weights."
            ) from error
        if not isinstance(built, nn.Module):
            raise UsageError(f"model() has returned a {type(built).__name__}: it is to make a torch.nn.Module.")
        return built

    def _loss_of(self, mode: FakeTensorMode | None) -> Callable[[Any], torch.Tensor]:
        loss = self.loss
        if loss is None:
            return sum_of
        if self.target is None:
            return loss
        target = self._tensors(self.target, mode)
        return lambda output: loss(output, target)

    def _tensors(self, given: Any, mode: FakeTensorMode | None) -> Any:
        described = isinstance(given, torch.Tensor) or hasattr(given, "shape")
        try:
            made = given() if callable(given) and not described else given
        except Exception as error:
            raise UsageError(
                f"inputs= or target= cannot be made: {type(error).__name__}: {first_line(error)}; each is a function "
                "without arguments, tensors, or their shapes."
            ) from error
        parts = made if isinstance(made, tuple) else (made,)
        sizes = {"batch": self.batch, "seq": self.seq}
        found = tuple(_made(part, sizes) for part in parts)
        if mode is not None:
            known = mode
            found = tree_map_only(
                torch.Tensor, lambda t: t if isinstance(t, FakeTensor) else known.from_tensor(t), found
            )
        return found if isinstance(made, tuple) else found[0]


@dataclass(frozen=True)
class _Described:
    shape: tuple[int | str, ...]
    dtype: torch.dtype


def _made(given: Any, sizes: Mapping[str, int | None]) -> Any:
    """A tensor of zeros for what describes one; anything else as it is."""
    if isinstance(given, torch.Tensor) or not hasattr(given, "shape"):
        return given
    shape: list[Any] = [sizes.get(size, size) if isinstance(size, str) else size for size in given.shape]
    lost = [said for said, size in zip(given.shape, shape, strict=True) if not isinstance(size, int)]
    if lost:
        raise UsageError(f"{given}: the size {lost[0]!r} is not known; give {lost[0]}=….")
    dtype = given.dtype if isinstance(given.dtype, torch.dtype) else getattr(torch, str(given.dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{given}: {given.dtype!r} is no dtype of torch.")
    return torch.zeros(shape, dtype=dtype)


def _without_data(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy on fake tensors."""
    fakes: dict[int, Any] = {}
    for parameter in model.parameters():
        fake = mode.from_tensor(parameter.detach())
        fakes[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    fakes |= {id(buffer): mode.from_tensor(buffer) for buffer in model.buffers()}
    return copy.deepcopy(model, fakes)
