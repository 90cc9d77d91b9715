"""Fully sharded data parallelism on torch's `fully_shard` (FSDP2): every rank keeps a part of each parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike
from axon_nb.parallel.backward import before_backward
from axon_nb.parallel.gathering import Gathering
from axon_nb.parallel.offload import HostParameters
from axon_nb.parallel.same_model import share_start
from axon_nb.parallel.sharded_model import ShardedModel
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy, known
from axon_nb.parallel.units import Wrap, device_of, make_units, mesh_of

__all__ = ["FSDP", "FullyShardedDataParallel"]


class FSDP(ShardedModel):
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
        CommError: a mesh that does not fit the strategy; an option has no meaning.
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
        super().__init__(model, strategy, cpu_offload)
        if self.strategy is ShardingStrategy.OPTIMIZER_STATE:
            raise CommError(f"OPTIMIZER_STATE with {type(self).__name__}: derive it from ZeRO1, which has it.")
        self.mesh = mesh_of(group, mesh, self.strategy)
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
        self._accumulates, self._synced = False, True
        if self.cpu_offload is CPUOffload.PARAMS:
            self._host = HostParameters(model, device_of(self.mesh))

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

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        made = super()._make_optimizer(kind, parameters, options)
        # A forward that no backward follows leaves parameters whole: the step would pass them by, and the next forward
        # would use them.
        made.register_step_pre_hook(lambda *_: self.reshard_parameters())
        return made

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

    def gather_parameters(self) -> None:
        """Make parameters whole on every rank, until `reshard_parameters` or the next backward; collective."""
        self._gathering.gather()

    def reshard_parameters(self) -> None:
        """Keep only this rank's part again, with what was changed since `gather_parameters`."""
        self._gathering.reshard()


FullyShardedDataParallel = FSDP
