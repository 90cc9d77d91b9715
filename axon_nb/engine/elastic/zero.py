"""ZeRO-1 optimizers in a world of another size: each parameter's states move to the rank that updates it then.

Private hooks into torch's ZeroRedundancyOptimizer, `elastic.zero` in the register.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from axon_nb.engine.sharding.sharded import loaded_class


def is_zero(value: Any) -> bool:
    """Whether the value is torch's ZeroRedundancyOptimizer."""
    return isinstance(
        value, loaded_class("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    )


def overlaps(optimizer: Any) -> bool:
    """Whether DDP runs its steps, in pieces, during the backward."""
    return bool(optimizer._overlap_with_ddp)


def owners(optimizer: Any, size: int) -> list[int]:
    """Return, for each of its parameters, the rank that updates it in a world of `size` ranks."""
    before = optimizer.world_size
    optimizer._clear_cache()
    optimizer.world_size = size
    try:
        by_parameter = dict(optimizer._param_to_rank)
        return [by_parameter[parameter] for parameter in optimizer._all_params]
    finally:
        optimizer.world_size = before
        optimizer._clear_cache()


def states(optimizer: Any) -> dict[tuple[int, str], Any]:
    """Return the states that this rank holds, by the parameter's index and the state's name."""
    index_of = {id(parameter): index for index, parameter in enumerate(optimizer._all_params)}
    return {
        (index_of[id(parameter)], key): value
        for parameter, state in optimizer.optim.state.items()
        for key, value in state.items()
    }


@torch.no_grad()
def adopt(optimizer: Any, held: Mapping[tuple[int, str], Any], *, rank: int, size: int) -> None:
    """Make the optimizer one of `size` ranks, with these states for the parameters that this rank updates.

    Args:
        optimizer: The optimizer.
        held: What `states` returns, for the new world.
        rank: This rank.
        size: Number of ranks.
    """
    optimizer.rank = optimizer.global_rank = rank
    optimizer.world_size = size
    optimizer._clear_cache()
    optimizer._init_local_optimizer()
    for (index, key), value in held.items():
        optimizer.optim.state[optimizer._all_params[index]][key] = value
    optimizer._build_param_buckets()


def step_alone(optimizer: Any, held: Mapping[tuple[int, str], Any]) -> None:
    """Let this rank step all parameters by itself, as the optimizer inside would on one rank.

    Args:
        optimizer: The optimizer; what it holds of the world stays as it is.
        held: What `states` returns, of all ranks.
    """
    alone = copy.copy(optimizer.optim)
    alone.param_groups, alone.state = optimizer.param_groups, defaultdict(dict)
    for (index, key), value in held.items():
        parameter = optimizer._all_params[index]
        is_tensor = isinstance(value, torch.Tensor)
        device = parameter.device if is_tensor and value.ndim else "cpu"
        alone.state[parameter][key] = value.to(device, copy=True) if is_tensor else value
    vars(optimizer)["step"] = alone.step
