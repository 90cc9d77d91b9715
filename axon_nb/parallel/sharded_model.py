"""What all models have whose states are sharded: their optimizer, the norm of their gradients, their memory."""

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

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import ProcessGroup
from axon_nb.parallel.clip import clip_grad_norm
from axon_nb.parallel.gathering import fill, local_part, whole
from axon_nb.parallel.held_memory import measured
from axon_nb.parallel.memory import FSDPMemoryStats, model_states
from axon_nb.parallel.offload import HostParameters, keep_states_on_host
from axon_nb.parallel.optimizer_state import OptimizerKind
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy, known
from axon_nb.parallel.units import device_of

__all__ = ["ShardedModel"]


class ShardedModel(nn.Module):
    """A model whose states are sharded over the ranks of a mesh.

    Args:
        model: Before it is sharded.
        strategy: What is sharded.
        cpu_offload: What is kept in the host's memory.
    """

    module: Any
    """The model."""
    mesh: DeviceMesh
    """The ranks; its last axis is that of the shards."""
    _host: HostParameters | None = None

    def __init__(self, model: nn.Module, strategy: ShardingStrategy, cpu_offload: CPUOffload) -> None:
        super().__init__()
        self.strategy = known(ShardingStrategy, strategy, "strategy")
        self.cpu_offload = known(CPUOffload, cpu_offload, "cpu_offload")
        # With tensor parallelism as well: of this rank's part.
        self._shapes = [(tuple(local_part(p).shape), p.dtype, p.requires_grad) for p in model.parameters()]
        self._kind: OptimizerKind | None = None
        self._made: Callable[[], Optimizer | None] = lambda: None

    @abstractmethod
    def sync_gradients(self) -> None:
        """See that the gradients are reduced; collective."""

    @abstractmethod
    def gather_parameters(self) -> None:
        """Make parameters whole on every rank; collective."""

    @abstractmethod
    def reshard_parameters(self) -> None:
        """Keep only this rank's part again, with what was changed since `gather_parameters`."""

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share one copy of the states."""
        return ProcessGroup.wrap(self.mesh.get_group(self.mesh.ndim - 1))

    def optimizer(
        self, kind: Callable[..., Optimizer] = torch.optim.Adam, parameters: Iterable[Any] | None = None, **options: Any
    ) -> Optimizer:
        """An optimizer that keeps its states where the strategy and the offloading say.

        Args:
            kind: Its class.
            parameters: Parameters of this model, or groups of them as torch's optimizers take them; None: all.
            options: Its arguments, such as `lr`.
        """
        made = self._make_optimizer(kind, list(self.parameters() if parameters is None else parameters), options)
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

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over whole parameters and buffers, such as `full_state_dict` gives; the same on every rank.

        Raises:
            CommError: names or shapes differ from the model's.
        """
        self.reshard_parameters()
        own = self.module.state_dict()
        for name in sorted(own.keys() ^ state.keys()):
            raise CommError(
                f"{name} is in {'the model' if name in own else 'the state'} alone: they are of two models."
            )
        for name, value in state.items():
            if own[name].shape != value.shape:
                raise CommError(
                    f"{name} is {tuple(own[name].shape)} in the model and {tuple(value.shape)} in the state."
                )
        for name, value in state.items():
            fill(own[name], value)

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
        kind = optimizer if optimizer is None or isinstance(optimizer, OptimizerKind) else OptimizerKind(optimizer)
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
        return {
            "world_size": self.mesh.size(),
            "shard_size": None if self.strategy is ShardingStrategy.NO_SHARD else self.mesh.size(last),
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
