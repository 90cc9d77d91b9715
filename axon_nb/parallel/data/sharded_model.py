"""Base class of sharded models: optimizer, gradient norm, full states and memory."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from axon_nb.comm.group import ProcessGroup
from axon_nb.errors import UsageError
from axon_nb.parallel.clip import clip_grad_norm
from axon_nb.parallel.data.gathering import copy_full_value, full_value, local_shard
from axon_nb.parallel.data.offload import ParameterOffloader, offload_states
from axon_nb.parallel.data.units import local_device
from axon_nb.parallel.memory import FSDPMemoryStats, measure_model_states, model_states
from axon_nb.parallel.optimizer_kind import OptimizerKind
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy, parse_enum


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
    _host: ParameterOffloader | None = None

    def __init__(self, model: nn.Module, strategy: ShardingStrategy, cpu_offload: CPUOffload) -> None:
        super().__init__()
        self.strategy = parse_enum(ShardingStrategy, strategy, "strategy")
        self.cpu_offload = parse_enum(CPUOffload, cpu_offload, "cpu_offload")
        # With tensor parallelism, the shapes of this rank's shards.
        self._shapes = [(tuple(local_shard(p).shape), p.dtype, p.requires_grad) for p in model.parameters()]
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
            offload_states(created, local_device(self.mesh))
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
        return {name: full_value(value) for name, value in self.module.state_dict().items()}

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
            copy_full_value(shards[name], value)

    def memory_estimate(
        self,
        *,
        optimizer: OptimizerKind | Callable[..., Optimizer] | None = None,
        states_per_param: float | None = None,
        state_dtype: torch.dtype | None = None,
    ) -> FSDPMemoryStats:
        """Estimate the model states on this rank by formula; see `model_states`.

        Args:
            optimizer: The optimizer; None: the one created by `optimizer`, or else Adam.
            states_per_param: Elements of state per parameter element; None: determined from the optimizer.
            state_dtype: dtype of the states; None: determined from the optimizer.
        """
        kind = optimizer if optimizer is None or isinstance(optimizer, OptimizerKind) else OptimizerKind(optimizer)
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
            device=local_device(self.mesh),
        )
