"""The model, inputs, loss and optimizer of a step, made from a request; and its model states in closed form."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from axon_nb.errors import UsageError
from axon_nb.parallel.data.units import equal_row
from axon_nb.parallel.memory import OptimizerKind, checkpoint_blocks
from axon_nb.parallel.models import GPTConfig, next_byte_loss
from axon_nb.parallel.muon import Muon
from axon_nb.plan.arguments import ZERO_2
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.fake_world import NO_VALUES
from axon_nb.plan.footprint.plan import MODEL_STATES_ONLY, OFFLOADED, MemoryParts, MemoryPlan, MemoryRequest, RankMemory
from axon_nb.plan.models import HuggingFaceModel, TensorSpec, next_token_loss
from axon_nb.plan.muon import NOT_ZERO_1, is_muon, matrix_names
from axon_nb.plan.repetition import BlockRun, shorten
from axon_nb.plan.tracing import subject as subjects
from axon_nb.plan.tracing.fake_tensors import WithoutCuda

Loss = Callable[[Any, Any], torch.Tensor]
_NOTE = "Model states only, by formula: no activations and no buffers, so a training step takes more than this."


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
        keep_part_of_experts(made, self.request.size("ep"))
        if self.request.activation_checkpointing is not None and self.request.activation_checkpointing is not False:
            checkpoint_blocks(made, self._checkpointed_blocks(made))
        if run is not None:
            shorten(made, run, depth)
        return made

    def _checkpointed_blocks(self, model: nn.Module) -> Any:
        blocks = self.request.activation_checkpointing
        if blocks is not True:
            return subjects.checked_module_filter(model, blocks, "activation_checkpointing")
        row = equal_row(model)
        if row is None:
            raise PlanError("activation_checkpointing=True needs a model with a row of equal blocks: give their class.")
        return type(row[0])


def keep_part_of_experts(model: nn.Module, num_ranks: int) -> None:
    """Leave each module with experts as many as one rank along ep holds, in place."""
    for name, count in subjects.split_experts(model, num_ranks).items():
        module: Any = model.get_submodule(name)
        module.num_experts = count // num_ranks
        for leaf, whole in list(module.named_parameters(recurse=False)):
            if whole.shape[0] == count:
                part = whole.new_empty((count // num_ranks, *whole.shape[1:]))
                setattr(module, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))


def expert_modules(model: nn.Module, request: MemoryRequest) -> list[nn.Module]:
    """Return the modules whose experts ranks along ep share; the model has one rank's part of them."""
    names = subjects.stacked_experts(model) if request.size("ep") > 1 else ()
    return [model.get_submodule(name) for name in names]


def expert_parameters(model: nn.Module, request: MemoryRequest) -> set[nn.Parameter]:
    """Return the parameters of these modules that are stacked by expert."""
    return {
        parameter
        for module in expert_modules(model, request)
        for parameter in module.parameters(recurse=False)
        if parameter.shape[0] == module.num_experts
    }


def training_setup(request: MemoryRequest) -> TrainingSetup:
    """Make the training setup of a request.

    Raises:
        PlanError: the model's inputs are missing, or do not fit it.
    """
    model, config = subjects.open_model(request.model, request.inputs)
    named: dict[str, int | None] = {"batch": request.batch, "seq": request.seq and _part_of(request, request.seq)}
    if config is not None:
        return _gpt_setup(request, config, named, model)
    if isinstance(model, HuggingFaceModel) and request.inputs is None:
        return _hugging_face_setup(request, model)
    if request.size("cp") > 1 and "seq" not in str(request.inputs):
        raise PlanError(
            "cp splits the sequence, so inputs= must say which dimension it is: TensorSpec(('batch', 'seq'), 'int64'), "
            "with seq=."
        )
    if request.inputs is None:
        raise PlanError(
            "inputs= is required: TensorSpec(('batch', 1024)), a tuple of them, or a function that makes tensors."
        )
    return TrainingSetup(
        request,
        model,
        functools.partial(_arguments, request.inputs, named),
        functools.partial(_tensors, request.target, named),
        _loss_of(request.loss, request.target is not None),
    )


def _hugging_face_setup(request: MemoryRequest, model: HuggingFaceModel) -> TrainingSetup:
    tokens = TensorSpec((request.batch, _part_of(request, model.seq(request.seq))), "int64")
    return TrainingSetup(
        request,
        model,
        functools.partial(_arguments, tokens, {}),
        functools.partial(_tensors, tokens if request.target is None else request.target, {}),
        _loss_of(request.loss or next_token_loss, True),
    )


def _part_of(request: MemoryRequest, seq: int) -> int:
    """Return how many tokens of a sample one rank along cp holds."""
    part, rest = divmod(seq, request.size("cp"))
    if rest:
        raise PlanError(f"seq ({seq}) must be divisible by cp ({request.size('cp')}): change one of them.")
    return part


def _gpt_setup(
    request: MemoryRequest, config: GPTConfig, named: dict[str, int | None], factory: Callable[[], Any]
) -> TrainingSetup:
    tokens = TensorSpec((request.batch, _part_of(request, subjects.context_of(config, request.seq))), "int64")
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
    make = subjects.resolve_optimizer(optimizer)
    if make is None:
        raise PlanError("optimizer=None: memory of a step needs an optimizer, such as 'AdamW' or 'SGD'.")
    return OptimizerKind(_foreach(make, request), options)


def checked_optimizers(request: MemoryRequest) -> dict[bool, OptimizerKind]:
    """Return the requested optimizer after trying a step on a tiny parameter: by whether it is for Muon's matrices.

    Raises:
        PlanError: it is unknown, rejects its options, its states do not have the parameters' shapes, or it does not
            work with the strategy.
    """
    kind = request_optimizer(request)
    if not is_muon(kind.make):
        return {False: _checked(request, kind)}
    if request.strategy == "optimizer_state":
        raise PlanError(NOT_ZERO_1)
    options = {name: value for name, value in kind.options.items() if name != "foreach"}
    return {True: _checked(request, OptimizerKind(Muon, options)), False: OptimizerKind(torch.optim.AdamW)}


def _checked(request: MemoryRequest, kind: OptimizerKind) -> OptimizerKind:
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
        why = f"{type(error).__name__}: {subjects.first_line(error)}"
        raise PlanError(
            f"The model cannot be {doing} on tensors without data because it reads their values "
            f"({why}): avoid .item(), .tolist(), `if tensor:` and boolean indexing."
        ) from error
    except Exception as error:
        why = f"{type(error).__name__}: {subjects.first_line(error)}"
        raise PlanError(f"The model cannot be {doing} on tensors without data ({why}): {hint}.") from error


class ModelStates:
    """Closed-form parameters, gradients and optimizer states of each rank.

    Args:
        request: The request.
        shapes: Shape, dtype and requires_grad of each parameter of a rank before it is sharded over data ranks, by
            coordinate along pp; and that by whether ranks along ep share them, and whether Muon updates them.
        optimizers: The optimizers whose states are counted, by whether they are for Muon's matrices.
    """

    def __init__(
        self,
        request: MemoryRequest,
        shapes: Mapping[tuple[bool, bool], Mapping[int, Sequence[Any]]],
        optimizers: Mapping[bool, OptimizerKind],
    ) -> None:
        self._request = request
        self._shapes = shapes
        self._optimizers = optimizers
        is_partitioned = request.strategy == "optimizer_state" and request.size("pp") == 1
        self._owned = self._partition() if is_partitioned else None
        self._known: dict[tuple[int, int], MemoryParts] = {}

    def requested_ranks(self) -> Sequence[int]:
        """The requested ranks; for ``worst``, the candidates for it."""
        requested = self._request.ranks
        if requested == "worst":
            return self._worst()
        return range(self._request.world_size) if requested == "all" else [int(rank) for rank in requested]

    def of(self, rank: int) -> MemoryParts:
        """The states of one rank, on the device or on the host."""
        place = self._request.coordinates(rank)
        sharer = rank // self._request.size("tp") % self._request.num_sharers
        key = place.get("pp", 0), place.get("shard", sharer)
        if key not in self._known:
            self._known[key] = self._compute(*key)
        return self._known[key]

    def on_device(self, rank: int) -> MemoryParts:
        """The states of one rank that are on its device."""
        on_host = OFFLOADED[self._request.cpu_offload] if self._request.device == "cuda" else ()
        return replace(self.of(rank), **dict.fromkeys(on_host, 0))

    def host_bytes(self, rank: int) -> int:
        """Bytes that offloading keeps in host memory."""
        return sum(getattr(self.of(rank), part) for part in OFFLOADED[self._request.cpu_offload])

    def _partition(self) -> list[set[int]]:
        from axon_nb.parallel.memory import partition_parameters

        sizes = [math.prod(shape) for shape, _, _ in self._shapes[False, False][0]]
        return partition_parameters(sizes, self._request.num_sharers)

    def _compute(self, stage: int, sharer: int) -> MemoryParts:
        from axon_nb.parallel.memory import CPUOffload, ShardingStrategy, model_states

        request = self._request
        size = request.num_sharers * request.size("replicate", "shard")
        parts = [0, 0, 0]
        for (is_expert, is_matrix), shapes in self._shapes.items():
            num_ranks = size // request.size("ep") if is_expert else size
            if not (held := shapes.get(stage)):
                continue
            stats = model_states(
                held,
                ShardingStrategy("no_shard" if request.strategy == "ddp" else request.strategy),
                world_size=num_ranks,
                shard_size=request.size("shard") if request.strategy == "hybrid_shard" else None,
                rank=sharer % num_ranks,
                optimizer=self._optimizers[is_matrix],
                cpu_offload=CPUOffload(request.cpu_offload),
                owned=None if self._owned is None else self._owned[sharer],
                device_type=request.device,
            )
            found = stats.param_memory_bytes, stats.grad_memory_bytes, stats.optim_memory_bytes
            parts = [before + more for before, more in zip(parts, found, strict=True)]
        return MemoryParts(*parts)

    def _worst(self) -> list[int]:
        size = self._request.size
        if self._owned is None or size("pp") > 1:
            # The first rank of each shard group: no other has more.
            return [stage * (self._request.world_size // size("pp")) for stage in range(size("pp"))]
        shapes = self._shapes[False, False][0]
        loads = [sum(math.prod(shapes[number][0]) for number in owned) for owned in self._owned]
        return [loads.index(max(loads)) * size("tp")]


def closed_form_plan(request: MemoryRequest) -> MemoryPlan:
    """Return a plan of model states alone; computed in this process, without running the model.

    Raises:
        PlanError: the mesh has tp or pp, for which there is no formula, or the model cannot be built without data.
    """
    if request.size("tp", "pp") > 1:
        raise PlanError("method='closed_form' does not work with tp or pp: use method='simulate'.")
    import torch

    with torch.device("meta"):
        model = training_setup(request).model()
    experts = expert_parameters(model, request)
    optimizers = checked_optimizers(request)
    matrices = matrix_names(model) if True in optimizers else ()
    shapes: dict[tuple[bool, bool], dict[int, list[Any]]] = {}
    for name, p in model.named_parameters():
        kept = shapes.setdefault((p in experts, name in matrices), {0: []})
        kept[0].append((tuple(p.shape), p.dtype, p.requires_grad))
    states = ModelStates(request, shapes, optimizers)
    ranks = tuple(
        RankMemory(rank, request.coordinates(rank), parts, parts, host_bytes=states.host_bytes(rank))
        for rank in states.requested_ranks()
        for parts in (states.on_device(rank),)
    )
    return MemoryPlan(
        type(model).__name__,
        sum(p.numel() * (request.size("ep") if p in experts else 1) for p in model.parameters()),
        dict(request.mesh),
        request.strategy,
        request.device,
        MODEL_STATES_ONLY,
        ranks,
        tuple(rank.persistent for rank in ranks),
        (_NOTE, f"{ZERO_2}.") if request.strategy == "shard_grad_op" else (_NOTE,),
    )
