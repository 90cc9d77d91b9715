"""Stage 2 as the ZeRO paper has it: whole parameters stay on each rank until a shard has changed.

Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020). FSDP2 hands the
all-gather of each unit to an object that allocates its output (`FSDPModule.set_custom_all_gather`). This one keeps the
output, and skips the all-gather while all ranks have the shards that were gathered. Parameters, gradients and states of
optimizers are FSDP2's shards, as in every other strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from axon_nb.comm.collectives.direct import all_gather_single
from axon_nb.parallel.data.units import local_device, local_shard, versions


class _KeptGather:
    """The all-gather of one unit."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.is_current = False
        """Whether the output holds what the ranks' shards are; the same on all ranks inside a forward."""
        self.has_run = False
        self._output = torch.empty(0, device="cpu")
        self._gathered: list[torch.Tensor] = []
        self._versions: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the output, and of the copy of this rank's shards."""
        return self._output.nbytes + sum(shard.nbytes for shard in self._gathered)

    def has_other(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether this rank's shards are others than at the last time; remembers them."""
        shards = [local_shard(parameters[name]) for name in self.names]
        before, self._versions = self._versions, [versions(parameters[name]) for name in self.names]
        # In a plan, tensors have no values.
        has_values = all(type(shard) is torch.Tensor for shard in shards)
        if len(shards) == len(self._gathered) and (
            all(map(torch.equal, shards, self._gathered)) if has_values else before == self._versions
        ):
            return False
        self._gathered = [shard.clone() for shard in shards]
        return True

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the output of the last time."""
        if (*self._output.shape, self._output.dtype) != (*size, dtype):
            self._output = torch.empty(*size, dtype=dtype, device=device)
        return self._output

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool) -> Any:
        if self.is_current:
            return None
        self.has_run = True
        return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class KeptParameters:
    """Keeps what the units of a model have gathered.

    Args:
        model: A model processed by `fully_shard`, sharded again after forward.
        mesh: Its mesh, of one dimension.
        dtype: In which parameters are gathered; None: their own.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self._model, self._mesh = model, mesh
        self.expected_bytes = 0
        """Bytes that are kept on this rank after a forward."""
        for shard in model.parameters():
            rows = shard.shape[0] if shard.ndim else 1
            padded = -(-rows // mesh.size()) * mesh.size() * (shard.numel() // max(rows, 1))
            self.expected_bytes += padded * (dtype or shard.dtype).itemsize + local_shard(shard).nbytes
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        names, self._gathers = {id(p): name for name, p in model.named_parameters()}, []
        for unit in reversed(self._units):  # inner ones first: the others hold the rest
            own = [names.pop(id(p)) for p in unit.parameters() if id(p) in names]
            self._gathers.append(_KeptGather(own))
            unit.set_custom_all_gather(self._gathers[-1])  # type: ignore[arg-type]
        model.register_forward_pre_hook(lambda *_: self.refresh(), prepend=True)
        model.register_forward_hook(lambda *_: self._confirm())

    @property
    def nbytes(self) -> int:
        """Bytes that are kept now on this rank."""
        return sum(gather.nbytes for gather in self._gathers)

    def refresh(self) -> None:
        """Find out which units have changed on any rank: they are gathered next time. Collective."""
        for unit in self._units:
            unit.reshard()
        parameters = dict(self._model.named_parameters())
        # Ranks whose last forward failed have nothing to keep, and every rank must decide alike.
        stale = [gather.has_other(parameters) or not gather.is_current for gather in self._gathers]
        flags = torch.tensor(stale, dtype=torch.int32, device=local_device(self._mesh))
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._mesh.get_group())
        agreed = flags.tolist() if type(flags) is torch.Tensor else stale
        for gather, is_stale in zip(self._gathers, agreed, strict=True):
            gather.is_current, gather.has_run = not is_stale, False

    def _confirm(self) -> None:
        for gather in self._gathers:
            gather.is_current |= gather.has_run
