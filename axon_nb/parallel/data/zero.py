"""ZeRO-1: DDP with optimizer states partitioned over ranks (torch's ZeroRedundancyOptimizer)."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from axon_nb.comm.collectives.movement import barrier
from axon_nb.comm.group import GroupLike
from axon_nb.comm.types import Backend
from axon_nb.errors import UsageError
from axon_nb.parallel.data.ddp import DDP
from axon_nb.parallel.data.fsdp import FSDP
from axon_nb.parallel.data.sharded_model import ShardedModel
from axon_nb.parallel.data.units import Wrap, resolve_mesh
from axon_nb.parallel.optimizer_kind import local_optimizer
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy


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
        wrap: Wrap = None,
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
        self.mesh = resolve_mesh(group, mesh, self.strategy, model)
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
