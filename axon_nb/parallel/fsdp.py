"""Fully sharded data parallelism on torch's `fully_shard` (FSDP2): every rank keeps a part of each parameter."""

from __future__ import annotations

import contextlib
import enum
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike, ProcessGroup, resolve
from axon_nb.comm.kinds import Backend
from axon_nb.parallel.memory import FSDPMemoryStats, ShardingStrategy, model_states

__all__ = ["FSDP", "CPUOffload", "FullyShardedDataParallel"]

_MB = 1024.0 * 1024.0


class CPUOffload(enum.Enum):
    """What is kept in the host's memory between uses."""

    NONE = "none"
    FULL = "full"
    """Parameters, gradients and optimizer state, and the optimizer's step runs there."""


class FSDP(nn.Module):
    """A model whose parameters, gradients and optimizer state are sharded over ranks.

    Make the optimizer afterwards, from `parameters()`: they are the shards.

    Args:
        model: The same on all ranks.
        group: A World, a group of ours or of torch's; None: all ranks. Not with `mesh`.
        strategy: What is sharded.
        mesh: For HYBRID_SHARD: two-dimensional, (copies, shards); for the others one-dimensional.
        wrap: Which submodules are gathered as a unit, besides the model: classes, or a least number of parameters;
            None: its direct children that have parameters.
        mixed_precision: dtype of parameters in forward and backward, such as `torch.bfloat16`; gradients are reduced
            in float32. None: as they are.
        cpu_offload: What is kept in the host's memory.

    Raises:
        CommError: a mesh that does not fit the strategy.
        NotInGroup: this rank is no member of the group.
    """

    def __init__(
        self,
        model: nn.Module,
        group: GroupLike | Any = None,
        *,
        strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        mesh: DeviceMesh | None = None,
        wrap: type | tuple[type, ...] | int | None = None,
        mixed_precision: torch.dtype | None = None,
        cpu_offload: CPUOffload = CPUOffload.NONE,
    ) -> None:
        super().__init__()
        if strategy is ShardingStrategy.OPTIMIZER_STATE:
            raise CommError("OPTIMIZER_STATE (ZeRO-1) is DDP with torch's ZeroRedundancyOptimizer, and no FSDP.")
        self.strategy = strategy
        self.cpu_offload = cpu_offload
        self._group = resolve(group) if mesh is None else None
        self.mesh = _mesh(self._group, strategy) if mesh is None else _checked(mesh, strategy)
        options: dict[str, Any] = {"mesh": self.mesh}
        if mixed_precision is not None:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        if cpu_offload is CPUOffload.FULL:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        keep_whole = strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        self._shapes = [(tuple(p.shape), p.dtype) for p in model.parameters()]
        for unit in _units(model, wrap):
            fully_shard(unit, reshard_after_forward=not keep_whole, **options)
        self.module: Any = fully_shard(model, reshard_after_forward=False if keep_whole else None, **options)
        self._synced = True

    @property
    def process_group(self) -> ProcessGroup:
        """The ranks that share one copy of the model."""
        return ProcessGroup.wrap(self.mesh.get_group(self.mesh.ndim - 1))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates, whole gradients on each rank; the next backward outside reduces them."""
        self.module.set_requires_gradient_sync(False)
        self._synced = False
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def sync_gradients(self) -> None:
        """Nothing: backward has reduced the gradients.

        Raises:
            CommError: the last backward was within `no_sync`, so they are whole and unreduced.
        """
        if not self._synced and any(p.grad is None for p in self.module.parameters() if p.requires_grad):
            raise CommError(
                "the gradients were accumulated within no_sync(): the last micro-batch's backward, outside of it, "
                "reduces them."
            )
        self._synced = True

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """Within it the model has whole parameters, to read; collective."""
        self.gather_parameters()
        try:
            yield self.module
        finally:
            self.reshard_parameters()

    def gather_parameters(self) -> None:
        """Make parameters whole on every rank; collective."""
        for unit in self._sharded():
            unit.unshard()

    def reshard_parameters(self) -> None:
        """Keep only this rank's part again."""
        for unit in self._sharded():
            unit.reshard()

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; collective.

        Returns:
            The 2-norm before: that of a single process.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers, on the CPU of every rank; collective, so every rank calls it."""
        state = self.module.state_dict()
        return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu() for n, v in state.items()}

    def memory_estimate(
        self, *, states_per_param: float = 2.0, state_dtype: torch.dtype | None = None
    ) -> FSDPMemoryStats:
        """Model states on this rank by formula; see `model_states`."""
        shards = self.mesh.size(self.mesh.ndim - 1)
        return model_states(
            self._shapes,
            self.strategy,
            world_size=self.mesh.size(),
            shard_size=None if self.strategy is ShardingStrategy.NO_SHARD else shards,
            states_per_param=states_per_param,
            state_dtype=state_dtype,
        )

    def memory_stats(self, optimizer: torch.optim.Optimizer | None = None) -> FSDPMemoryStats:
        """Model states that this rank holds now: the storages of its tensors."""
        parameters = list(self.module.parameters())
        states = [] if optimizer is None else [v for s in optimizer.state.values() for v in s.values()]
        whole = self.memory_estimate()
        return FSDPMemoryStats(
            whole.total_params,
            _bytes(parameters),
            _bytes([p.grad for p in parameters]),
            _bytes([value for value in states if isinstance(value, torch.Tensor) and value.ndim > 0]),
            whole.world_size,
            whole.unsharded_bytes,
            _peak_mb(),
        )

    def _sharded(self) -> list[FSDPModule]:
        return [unit for unit in self.module.modules() if isinstance(unit, FSDPModule)]


FullyShardedDataParallel = FSDP


def _mesh(group: ProcessGroup | None, strategy: ShardingStrategy) -> DeviceMesh:
    assert group is not None
    device = "cuda" if group.backend is Backend.NCCL or torch.cuda.is_available() else "cpu"
    if strategy is ShardingStrategy.HYBRID_SHARD:
        raise CommError("HYBRID_SHARD needs a mesh of (copies, shards): make_mesh(replicate=2, shard=-1).")
    if strategy is ShardingStrategy.NO_SHARD:
        # Every rank a copy, each "sharded" over itself alone.
        return DeviceMesh(device, torch.tensor(group.ranks).view(-1, 1), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh.from_group(group.torch_group, device, mesh_dim_names=("shard",))


def _checked(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    wanted = 2 if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD) else 1
    if mesh.ndim != wanted:
        raise CommError(f"{strategy.name} on a mesh of {mesh.ndim} dimensions: it takes {wanted}.")
    if strategy is ShardingStrategy.NO_SHARD and mesh.size(1) != 1:
        raise CommError(f"NO_SHARD on a mesh of shape {tuple(mesh.shape)}: its second dimension is 1.")
    return mesh


def _units(model: nn.Module, wrap: type | tuple[type, ...] | int | None) -> list[nn.Module]:
    """The submodules that are units of their own, inner ones first."""
    if wrap is None:
        return [child for child in model.children() if any(True for _ in child.parameters())]
    if isinstance(wrap, int):
        return _by_size(model, wrap)
    chosen: Callable[[nn.Module], bool] = lambda module: isinstance(module, wrap)  # noqa: E731
    return [module for module in reversed(list(model.modules())) if module is not model and chosen(module)]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Units of at least so many parameters that no inner unit has."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        if module is not model and left >= least:
            units.append(module)
            return 0
        return left

    visit(model)
    return units


def _bytes(tensors: list[Any]) -> int:
    storages = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local is not None:
            # The gradients of a unit are views into what one reduce-scatter gave.
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _peak_mb() -> float:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return float(torch.cuda.max_memory_allocated()) / _MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0
