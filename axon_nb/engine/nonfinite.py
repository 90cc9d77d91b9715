"""Where a number that is not finite arose: repeats the last forward and backward of a model, and looks at each call.

The optimizer has not used the gradients yet, so the weights are those of the step. Only the inputs of the last call are
kept, by one hook for each outermost model. The repetition starts its backward from random numbers: which function makes
infinity of finite numbers hardly depends on them. Buffers, gradients and random states stay as they were.

The forward of a model that is split over ranks communicates. All ranks repeat it together when the notebook says so, in
a cell that stops there, and without its backward, which would reduce gradients.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch import nn
from torch.overrides import TorchFunctionMode

from axon_nb.engine.inspection.memory import UncopiedHook
from axon_nb.engine.parity.recorder import clean_name, inner_model, is_whole
from axon_nb.engine.sharding import local_tensor
from axon_nb.records.training.digests import Origin
from axon_nb.shell import inner_function, user_frame


class _LastCall(Struct, frozen=True):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_autocast: bool

    @property
    def is_finite(self) -> bool:
        return all(map(_is_finite, _tensors((self.args, self.kwargs))))


class LastCalls:
    """Keeps the inputs of the last call of each outermost model."""

    def __init__(self) -> None:
        self._handles: dict[nn.Module, Any] = {}
        self._calls: dict[nn.Module, _LastCall] = {}

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Keep those of these models, too, from now on."""
        for model in models:
            if model not in self._handles:
                hook = UncopiedHook(self._keep)
                self._handles[model] = model.register_forward_pre_hook(hook, with_kwargs=True)

    def end(self) -> None:
        """Keep none any more."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._calls.clear()

    def _keep(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and model.training and torch.is_grad_enabled():
            self._calls[model] = _LastCall(args, kwargs, torch.is_autocast_enabled(_device_type(model)))

    def find(self) -> Origin | None:
        """Repeat the calls of models whose forward does not communicate.

        Returns:
            Where the first number arises that is not finite; None: nowhere.
        """
        for inner, call in self._of_models(are_alone=True):
            if not call.is_finite:
                return Origin("input", "")
            if (found := _repeat(inner, call)) is not None:
                return found
        return None

    @property
    def are_split(self) -> bool:
        """Whether the forward of some model communicates, so that all ranks must repeat it together."""
        return any(True for _ in self._of_models(are_alone=False))

    def find_together(self) -> Origin | None:
        """Repeat the forwards of all other models, while all ranks do; returns what `find` does."""
        found = None
        for inner, call in self._of_models(are_alone=False):
            # No rank may leave before the end: the others would wait for it.
            origin = _repeat(inner, call, with_backward=False)
            found = found or (origin if call.is_finite else Origin("input", ""))
        return found

    def _of_models(self, *, are_alone: bool) -> Iterator[tuple[nn.Module, _LastCall]]:
        for model, call in list(self._calls.items()):
            if _is_alone(inner := inner_model(model)) == are_alone:
                yield inner, call


def _repeat(model: nn.Module, call: _LastCall, *, with_backward: bool = True) -> Origin | None:
    eager = torch.compiler.set_stance("force_eager")
    with _unchanged(model), eager, torch.autocast(_device_type(model), enabled=call.is_autocast):
        with torch.set_grad_enabled(with_backward), _Observer(model) as observer:
            outputs = model(*call.args, **call.kwargs)
        ends = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if observer.found is None and with_backward and ends and parameters:
            seeds = [torch.randn_like(tensor) for tensor in ends]
            torch.autograd.grad(ends, parameters, seeds, allow_unused=True)
    return observer.found


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers and random states back afterwards."""
    buffers = [(local_tensor(buffer), local_tensor(buffer).clone()) for buffer in model.buffers()]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        try:
            yield
        finally:
            for buffer, before in buffers:
                buffer.copy_(before)


class _Call(Struct, frozen=True):
    """A function that returned a number that is not finite."""

    origin: Origin
    makes_nan: bool
    """Whether it has NaN in its result, and none in its arguments."""
    is_first: bool
    """Whether all of its arguments are finite."""


class _Observer(TorchFunctionMode):
    """Looks at each call of a function in a forward, and at its part of the backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: Origin | None = None
        self._model = model
        self._stack: list[tuple[str, nn.Module, list[_Call]]] = []
        self._handles: list[Any] = []
        self._count = 0
        """How many modules have ended their forward, or functions their backward."""
        self._cell = user_frame(sys._getframe())

    def __enter__(self) -> _Observer:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._entering(clean_name(name))))
            self._handles.append(module.register_forward_hook(self._left, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._stack.append((name, module, []))

        return hook

    def _left(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        name, _, calls = self._stack.pop()
        self._count += 1
        outputs = _tensors(output)
        if self.found is None and not all(map(_is_finite, outputs)) and all(map(_is_finite, _tensors(args))):
            cause = _cause(calls, outputs) or Origin("forward", name, type(module).__name__)
            self.found = msgspec.structs.replace(cause, order=self._count)
        elif self._stack:
            self._stack[-1][2].extend(calls)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._stack and self.found is None:
            self._look(func, _tensors((args, kwargs)), _tensors(result), sys._getframe(1))
        return result

    def _look(
        self, func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], frame: FrameType
    ) -> None:
        if not outputs:
            return
        name, module, calls = self._stack[-1]
        operation = getattr(func, "__name__", str(func)).strip("_")
        where = inner_function(frame, self._cell).strip(" ()")
        origin = Origin("forward", name, type(module).__name__, operation, where)
        if not all(map(_is_finite, outputs)):
            makes_nan = _has_nan(outputs) and not _has_nan(inputs)
            calls.append(_Call(origin, makes_nan, all(map(_is_finite, inputs))))
        for node in {tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None}:
            node.register_hook(self._backward(origin))

    def _backward(self, origin: Origin) -> Callable[..., None]:
        def hook(gradients: tuple[Any, ...], _: tuple[Any, ...]) -> None:
            self._count += 1
            if self.found is None and not all(map(_is_finite, _tensors(gradients))):
                self.found = msgspec.structs.replace(origin, stage="backward", order=self._count)

        return hook


def _cause(calls: Sequence[_Call], outputs: Sequence[torch.Tensor]) -> Origin | None:
    """Return which call is to blame for an output; infinity in a mask that a softmax removes is right."""
    if _has_nan(outputs):
        return next((call.origin for call in calls if call.makes_nan), None)
    return next((call.origin for call in reversed(calls) if call.is_first), None)


def _is_alone(model: nn.Module) -> bool:
    return is_whole(model) and not any(isinstance(part, nn.SyncBatchNorm) for part in model.modules())


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else parameter.device.type


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [local_tensor(values)] if values.is_floating_point() else []
    parts = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple | list) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())


def _has_nan(tensors: Sequence[torch.Tensor]) -> bool:
    return any(bool(torch.isnan(tensor.detach()).any()) for tensor in tensors)
