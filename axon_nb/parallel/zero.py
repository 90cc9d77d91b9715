"""ZeRO-1: DDP with an optimizer whose states are dealt out over ranks (torch's ZeroRedundancyOptimizer)."""

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

from axon_nb.comm.errors import CommError
from axon_nb.comm.group import GroupLike
from axon_nb.comm.kinds import Backend
from axon_nb.comm.move import barrier
from axon_nb.parallel.ddp import DDP
from axon_nb.parallel.fsdp import FSDP
from axon_nb.parallel.optimizer_state import own_optimizer
from axon_nb.parallel.sharded_model import ShardedModel
from axon_nb.parallel.strategies import CPUOffload, ShardingStrategy
from axon_nb.parallel.units import Wrap, mesh_of

__all__ = ["ZeRO1"]


class ZeRO1(FSDP, strategy=ShardingStrategy.OPTIMIZER_STATE):
    """A model that is whole on every rank, as in DDP, and whose optimizer states are dealt out over ranks.

    Make the optimizer with `optimizer(torch.optim.Adam, lr=…)`, which takes the options of torch's
    ZeroRedundancyOptimizer as well: when all ranks have come to its step (on CPUs), each updates the parameters whose
    states it has, and sends them to the others. `FSDP(…, strategy=ShardingStrategy.OPTIMIZER_STATE)` is the same.

    Args:
        model: Of the same shapes on all ranks; rank 0's values are sent to all.
        group: A World, a group of ours or of torch's; None: all ranks. Not with `mesh`.
        strategy: OPTIMIZER_STATE.
        mesh: One-dimensional.
        wrap: Ignored: nothing is gathered.
        mixed_precision: None; `torch.autocast` computes in another dtype.
        cpu_offload: NONE or OPTIMIZER_STATES.
        sync_parameters: As in `FSDP`.
        ddp_options: Those of `DDP`. Unlike there, gradients are views into the buckets, so that they are held once.

    Raises:
        CommError: what only a model that is sharded can do.
        NotInGroup: this rank is no member of the group.
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
            raise CommError(f"ZeRO1 with {self.strategy.name}: FSDP(model, strategy=…) has the other strategies.")
        if self.cpu_offload in (CPUOffload.PARAMS, CPUOffload.FULL):
            raise CommError(
                f"{self.cpu_offload.name} with ZeRO-1: its parameters are whole on every device; FULL_SHARD can have "
                "them on the host, and OPTIMIZER_STATES works here."
            )
        if mixed_precision is not None:
            raise CommError(
                f"mixed_precision={mixed_precision} with ZeRO-1: torch.autocast around the forward instead."
            )
        self.mesh = mesh_of(group, mesh, self.strategy)
        ddp_options.setdefault("gradient_as_bucket_view", True)
        self.module = model
        # Out of the sight of nn.Module: `module` is the submodule, with the names that the other strategies have.
        self._held = (DDP(model, self.process_group, init_sync=sync_parameters, **ddp_options),)

    @property
    def ddp(self) -> DDP:
        """The wrapper that averages gradients."""
        return self._held[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's."""
        return self.ddp(*args, **kwargs)

    def _make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: list[Any], options: dict[str, Any]
    ) -> Optimizer:
        group = self.process_group
        # One broadcast a rank, and not one a parameter.
        options = {"parameters_as_bucket_view": True} | options
        made: Optimizer = _zero_redundancy()(
            parameters, optimizer_class=kind, process_group=group.torch_group, **options
        )
        if group.backend is not Backend.NCCL:  # there a barrier has the CPU wait for the card
            # A rank that fails before its step releases the others here. In the broadcasts after their updates it
            # would leave these half done: each has changed its own part.
            made.register_step_pre_hook(lambda *_: barrier(group=group))
        return made

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it backward only accumulates; the next backward outside averages the sum."""
        with self.ddp.no_sync():
            yield

    def sync_gradients(self) -> None:
        """Average the gradients over ranks, unless the last backward has done so; collective."""
        self.ddp.sync_gradients()

    def gather_parameters(self) -> None:
        """Nothing: parameters are whole."""

    def reshard_parameters(self) -> None:
        """Nothing: what is changed in the parameters is kept; all ranks make the same changes."""

    def _place(self) -> dict[str, Any]:
        place = super()._place()
        made = self._made()
        if made is not None and own_optimizer(made) is not made:
            # Dealt out group by group, of the parameters that the optimizer was given.
            here = {id(parameter) for group in own_optimizer(made).param_groups for parameter in group["params"]}
            place["owned"] = {i for i, parameter in enumerate(self.module.parameters()) if id(parameter) in here}
        return place


@functools.cache
def _zero_redundancy() -> Any:
    # Its package compiles functions with torch.jit.script, which torch itself has deprecated.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer
