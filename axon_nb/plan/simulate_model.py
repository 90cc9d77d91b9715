"""The model of a plan, its inputs, its loss and its optimizer, made from what was asked."""

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
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.parallel.optimizer_state import OptimizerKind
from axon_nb.plan.errors import PlanError
from axon_nb.plan.memory_request import MemoryRequest
from axon_nb.plan.models import CapturedModel, TensorSpec
from axon_nb.plan.module_kinds import kinds_in
from axon_nb.plan.simulate_depth import Run, find_run, shorten
from axon_nb.plan.simulate_hooks import NO_VALUES
from axon_nb.plan.without_cards import WithoutCards

__all__ = ["Question", "explained", "optimizer_of", "question_of", "tried_optimizer"]

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Question:
    """What is run. The functions make new tensors at each call, without data where fake tensors are on."""

    request: MemoryRequest
    factory: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]]
    target: Callable[[], Any]
    loss: Loss

    def model(self, run: Run | None = None, depth: int = 0) -> nn.Module:
        """A new model, in its dtype, with blocks that are computed again; of only `depth` blocks, where a run is given.

        Raises:
            PlanError: it cannot be made.
        """
        with explained("made", "the factory is called without arguments"), WithoutCards():
            made = self.factory()
        if not isinstance(made, nn.Module):
            raise PlanError(f"the factory made a {type(made).__name__}: it makes a torch.nn.Module.")
        if self.request.dtype is not None:
            made = made.to(getattr(torch, self.request.dtype))
        if self.request.checkpointing is not None and self.request.checkpointing is not False:
            checkpoint_blocks(made, self._again(made))
        if run is not None:
            shorten(made, run, depth)
        return made

    def _again(self, model: nn.Module) -> Any:
        given = self.request.checkpointing
        if given is not True:
            return kinds_in(model, given, "checkpointing")
        run = find_run(model, least=2)
        if run is None:
            raise PlanError("checkpointing=True: the model has no row of equal blocks; give their class.")
        return type(model.get_submodule(run.names[0]))


def question_of(request: MemoryRequest) -> Question:
    """What is run for a request.

    Raises:
        PlanError: the model's inputs are not given, or do not fit it.
    """
    model = request.model
    named: dict[str, int | None] = {"batch": request.batch, "seq": request.seq}
    if isinstance(model, GPTConfig):
        return _gpt_question(request, model, named, functools.partial(GPT, model))
    if isinstance(model, CapturedModel):
        factory: Callable[[], Any] = pickle.loads(model.factory)
        if request.inputs is None:
            with torch.device("meta"), WithoutCards():
                config = getattr(factory(), "config", None)
            if isinstance(config, GPTConfig):
                return _gpt_question(request, config, named, factory)
    elif is_dataclass(model) and isinstance(model, type):
        raise PlanError(f"model={model.__name__} is a class of configs: give one of it, {model.__name__}(…).")
    elif is_dataclass(model):
        raise PlanError(
            f"{type(model).__name__}: the one config that is known is axon_nb.parallel.models.GPTConfig; give a "
            "function without arguments that makes the model, with inputs=."
        )
    else:
        factory = model
    if request.inputs is None:
        raise PlanError(
            "what is the model called with? inputs=TensorSpec(('batch', 1024)), a tuple of them, or a function that "
            "makes tensors."
        )
    return Question(
        request,
        factory,
        functools.partial(_arguments, request.inputs, named),
        functools.partial(_tensors, request.target, named),
        _loss_of(request.loss, request.target is not None),
    )


def _gpt_question(
    request: MemoryRequest, config: GPTConfig, named: dict[str, int | None], factory: Callable[[], Any]
) -> Question:
    seq = config.context if request.seq is None else request.seq
    if seq > config.context:
        raise PlanError(f"seq={seq}: the model's context is {config.context} tokens; GPTConfig(context={seq}).")
    tokens = TensorSpec((request.batch, seq), "int64")
    given = request.inputs is not None
    target = request.target if given or request.target is not None else tokens
    return Question(
        request,
        factory,
        functools.partial(_arguments, request.inputs if given else tokens, named),
        functools.partial(_tensors, target, named),
        _loss_of(request.loss or next_byte_loss, True) if target is not None else _loss_of(request.loss, False),
    )


def _arguments(given: Any, named: dict[str, int | None]) -> tuple[Any, ...]:
    made = _tensors(given, named)
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def _tensors(given: Any, named: dict[str, int | None]) -> Any:
    if callable(given):
        with explained("given inputs", "inputs= and target= are functions without arguments"), WithoutCards():
            given = given()
        return _tensors(given, named)

    def made(item: Any) -> Any:
        if isinstance(item, TensorSpec):
            kind = getattr(torch, item.dtype, None)
            if not isinstance(kind, torch.dtype):
                raise PlanError(f"{item}: {item.dtype!r} is no dtype of torch.")
            return torch.zeros(item.sizes(named), dtype=kind)
        # A tensor with data becomes one without, where fake tensors are on.
        return torch.zeros_like(item) if isinstance(item, torch.Tensor) else item

    return tree_map(made, given, is_leaf=lambda item: isinstance(item, TensorSpec))


def _loss_of(given: Any, has_target: bool) -> Loss:
    if given is not None:
        return given if has_target else lambda output, _: given(output)

    def mean(output: Any, _: Any) -> torch.Tensor:
        found = getattr(output, "loss", None)
        if isinstance(found, torch.Tensor):
            return found
        if not isinstance(output, torch.Tensor):
            raise PlanError(f"the model gives a {type(output).__name__}: give loss=, a function of it.")
        return output.float().mean()

    return mean


def optimizer_of(request: MemoryRequest) -> OptimizerKind:
    """The optimizer that was asked for.

    Raises:
        PlanError: there is none of that name.
    """
    given: Any = request.optimizer
    options = dict(request.optimizer_options or {})
    if isinstance(given, OptimizerKind):
        given, options = given.make, {**given.options, **options}
    return OptimizerKind(_foreach(_named(given), request), options)


def tried_optimizer(request: MemoryRequest) -> OptimizerKind:
    """The optimizer that was asked for, after a step on a tiny parameter.

    Raises:
        PlanError: there is none of that name, it does not take these options, or its states have shapes of their own.
    """
    kind = optimizer_of(request)
    try:
        kind.bytes_per_element(torch.float32)
    except UsageError as error:
        raise PlanError(
            f"optimizer={request.optimizer!r}: a plan takes those whose states have the shapes of the parameters, and "
            "that step by gradients alone, such as adam, sgd or adagrad."
        ) from error
    except Exception as error:
        text = str(error).rstrip(".")
        raise PlanError(f"optimizer={request.optimizer!r} with {dict(kind.options)}: {text}.") from error
    return kind


def _named(given: Any) -> Callable[..., Optimizer]:
    if not isinstance(given, str):
        if isinstance(given, Optimizer):
            raise PlanError(f"optimizer is a {type(given).__name__} that is made already: give its class, or its name.")
        if not callable(given):
            raise PlanError(f"optimizer={given!r}: its class, or its name in torch.optim.")
        made: Callable[..., Optimizer] = given
        return made
    known: dict[str, Callable[..., Optimizer]] = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if given.lower() not in known:
        raise PlanError(f"optimizer={given!r}: torch.optim has {', '.join(sorted(known))}; or give its class.")
    return known[given.lower()]


def _foreach(make: Callable[..., Optimizer], request: MemoryRequest) -> Callable[..., Optimizer]:
    """On cards torch's optimizers work on all tensors at once unless told otherwise; here none is on a card."""
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
def explained(doing: str, hint: str) -> Iterator[None]:
    """What goes wrong within, said in one sentence.

    Args:
        doing: What is tried with the model: it "cannot be …".
        hint: What may be amiss.

    Raises:
        PlanError: something went wrong.
    """
    try:
        yield
    except UsageError:
        raise
    except NO_VALUES as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise PlanError(
            f"the model cannot be {doing} on tensors without data: it asks for their values "
            f"({type(error).__name__}: {first}); a factory that makes it without .item(), .tolist(), if tensor: and "
            "boolean indexing can be planned for."
        ) from error
    except Exception as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise PlanError(
            f"the model cannot be {doing} on tensors without data ({type(error).__name__}: {first}): {hint}."
        ) from error
