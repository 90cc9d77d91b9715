"""Which parameters of an optimizer have replicas on other ranks, and what they are called.

DDP keeps the parameters of its model equal, DTensors and declared tensors are equal along the axes of their mesh over
which they are replicated, and so are some parameters of axon_nb's tensor-parallel layers. Other parameters may differ
between ranks as the program pleases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm.placements import Placed, placed
from axon_nb.engine.live_objects import live_objects
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.parity.recorder import named_parameters
from axon_nb.engine.session import RankSession
from axon_nb.engine.sharding.placement import layer_shardings

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_FSDP = ("torch.distributed.fsdp", "FSDPModule")


def root_models(session: RankSession) -> list[tuple[str, nn.Module]]:
    """Return the outermost models of this rank with their variables; DDP and FSDP2 models may be in none."""
    variables = user_variables(session.kernel.shell).items()
    models = [(name, value) for name, value in variables if issubclass(type(value), nn.Module)]
    ddp, fsdp = live_objects(_DDP, _FSDP)
    models += [("", model) for model in (*ddp, *fsdp)]
    inside = {id(part) for _, model in models for part in model.modules() if part is not model}
    outermost = {id(model): (name, model) for name, model in reversed(models) if id(model) not in inside}
    return list(outermost.values())


class Replicas:
    """What is known of the parameters of one optimizer; keeps none of them.

    Args:
        parameters: Them.
        models: From `root_models`.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], models: Sequence[tuple[str, nn.Module]]) -> None:
        self.names = _names(parameters, models)
        """A path in the model for each."""
        self.compared: list[int] = []
        """Those that have replicas, by their index."""
        self.sets: dict[tuple[int, ...], list[int]] = {}
        """By ranks that hold the same, the parameters, by their index in `compared`."""
        in_ddp, in_layers = _in_ddp(), _in_layers(model for _, model in models)
        for index, parameter in enumerate(parameters):
            found = placed(parameter)
            sets = {in_ddp.get(id(parameter), ()), in_layers.get(id(parameter), ())}
            sets.add(_along_replicated_axes(found) if found is not None else ())
            several = sorted(ranks for ranks in sets if len(ranks) > 1)
            for ranks in several:
                self.sets.setdefault(ranks, []).append(len(self.compared))
            if several:
                self.compared.append(index)


def _names(parameters: Sequence[torch.Tensor], models: Sequence[tuple[str, nn.Module]]) -> list[str]:
    found: dict[int, tuple[str, str]] = {}
    for variable, model in models:
        for name, held in named_parameters(model):
            found.setdefault(id(held), (variable, name))
    several = len({found[id(one)][0] for one in parameters if id(one) in found}) > 1
    names = []
    for index, parameter in enumerate(parameters):
        variable, name = found.get(id(parameter), ("", f"parameter {index}"))
        names.append(f"{variable}.{name}" if several and variable else name)
    return names


def _in_ddp() -> dict[int, tuple[int, ...]]:
    groups: dict[int, tuple[int, ...]] = {}
    for model in live_objects(_DDP)[0]:
        try:
            ranks = tuple(sorted(dist.get_process_group_ranks(model.process_group)))
        except KeyError:  # its group has been destroyed
            continue
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        for name, parameter in model.module.named_parameters():
            if name not in ignored:
                groups[id(parameter)] = ranks
    return groups


def _in_layers(models: Iterable[nn.Module]) -> dict[int, tuple[int, ...]]:
    modules = (module for model in models for module in model.modules())
    return {
        key: tuple(sharding.group.ranks) for key, sharding in layer_shardings(modules).items() if sharding.dim is None
    }


def _along_replicated_axes(tensor: Placed) -> tuple[int, ...]:
    """Return the ranks that hold the same part of a tensor, of which this one is one."""
    at = tensor.mesh.get_coordinate()
    if at is None:
        return ()
    holders: Any = tensor.mesh.mesh
    for axis in _split_axes(tensor):
        holders = holders.select(axis, at[axis])
    return tuple(sorted(holders.flatten().tolist()))


def _split_axes(tensor: Placed) -> Iterator[int]:
    """Yield the axes over which it is not replicated, the last first."""
    for axis in reversed(range(len(tensor.placements))):
        if not tensor.placements[axis].is_replicate():
            yield axis
