"""Watches what the modules of a model compute, what reaches its parameters, and what an optimizer makes of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from axon_nb.engine.parity.cuts import Cuts

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Sink(Protocol):
    """Takes each tensor as it is computed."""

    def __call__(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        *,
        index: int = 0,
        call: int = 0,
        module: nn.Module | None = None,
    ) -> torch.Tensor | None:
        """Take a tensor; the arguments are the fields of `records.comparison.Observation`.

        Returns what replaces a gradient, or None.
        """


def is_wrapped_once(module: nn.Module) -> bool:
    """Whether the module only wraps another one under the name ``module``, as DDP does."""
    children = dict(module.named_children())
    return list(children) == ["module"] and type(module).__module__.startswith(
        ("torch.nn.parallel", "axon_nb.parallel")
    )


def clean_name(name: str) -> str:
    """Return a path without the names that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _inner(model: nn.Module) -> nn.Module:
    while is_wrapped_once(model):
        model = model.get_submodule("module")
    return model


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in _inner(model).named_modules():
        inside = [part for part in clean_name(name).split(".") if part]
        yield ".".join(inside), module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters under the names that they have without wrappers."""
    for name, parameter in _inner(model).named_parameters():
        yield clean_name(name), parameter


class Recorder:
    """Passes tensors to a sink while it is entered.

    Args:
        models: By prefix, the models.
        sink: Takes the tensors.
        is_discarded: Says whether a forward that runs is discarded, as one that only infers shapes.
        cuts: Sees what the models get; entered with the recorder.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        sink: Sink,
        is_discarded: Callable[[], bool] = lambda: False,
        *,
        cuts: Cuts,
    ) -> None:
        self._models, self._cuts = models, cuts
        self._is_discarded = is_discarded
        self._sink = sink
        self._handles: list[Any] = []
        self.steps = 0
        """Steps of optimizers."""
        self._calls: Counter[tuple[str, str]] = Counter()
        self._depth = 0

    def __enter__(self) -> Recorder:
        for prefix, model in self._models.items():
            for name, parameter in named_parameters(model):
                self._sink("start", prefix + name, parameter)
            seen = set()
            for name, module in _named_modules(model):
                path = prefix + name
                if path in seen:  # a wrapper and what it wraps
                    continue
                seen.add(path)
                self._handles += [
                    module.register_forward_pre_hook(self._before(path), with_kwargs=True),
                    module.register_forward_hook(self._after(path)),
                ]
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def finish(self) -> None:
        """Pass the gradients on, if the cell made no optimizer step."""
        if not self.steps:
            self._gradients()

    def _before(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = self._cuts.enter_module(path, args, kwargs)
            self._tensors("input", path, module, (*args, *kwargs.values()))
            return args, kwargs

        return hook

    def _after(self, path: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if isinstance(module, _DROPOUT) and module.training and module.p and args and not self._is_discarded():
                # Each world draws its own masks: only those of replicas can be compared.
                call = self._calls["mask", path]
                self._calls["mask", path] += 1
                self._sink("mask", path, (output != 0).to(output.dtype), call=call, module=module)
                output = args[0]
            self._tensors("output", path, module, output if isinstance(output, tuple) else (output,))
            self._cuts.leave_module(output)
            return output

        return hook

    def _tensors(self, kind: str, path: str, module: nn.Module, values: Iterable[Any]) -> None:
        if self._is_discarded() or (module.training and not torch.is_grad_enabled()):
            return  # a pipeline infers its shapes so, with or without gradients
        call = self._calls[kind, path]
        self._calls[kind, path] += 1
        for index, value in enumerate(values):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                self._sink(kind, path, value, index=index, call=call, module=module)
                if value.requires_grad:
                    value.register_hook(self._gradient(f"grad_{kind}", path, index, call, module))

    def _gradient(self, kind: str, path: str, index: int, call: int, module: nn.Module) -> Callable[..., Any]:
        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if not self._handles:
                return None
            return self._sink(kind, path, gradient, index=index, call=call, module=module)

        return hook

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, model in self._models.items():
            for name, parameter in named_parameters(model):
                if parameter.requires_grad:
                    yield prefix + name, parameter

    def _gradients(self) -> None:
        for name, parameter in self._parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._sink("gradient", name, gradient, call=self.steps)

    def _before_step(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # an optimizer may step another one
            self._gradients()

    def _after_step(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        for name, parameter in self._parameters():
            self._sink("weight", name, parameter, call=self.steps)
        self.steps += 1
