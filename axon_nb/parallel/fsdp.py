"""Fully sharded data parallelism on torch's `fully_shard` (FSDP2): every rank keeps a part of each parameter."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.parallel.backward import before_backward
from axon_nb.parallel.clip import clip_grad_norm
from axon_nb.parallel.gathering import Gathering, whole
from axon_nb.parallel.held_memory import measured
from axon_nb.parallel.memory import FSDPMemoryStats, model_states
from axon_nb.parallel.offload import HostParameters, keep_states_on_host
from axon_nb.parallel.optimizer_state import OptimizerKind
from axon_nb.parallel.same_model import share_start
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy, known
from axon_nb.parallel.units import Wrap, checked_mesh, device_of, make_units, mesh_of

__all__ = ["FSDP", "FullyShardedDataParallel"]


class FSDP(nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded over ranks.

    Make the optimizer afterwards, with `optimizer(torch.optim.Adam, lr=…)`; without offloading and ZeRO-1 also by hand,
    from `parameters()`: they are the shards.

    Args:
        model: Of the same shapes on all ranks; rank 0's values are sent to all.
        group: A World, a group of ours or of torch's; None: all ranks. Not with `mesh`.
        strategy: What is sharded. OPTIMIZER_STATE makes a `ZeRO1`.
        mesh: For HYBRID_SHARD: two-dimensional, (copies, shards); for the others one-dimensional.
        wrap: Which submodules are gathered as a unit, besides the model: classes, a function that is asked about each
            module, or a least number of parameters; None: its direct children that have parameters.
        mixed_precision: dtype of parameters in forward and backward, such as `torch.bfloat16`, with gradients that are
            reduced in float32; or torch's `MixedPrecisionPolicy`, to choose each. None: as they are.
        cpu_offload: What is kept in the host's memory.
        sync_parameters: Send rank 0's parameters and buffers to all; otherwise they are equal already.

    Raises:
        CommError: a mesh that does not fit the strategy.
        NotInGroup: this rank is no member of the group.
    """

    _of_strategy: ClassVar[dict[ShardingStrategy, type[FSDP]]] = {}

    def __init_subclass__(cls, *, strategy: ShardingStrategy | None = None, **kwargs: Any) -> None:
        """A subclass may be what `FSDP(…, strategy=…)` makes for a strategy."""
        super().__init_subclass__(**kwargs)
        if strategy is not None:
            FSDP._of_strategy[strategy] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> FSDP:
        """For some strategies a subclass."""
        strategy = known(ShardingStrategy, kwargs.get("strategy", ShardingStrategy.FULL_SHARD), "strategy")
        return super().__new__(FSDP._of_strategy.get(strategy, cls) if cls is FSDP else cls)

    def __init__(
        self,
        model: nn.Module,
        group: GroupLike | Any = None,
        *,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        mesh: DeviceMesh | None = None,
        wrap: Wrap = None,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
        cpu_offload: CPUOffload = CPUOffload.NONE,
        sync_parameters: bool = True,
    ) -> None:
        super().__init__()
        self._describe(model, strategy, cpu_offload)
        self.mesh = mesh_of(resolve(group), self.strategy) if mesh is None else checked_mesh(mesh, self.strategy)
        if sync_parameters:
            share_start(model, self.mesh)
        options: dict[str, Any] = {"mesh": self.mesh}
        if isinstance(mixed_precision, torch.dtype):
            mixed_precision = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        policy = mixed_precision or MixedPrecisionPolicy()
        if self.cpu_offload is CPUOffload.FULL:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")
        keep_whole = self.strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        for unit in make_units(model, wrap):
            # Only the model's own output has another dtype: what one unit gives, the next one takes.
            inner = replace(policy, output_dtype=None)
            fully_shard(unit, reshard_after_forward=not keep_whole, mp_policy=inner, **options)
        options |= {"mp_policy": policy, "reshard_after_forward": False if keep_whole else None}
        self.module: Any = fully_shard(model, **options)
        self._gathering = Gathering(model, self.mesh)
        device = device_of(self.mesh)
        self._host = HostParameters(model, device) if self.cpu_offload is CPUOffload.PARAMS else None

    def _describe(self, model: nn.Module, strategy: ShardingStrategy, cpu_offload: CPUOffload) -> None:
        self.strategy = known(ShardingStrategy, strategy, "strategy")
        self.cpu_offload = known(CPUOffload, cpu_offload, "cpu_offload")
        self._shapes = [(tuple(p.shape), p.dtype, p.requires_grad) for p in model.parameters()]
        self._accumulates, self._synced = False, True
        self._kind: OptimizerKind | None = None
        self._made: Callable[[], Optimizer | None] = lambda: None

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share one copy of the model."""
        return ProcessGroup.wrap(self.mesh.get_group(self.mesh.ndim - 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            if self._accumulates:
                self._synced = False
            elif not self._synced:
                before_backward(output, self._has_reduced)
        return output

    def _has_reduced(self) -> None:
        self._synced = True

    def optimizer(
        self, kind: Callable[..., Optimizer] = torch.optim.Adam, parameters: Iterable[Any] | None = None, **options: Any
    ) -> Optimizer:
        """An optimizer that keeps its states where the strategy and the offloading say.

        Args:
            kind: Its class.
            parameters: Parameters of this model, or groups of them as torch's optimizers take them; None: all.
            options: Its arguments, such as `lr`.
        """
        made = self._make_optimizer(kind, list(self.parameters()) if parameters is None else list(parameters), options)
        self._kind, self._made = OptimizerKind(kind, options), weakref.ref(made)
        if self._host is not None:
            self._host.follow(made)
        if self.cpu_offload is CPUOffload.OPTIMIZER_STATES:
            keep_states_on_host(made, device_of(self.mesh))
        return made

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        return kind(parameters, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates, whole gradients on each rank; the next backward outside reduces them."""
        before, self._accumulates = self._accumulates, True
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._accumulates = before
            self.module.set_requires_gradient_sync(not before)

    def sync_gradients(self) -> None:
        """Nothing: backward has reduced the gradients.

        Raises:
            CommError: the last backward was within `no_sync`, so they are whole and unreduced.
        """
        if not self._synced:
            raise CommError(
                "the gradients were accumulated within no_sync(): the last micro-batch's backward, outside of it, "
                "reduces them."
            )

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Within it the model has whole parameters, to read and to change; collective.

        What is changed in place is kept: each rank keeps its part of the parameters, so all make the same changes. With
        mixed precision the whole parameters are of that dtype, and what is not changed stays as precise as it was.
        """
        self.gather_parameters()
        try:
            yield self.module
        finally:
            self.reshard_parameters()

    def gather_parameters(self) -> None:
        """Make parameters whole on every rank, until `reshard_parameters` or the next backward; collective."""
        self._gathering.gather()

    def reshard_parameters(self) -> None:
        """Keep only this rank's part again, with what was changed since `gather_parameters`."""
        self._gathering.reshard()

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, groups: Any = ()) -> float:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; collective.

        See `axon_nb.parallel.clip_grad_norm`, whose arguments these are.

        Returns:
            The norm before: that of a single process.

        Raises:
            CommError: the gradients are not reduced yet.
        """
        self.sync_gradients()
        return clip_grad_norm(self.module, max_norm, norm_type=norm_type, groups=groups)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers, on the CPU of every rank; collective, so every rank calls it."""
        return {name: whole(value) for name, value in self.module.state_dict().items()}

    def memory_estimate(
        self,
        *,
        optimizer: OptimizerKind | Callable[..., Optimizer] | None = None,
        states_per_param: float | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> FSDPMemoryStats:
        """Model states on this rank by formula; see `model_states`.

        Args:
            optimizer: Which one; None: the one made by `optimizer`, or else Adam.
            states_per_param: Elements of state a parameter element; None: the optimizer is asked.
            state_dtype: dtype of the states; None: the optimizer is asked.
        """
        kind = optimizer if isinstance(optimizer, OptimizerKind) else OptimizerKind(optimizer) if optimizer else None
        return model_states(
            self._shapes,
            self.strategy,
            optimizer=kind or self._kind,
            states_per_param=states_per_param,
            state_dtype=state_dtype,
            offload=self.cpu_offload,
            **self._place(),
        )

    def _place(self) -> dict[str, Any]:
        """This rank among those that share a copy, as `model_states` takes it."""
        last = self.mesh.ndim - 1
        sharded = self.strategy is not ShardingStrategy.NO_SHARD
        return {
            "world_size": self.mesh.size(),
            "shard_size": self.mesh.size(last) if sharded else None,
            "rank": self.mesh.get_local_rank(last),
            "device_type": self.mesh.device_type,
        }

    def memory_stats(self, optimizer: Optimizer | None = None) -> FSDPMemoryStats:
        """Model states that this rank holds now: the storages of its tensors.

        Args:
            optimizer: Whose states; None: the one made by `optimizer`.
        """
        return measured(
            self.module.parameters(),
            self._made() if optimizer is None else optimizer,
            estimate=self.memory_estimate(),
            offload=self.cpu_offload,
            device=device_of(self.mesh),
        )


FullyShardedDataParallel = FSDP
