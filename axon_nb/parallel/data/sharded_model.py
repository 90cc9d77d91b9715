"""Sharded models: FSDP on torch's `fully_shard` (FSDP2), and ZeRO-1 on its ZeroRedundancyOptimizer.

With FSDP each rank holds a shard of each parameter; ZeRO-1 is DDP with optimizer states partitioned over ranks.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from axon_nb.comm.collectives.movement import barrier
from axon_nb.comm.group import Backend, GroupLike, ProcessGroup
from axon_nb.errors import UsageError
from axon_nb.parallel.data import units
from axon_nb.parallel.data.ddp import DDP, broadcast_model
from axon_nb.parallel.data.kept import KeptParameters
from axon_nb.parallel.loop import check_inputs, clip_grad_norm
from axon_nb.parallel.memory import (
    CPUOffload,
    FSDPMemoryStats,
    OptimizerKind,
    ShardingStrategy,
    local_optimizer,
    measure_model_states,
    model_states,
    parse_enum,
)


class ShardedModel(nn.Module):
    """A model whose states are sharded over the ranks of a mesh.

    Args:
        model: The model before sharding.
        strategy: What is sharded.
        cpu_offload: What is kept in host memory.
    """

    module: Any
    """The wrapped model."""
    mesh: DeviceMesh
    """The mesh; its last axis is the shard axis."""
    _host: units.ParameterOffloader | None = None

    def __init__(self, model: nn.Module, strategy: ShardingStrategy, cpu_offload: CPUOffload) -> None:
        super().__init__()
        self.strategy = parse_enum(ShardingStrategy, strategy, "strategy")
        self.cpu_offload = parse_enum(CPUOffload, cpu_offload, "cpu_offload")
        # With tensor parallelism, the shapes of this rank's shards.
        self._shapes = [(tuple(units.local_shard(p).shape), p.dtype, p.requires_grad) for p in model.parameters()]
        self._optimizer_kind: OptimizerKind | None = None
        self._optimizer_ref: Callable[[], Optimizer | None] = lambda: None

    @abstractmethod
    def sync_gradients(self) -> None:
        """Ensure that the gradients are reduced. Collective."""

    @abstractmethod
    def gather_parameters(self) -> None:
        """Gather full parameters on every rank. Collective."""

    @abstractmethod
    def reshard_parameters(self) -> None:
        """Keep only this rank's shard again, including changes made since `gather_parameters`."""

    @property
    def process_group(self) -> ProcessGroup:
        """The group of ranks that share one copy of the states."""
        return ProcessGroup.wrap(self.mesh.get_group(self.mesh.ndim - 1))

    def optimizer(
        self, kind: Callable[..., Optimizer] = torch.optim.Adam, parameters: Iterable[Any] | None = None, **options: Any
    ) -> Optimizer:
        """Create an optimizer that keeps its states where the strategy and the offloading require.

        Args:
            kind: Class of the optimizer.
            parameters: Parameters of this model, or parameter groups as torch's optimizers accept them; None means all.
            options: Arguments of the optimizer, such as `lr`.
        """
        created = self._make_optimizer(kind, list(self.parameters() if parameters is None else parameters), options)
        self._optimizer_kind, self._optimizer_ref = OptimizerKind(kind, options), weakref.ref(created)
        if self._host is not None:
            self._host.attach(created)
        if self.cpu_offload is CPUOffload.OPTIMIZER_STATES:
            units.offload_states(created, units.local_device(self.mesh))
        return created

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        return kind(parameters, **options)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Inside, the model has full parameters, which can be read and changed. Collective.

        In-place changes are kept: each rank keeps its shard, so all ranks must make the same changes. With mixed
        precision the full parameters have the reduced dtype, and unchanged elements keep their full precision.
        """
        self.gather_parameters()
        try:
            yield self.module
        finally:
            self.reshard_parameters()

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, groups: Any = ()) -> float:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`. Collective.

        Takes the arguments of `axon_nb.parallel.clip_grad_norm`.

        Returns:
            The norm before clipping, as in a single process.

        Raises:
            UsageError: the gradients are not reduced yet.
        """
        self.sync_gradients()
        return clip_grad_norm(self.module, max_norm, norm_type=norm_type, groups=groups)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return full parameters and buffers in CPU memory, on every rank. Collective: call it on all ranks."""
        return {name: units.full_value(value) for name, value in self.module.state_dict().items()}

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load full parameters and buffers, such as those of `full_state_dict`; the same on every rank.

        Raises:
            UsageError: names or shapes differ from the model's.
        """
        self.reshard_parameters()
        shards = self.module.state_dict(keep_vars=True)
        for name in sorted(shards.keys() ^ state.keys()):
            raise UsageError(
                f"{name} is only in {'the model' if name in shards else 'the state'}; the state is of another model."
            )
        for name, value in state.items():
            if shards[name].shape != value.shape:
                raise UsageError(
                    f"{name} has shape {tuple(shards[name].shape)} in the model and {tuple(value.shape)} in the state."
                )
        for name, value in state.items():
            units.copy_full_value(shards[name], value)

    def memory_estimate(
        self,
        *,
        optimizer: OptimizerKind | Sequence[OptimizerKind] | Callable[..., Optimizer] | None = None,
        states_per_param: float | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> FSDPMemoryStats:
        """Estimate the model states on this rank by formula; see `model_states`.

        Args:
            optimizer: The optimizer, or that of each parameter; None: the one created by `optimizer`, or else Adam.
            states_per_param: Elements of state per parameter element; None: determined from the optimizer.
            state_dtype: dtype of the states; None: determined from the optimizer.
        """
        kind = OptimizerKind(optimizer) if callable(optimizer) else optimizer
        return model_states(
            self._shapes,
            self.strategy,
            optimizer=kind or self._optimizer_kind,
            states_per_param=states_per_param,
            state_dtype=state_dtype,
            cpu_offload=self.cpu_offload,
            **self._shard_info(),
        )

    def _shard_info(self) -> dict[str, Any]:
        """Describe this rank's position among those that share a copy, as arguments of `model_states`."""
        last = self.mesh.ndim - 1
        return {
            "world_size": self.mesh.size(),
            "shard_size": None if self.strategy is ShardingStrategy.NO_SHARD else self.mesh.size(last),
            "rank": self.mesh.get_local_rank(last),
            "device_type": self.mesh.device_type,
        }

    def memory_stats(self, optimizer: Optimizer | None = None) -> FSDPMemoryStats:
        """Measure the model states that this rank holds now: the storages of its tensors.

        Args:
            optimizer: The optimizer whose states to measure; None: the one created by `optimizer`.
        """
        return measure_model_states(
            self.module.parameters(),
            self._optimizer_ref() if optimizer is None else optimizer,
            estimate=self.memory_estimate(),
            cpu_offload=self.cpu_offload,
            device=units.local_device(self.mesh),
        )


class FSDP(ShardedModel):
    """Shards the parameters, gradients and optimizer state of a model over ranks.

    Create the optimizer afterwards, with `optimizer(torch.optim.Adam, lr=…)`. Without offloading and ZeRO-1 you can
    also create it yourself from `parameters()`, which are the shards.

    Args:
        model: Must have the same shapes on all ranks; rank 0's values are sent to all.
        group: A World, one of our groups or torch's; None means all ranks. Not together with `mesh`.
        strategy: What is sharded. OPTIMIZER_STATE creates a `ZeRO1`.
        mesh: A 2-D mesh of (replicas, shards) for HYBRID_SHARD, a 1-D mesh for the others.
        wrap: Which submodules are gathered as a unit, besides the model: classes, a function called with each module,
            or a minimum number of parameters. None: the decoder layers of a Hugging Face model (the classes that it
            names in `_no_split_modules`); otherwise its direct children, or the repeated blocks inside them.
        mixed_precision: dtype of parameters in forward and backward, such as `torch.bfloat16`, with gradients reduced
            in float32; or torch's `MixedPrecisionPolicy` to choose each. None: unchanged.
        cpu_offload: What is kept in host memory.
        sync_parameters: Send rank 0's parameters and buffers to all. Set False if they are already equal.
        keep_whole: With SHARD_GRAD_OP, the ZeRO paper's stage 2: what was gathered stays on each rank, and only what an
            optimizer or anything else has changed is gathered by the next forward.

    Raises:
        UsageError: the mesh does not fit the strategy, or an option is invalid.
        NotInGroupError: this rank is not a member of the group.
    """

    _kept: KeptParameters | None = None
    _subclass_by_strategy: ClassVar[dict[ShardingStrategy, type[FSDP]]] = {}

    def __init_subclass__(cls, *, strategy: ShardingStrategy | None = None, **kwargs: Any) -> None:
        """Register a subclass as the class that `FSDP(…, strategy=…)` creates for `strategy`."""
        super().__init_subclass__(**kwargs)
        if strategy is not None:
            FSDP._subclass_by_strategy[strategy] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> FSDP:
        """Create the subclass registered for the strategy, if any."""
        strategy = parse_enum(ShardingStrategy, kwargs.get("strategy", ShardingStrategy.FULL_SHARD), "strategy")
        return super().__new__(FSDP._subclass_by_strategy.get(strategy, cls) if cls is FSDP else cls)

    def __init__(
        self,
        model: nn.Module,
        group: GroupLike | Any = None,
        *,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        mesh: DeviceMesh | None = None,
        wrap: units.Wrap = None,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
        cpu_offload: CPUOffload = CPUOffload.NONE,
        sync_parameters: bool = True,
        keep_whole: bool = False,
    ) -> None:
        super().__init__(model, strategy, cpu_offload)
        if self.strategy is ShardingStrategy.OPTIMIZER_STATE:
            raise UsageError(f"{type(self).__name__} cannot use OPTIMIZER_STATE; derive it from ZeRO1.")
        offloads = self.cpu_offload in (CPUOffload.PARAMS, CPUOffload.FULL)
        if keep_whole and (offloads or self.strategy is not ShardingStrategy.SHARD_GRAD_OP):
            raise UsageError("keep_whole needs strategy=ShardingStrategy.SHARD_GRAD_OP, and no offloaded parameters.")
        self.mesh = units.resolve_mesh(group, mesh, self.strategy, model)
        if sync_parameters:
            broadcast_model(model, self.mesh)
        options: dict[str, Any] = {"mesh": self.mesh}
        if isinstance(mixed_precision, torch.dtype):
            mixed_precision = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        policy = mixed_precision or MixedPrecisionPolicy()
        if self.cpu_offload is CPUOffload.FULL:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")
        stays = not keep_whole and self.strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        for unit in units.make_units(model, wrap):
            # Only the model's own output is cast: between units the dtype stays the same.
            inner = replace(policy, output_dtype=None)
            fully_shard(unit, reshard_after_forward=not stays, mp_policy=inner, **options)
        options |= {"mp_policy": policy, "reshard_after_forward": False if stays else None}
        self.module: Any = fully_shard(model, **options)
        # Before the gatherer, whose hook then comes first: it saves what was changed while parameters were whole.
        self._kept = KeptParameters(model, self.mesh, policy.param_dtype) if keep_whole else None
        self._gatherer = units.ParameterGatherer(model, self.mesh)
        self._accumulating, self._synced = False, True
        if self.cpu_offload is CPUOffload.PARAMS:
            self._host = units.ParameterOffloader(model, units.local_device(self.mesh))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        check_inputs(self.mesh.device_type, lambda: units.local_device(self.mesh), args, kwargs)
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            if self._accumulating:
                self._synced = False
            elif not self._synced:
                units.on_backward_start(output, self._mark_synced)
        return output

    def _mark_synced(self) -> None:
        self._synced = True

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        optimizer = super()._make_optimizer(kind, parameters, options)
        # A forward without backward leaves parameters unsharded: the step would not update these copies, and the next
        # forward would use them.
        optimizer.register_step_pre_hook(lambda *_: self.reshard_parameters())
        return optimizer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate full gradients on each rank inside; the next backward outside reduces them."""
        before, self._accumulating = self._accumulating, True
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._accumulating = before
            self.module.set_requires_gradient_sync(not before)

    def sync_gradients(self) -> None:
        """Check that backward has reduced the gradients; there is nothing else to do.

        Raises:
            UsageError: the last backward ran inside `no_sync`, so the gradients are not reduced.
        """
        if not self._synced:
            raise UsageError("The gradients are not reduced: run the last micro-batch's backward outside of no_sync().")

    def memory_estimate(self, **options: Any) -> FSDPMemoryStats:
        """Estimate the model states on this rank by formula, and what `keep_whole` keeps; see `model_states`."""
        stats = super().memory_estimate(**options)
        kept = 0 if self._kept is None else self._kept.expected_bytes
        return replace(stats, param_memory_bytes=stats.param_memory_bytes + kept)

    def memory_stats(self, optimizer: Optimizer | None = None) -> FSDPMemoryStats:
        """Measure the model states that this rank holds now, and what `keep_whole` keeps."""
        stats = super().memory_stats(optimizer)
        return replace(stats, param_memory_bytes=stats.param_memory_bytes + (self._kept.nbytes if self._kept else 0))

    def gather_parameters(self) -> None:
        """Gather full parameters on every rank, until `reshard_parameters` or the next backward. Collective."""
        if self._kept is not None:
            self.reshard_parameters()
            self._kept.refresh()
        self._gatherer.gather()

    def reshard_parameters(self) -> None:
        """Keep only this rank's shard again, including changes made since `gather_parameters`."""
        self._gatherer.reshard()


FullyShardedDataParallel = FSDP


class ZeRO1(FSDP, strategy=ShardingStrategy.OPTIMIZER_STATE):
    """Keeps the whole model on every rank, as DDP does, and partitions the optimizer states over ranks.

    Create the optimizer with `optimizer(torch.optim.Adam, lr=…)`, which also accepts the options of torch's
    ZeroRedundancyOptimizer. In its step (on CPUs: once all ranks have reached it), each rank updates the parameters
    whose states it holds and sends them to the others. Same as `FSDP(…, strategy=ShardingStrategy.OPTIMIZER_STATE)`.

    Args:
        model: Must have the same shapes on all ranks; rank 0's values are sent to all.
        group: A World, one of our groups or torch's; None means all ranks. Not together with `mesh`.
        strategy: OPTIMIZER_STATE.
        mesh: A 1-D mesh.
        wrap: Ignored, as nothing is gathered.
        mixed_precision: Must be None; use `torch.autocast` to compute in another dtype.
        cpu_offload: NONE or OPTIMIZER_STATES.
        sync_parameters: The same as in `FSDP`.
        ddp_options: Options of `DDP`. By default, gradients are views into the buckets, so they are stored once.

    Raises:
        UsageError: an option needs a sharded model.
        NotInGroupError: this rank is not a member of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        group: GroupLike | Any = None,
        *,
        strategy: ShardingStrategy = ShardingStrategy.OPTIMIZER_STATE,
        mesh: DeviceMesh | None = None,
        wrap: units.Wrap = None,
        mixed_precision: torch.dtype | None = None,
        cpu_offload: CPUOffload = CPUOffload.NONE,
        sync_parameters: bool = True,
        **ddp_options: Any,
    ) -> None:
        ShardedModel.__init__(self, model, strategy, cpu_offload)
        if self.strategy is not ShardingStrategy.OPTIMIZER_STATE:
            raise UsageError(f"ZeRO1 does not support {self.strategy.name}; use FSDP(model, strategy=…).")
        if self.cpu_offload in (CPUOffload.PARAMS, CPUOffload.FULL):
            raise UsageError(
                f"ZeRO-1 does not support CPUOffload.{self.cpu_offload.name}, as its parameters are not sharded; use "
                "OPTIMIZER_STATES, or FULL_SHARD to offload parameters."
            )
        if mixed_precision is not None:
            raise UsageError(
                f"ZeRO-1 does not support mixed_precision={mixed_precision}; use torch.autocast around the forward."
            )
        self.mesh = units.resolve_mesh(group, mesh, self.strategy, model)
        ddp_options.setdefault("gradient_as_bucket_view", True)
        self.module = model
        # Hidden from nn.Module in a tuple: only `module` is a submodule, so names are those of the other strategies.
        self._ddp = (DDP(model, self.process_group, init_sync=sync_parameters, **ddp_options),)

    @property
    def ddp(self) -> DDP:
        """The DDP wrapper that averages gradients."""
        return self._ddp[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        return self.ddp(*args, **kwargs)

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        group = self.process_group
        # One broadcast per rank instead of one per parameter.
        options = {"parameters_as_bucket_view": True} | options
        optimizer: Optimizer = _zero_redundancy()(
            parameters, optimizer_class=kind, process_group=group.torch_group, **options
        )
        if group.backend is not Backend.NCCL:  # with NCCL, a barrier would make the CPU wait for the GPU
            # A rank that fails before its step releases the others here. In the broadcasts after the updates it would
            # leave them half done: each has already changed its own parameters.
            optimizer.register_step_pre_hook(lambda *_: barrier(group=group))
        return optimizer

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients inside; the next backward outside averages the sum."""
        with self.ddp.no_sync():
            yield

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, unless the last backward already has. Collective."""
        self.ddp.sync_gradients()

    def gather_parameters(self) -> None:
        """Do nothing: parameters are not sharded."""

    def reshard_parameters(self) -> None:
        """Do nothing: parameters are not sharded; all ranks must make the same changes."""

    def _shard_info(self) -> dict[str, Any]:
        info = super()._shard_info()
        optimizer = self._optimizer_ref()
        if optimizer is not None and local_optimizer(optimizer) is not optimizer:
            # Partitioned group by group, among the parameters that the optimizer was given.
            here = {id(parameter) for group in local_optimizer(optimizer).param_groups for parameter in group["params"]}
            info["owned"] = {i for i, parameter in enumerate(self.module.parameters()) if id(parameter) in here}
        return info


@functools.cache
def _zero_redundancy() -> Any:
    # Its package compiles functions with torch.jit.script, which torch has deprecated.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer
