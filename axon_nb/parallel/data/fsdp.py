"""Fully sharded data parallelism on torch's `fully_shard` (FSDP2): each rank holds a shard of each parameter."""

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

from axon_nb.comm.group import GroupLike
from axon_nb.errors import UsageError
from axon_nb.parallel.data.gathering import ParameterGatherer, on_backward_start
from axon_nb.parallel.data.model_check import broadcast_model
from axon_nb.parallel.data.offload import ParameterOffloader
from axon_nb.parallel.data.sharded_model import ShardedModel
from axon_nb.parallel.data.units import Wrap, local_device, make_units, resolve_mesh
from axon_nb.parallel.input_device import check_inputs
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy, parse_enum


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

    Raises:
        UsageError: the mesh does not fit the strategy, or an option is invalid.
        NotInGroupError: this rank is not a member of the group.
    """

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
        wrap: Wrap = None,
        mixed_precision: torch.dtype | MixedPrecisionPolicy | None = None,
        cpu_offload: CPUOffload = CPUOffload.NONE,
        sync_parameters: bool = True,
    ) -> None:
        super().__init__(model, strategy, cpu_offload)
        if self.strategy is ShardingStrategy.OPTIMIZER_STATE:
            raise UsageError(f"{type(self).__name__} cannot use OPTIMIZER_STATE; derive it from ZeRO1.")
        self.mesh = resolve_mesh(group, mesh, self.strategy, model)
        if sync_parameters:
            broadcast_model(model, self.mesh)
        options: dict[str, Any] = {"mesh": self.mesh}
        if isinstance(mixed_precision, torch.dtype):
            mixed_precision = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        policy = mixed_precision or MixedPrecisionPolicy()
        if self.cpu_offload is CPUOffload.FULL:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.mesh.device_type == "cuda")
        keep_whole = self.strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)
        for unit in make_units(model, wrap):
            # Only the model's own output is cast: between units the dtype stays the same.
            inner = replace(policy, output_dtype=None)
            fully_shard(unit, reshard_after_forward=not keep_whole, mp_policy=inner, **options)
        options |= {"mp_policy": policy, "reshard_after_forward": False if keep_whole else None}
        self.module: Any = fully_shard(model, **options)
        self._gatherer = ParameterGatherer(model, self.mesh)
        self._accumulating, self._synced = False, True
        if self.cpu_offload is CPUOffload.PARAMS:
            self._host = ParameterOffloader(model, local_device(self.mesh))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward."""
        check_inputs(self.mesh.device_type, lambda: local_device(self.mesh), args, kwargs)
        output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            if self._accumulating:
                self._synced = False
            elif not self._synced:
                on_backward_start(output, self._mark_synced)
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

    def gather_parameters(self) -> None:
        """Gather full parameters on every rank, until `reshard_parameters` or the next backward. Collective."""
        self._gatherer.gather()

    def reshard_parameters(self) -> None:
        """Keep only this rank's shard again, including changes made since `gather_parameters`."""
        self._gatherer.reshard()


FullyShardedDataParallel = FSDP
