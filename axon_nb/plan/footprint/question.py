"""The model, inputs, loss and optimizer of a simulated step, made from a request."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from axon_nb.errors import UsageError
from axon_nb.parallel.activation_checkpoint import checkpoint_blocks
from axon_nb.parallel.data.blocks import equal_row
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.parallel.optimizer_kind import OptimizerKind
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.fake_world import NO_VALUES
from axon_nb.plan.footprint.request import MemoryRequest
from axon_nb.plan.hugging_face import HuggingFaceModel, next_token_loss
from axon_nb.plan.models import CapturedModel, TensorSpec
from axon_nb.plan.repetition.alike import BlockRun, shorten
from axon_nb.plan.tracing.fake_tensors import WithoutCuda
from axon_nb.plan.tracing.subject import checked_module_filter, resolve_optimizer

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class TrainingSetup:
    """What to run. Its functions make new tensors at each call, without data inside `fake_tensors`."""

    request: MemoryRequest
    factory: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]
    target: Callable[[], Any]
    loss: Loss

    def model(self, run: BlockRun | None = None, depth: int = 0) -> nn.Module:
        """Make a new model in its dtype, with activation checkpointing applied.

        Args:
            run: Keep only `depth` groups of these blocks; None: all.
            depth: How many groups to keep.

        Raises:
            PlanError: the model cannot be made.
        """
        with explain_failure("built", "the function is called without arguments"), WithoutCuda():
            made = self.factory()
        if not isinstance(made, nn.Module):
            raise PlanError(f"model() must return a torch.nn.Module; it returned {type(made).__name__}.")
        if self.request.dtype is not None:
            made = made.to(getattr(torch, self.request.dtype))
        if self.request.activation_checkpointing is not None and self.request.activation_checkpointing is not False:
            checkpoint_blocks(made, self._checkpointed_blocks(made))
        if run is not None:
            shorten(made, run, depth)
        return made

    def _checkpointed_blocks(self, model: nn.Module) -> Any:
        blocks = self.request.activation_checkpointing
        if blocks is not True:
            return checked_module_filter(model, blocks, "activation_checkpointing")
        row = equal_row(model)
        if row is None:
            raise PlanError("activation_checkpointing=True needs a model with a row of equal blocks: give their class.")
        return type(row[0])


def training_setup(request: MemoryRequest) -> TrainingSetup:
    """Make the training setup of a request.

    Raises:
        PlanError: the model's inputs are missing, or do not fit it.
    """
    model = request.model
    named: dict[str, int | None] = {"batch": request.batch, "seq": request.seq}
    if isinstance(model, GPTConfig):
        return _gpt_setup(request, model, named, functools.partial(GPT, model))
    if isinstance(model, HuggingFaceModel) and request.inputs is None:
        return _hugging_face_setup(request, model)
    if isinstance(model, CapturedModel):
        factory: Callable[[], Any] = pickle.loads(model.factory)
        if request.inputs is None:
            with torch.device("meta"), WithoutCuda():
                config = getattr(factory(), "config", None)
            if isinstance(config, GPTConfig):
                return _gpt_setup(request, config, named, factory)
    elif is_dataclass(model) and isinstance(model, type):
        raise PlanError(f"model must be an instance of {model.__name__}, not the class: {model.__name__}(…).")
    elif is_dataclass(model):
        raise PlanError(
            f"model has type {type(model).__name__}, but the only config supported is "
            "axon_nb.parallel.models.GPTConfig: pass a function without arguments that makes the model, and inputs=."
        )
    else:
        factory = model
    if request.inputs is None:
        raise PlanError(
            "inputs= is required: TensorSpec(('batch', 1024)), a tuple of them, or a function that makes tensors."
        )
    return TrainingSetup(
        request,
        factory,
        functools.partial(_arguments, request.inputs, named),
        functools.partial(_tensors, request.target, named),
        _loss_of(request.loss, request.target is not None),
    )


def _hugging_face_setup(request: MemoryRequest, model: HuggingFaceModel) -> TrainingSetup:
    tokens = TensorSpec((request.batch, model.seq(request.seq)), "int64")
    return TrainingSetup(
        request,
        model,
        functools.partial(_arguments, tokens, {}),
        functools.partial(_tensors, tokens if request.target is None else request.target, {}),
        _loss_of(request.loss or next_token_loss, True),
    )


def _gpt_setup(
    request: MemoryRequest, config: GPTConfig, named: dict[str, int | None], factory: Callable[[], Any]
) -> TrainingSetup:
    seq = config.context if request.seq is None else request.seq
    if seq > config.context:
        raise PlanError(f"seq must be at most the model's context, {config.context} tokens; got {seq}.")
    tokens = TensorSpec((request.batch, seq), "int64")
    has_inputs = request.inputs is not None
    target = request.target if has_inputs or request.target is not None else tokens
    return TrainingSetup(
        request,
        factory,
        functools.partial(_arguments, request.inputs if has_inputs else tokens, named),
        functools.partial(_tensors, target, named),
        _loss_of(request.loss or next_byte_loss, True) if target is not None else _loss_of(request.loss, False),
    )


def _arguments(value: Any, named: dict[str, int | None]) -> tuple[Any, ...]:
    made = _tensors(value, named)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def _tensors(value: Any, named: dict[str, int | None]) -> Any:
    if callable(value):
        with explain_failure("given inputs", "functions for inputs= and target= take no arguments"), WithoutCuda():
            value = value()
        return _tensors(value, named)

    def made(item: Any) -> Any:
        if isinstance(item, TensorSpec):
            kind = getattr(torch, item.dtype, None)
            if not isinstance(kind, torch.dtype):
                raise PlanError(f"{item}: {item.dtype!r} is not a torch dtype.")
            return torch.zeros(item.sizes(named), dtype=kind)
        # Inside `fake_tensors`, a tensor with data becomes one without.
        return torch.zeros_like(item) if isinstance(item, torch.Tensor) else item

    return tree_map(made, value, is_leaf=lambda item: isinstance(item, TensorSpec))


def _loss_of(loss: Any, has_target: bool) -> Loss:
    if loss is not None:
        return loss if has_target else lambda output, _: loss(output)

    def mean(output: Any, _: Any) -> torch.Tensor:
        loss = getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor):
            return loss
        if not isinstance(output, torch.Tensor):
            raise PlanError(f"The model returns a {type(output).__name__}, so loss= is required: a function of it.")
        return output.float().mean()

    return mean


def request_optimizer(request: MemoryRequest) -> OptimizerKind:
    """Return the requested optimizer.

    Raises:
        PlanError: it is unknown, or None.
    """
    optimizer: Any = request.optimizer
    options = dict(request.optimizer_options or {})
    if isinstance(optimizer, OptimizerKind):
        optimizer, options = optimizer.make, {**optimizer.options, **options}
    make = resolve_optimizer(optimizer)
    if make is None:
        raise PlanError("optimizer=None: memory of a step needs an optimizer, such as 'AdamW' or 'SGD'.")
    return OptimizerKind(_foreach(make, request), options)


def checked_optimizer(request: MemoryRequest) -> OptimizerKind:
    """Return the requested optimizer after trying a step on a tiny parameter.

    Raises:
        PlanError: it is unknown, rejects its options, or its states do not have the parameters' shapes.
    """
    kind = request_optimizer(request)
    try:
        kind.bytes_per_element(torch.float32)
    except UsageError as error:
        raise PlanError(
            f"optimizer={request.optimizer!r} cannot be planned: its states must have the parameters' shapes and its "
            "step must need only gradients, as in adam, sgd or adagrad."
        ) from error
    except Exception as error:
        text = str(error).rstrip(".")
        raise PlanError(f"optimizer={request.optimizer!r} with {dict(kind.options)} failed: {text}.") from error
    return kind


def _foreach(make: Callable[..., Optimizer], request: MemoryRequest) -> Callable[..., Optimizer]:
    """Have an optimizer use its foreach kernels, as it does by default on GPUs; here no tensor is on one."""
    try:
        takes = {"foreach", "fused"} & inspect.signature(make).parameters.keys()
    except ValueError:
        return make
    if request.device != "cuda" or "foreach" not in takes:
        return make

    @functools.wraps(make, updated=())
    def made(parameters: Any, **options: Any) -> Optimizer:
        if not options.get("fused") and options.get("foreach") is None:
            options["foreach"] = True
        return make(parameters, **options)

    return made


@contextlib.contextmanager
def explain_failure(doing: str, hint: str) -> Iterator[None]:
    """Turn any failure inside into one sentence.

    Args:
        doing: What is attempted with the model: it "cannot be …".
        hint: What to check.

    Raises:
        PlanError: something failed.
    """
    try:
        yield
    except (UsageError, MemoryError):
        raise
    except NO_VALUES as error:
        first = next(
            (line.strip() for line in str(error).splitlines() if line.strip()),
            "",
        )
        raise PlanError(
            f"The model cannot be {doing} on tensors without data because it reads their values "
            f"({type(error).__name__}: {first}): avoid .item(), .tolist(), `if tensor:` and boolean indexing."
        ) from error
    except Exception as error:
        first = next(
            (line.strip() for line in str(error).splitlines() if line.strip()),
            "",
        )
        raise PlanError(
            f"The model cannot be {doing} on tensors without data ({type(error).__name__}: {first}): {hint}."
        ) from error
