"""The state of a rank during a resize: shards for the new world lie beside the old ones until all ranks have theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.engine.elastic import fsdp, zero
from axon_nb.engine.elastic.meshes import resize_meshes
from axon_nb.engine.elastic.samplers import resize_samplers
from axon_nb.engine.elastic.sharded_states import (
    Key,
    Piece,
    fsdp_models,
    own_pieces,
    parameters_of,
    sharded_optimizers,
    zero_optimizers,
)
from axon_nb.engine.elastic.slices import move, reshard
from axon_nb.engine.elastic.world import groups_with_absent_ranks, set_world
from axon_nb.engine.groups.install import c10d
from axon_nb.engine.live_objects import live_objects
from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.records.protocol.joining import Committed, JoinConfig

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")


def stage(old_size: int, new_size: int) -> int:
    """Send shards to where they belong in the new world; collective over the ranks of both worlds.

    Returns:
        Bytes of this rank's shards.

    Raises:
        RuntimeError: the ranks do not hold the same models.
    """
    rank = current().config.rank
    local_pieces = own_pieces() if rank < old_size else {}
    pieces = _all_pieces({key: piece for key, (piece, _) in local_pieces.items()}, old_size)
    owners = {name: zero.owners(optimizer, new_size) for name, optimizer in zero_optimizers().items()}
    staged: dict[Key, Any] = {}
    for key, piece in pieces.items():
        new_owner = owners[key[0]][int(key[1])] if piece.owner >= 0 else -1
        if piece.value is not None:
            staged[key] = piece.value
            continue
        local = local_pieces[key][1] if key in local_pieces else None
        device = current().device if piece.device == "cuda" else torch.device(piece.device)
        if piece.dim >= 0:
            staged[key] = reshard(
                local, piece.shape, piece.dtype, dim=piece.dim, old_size=old_size, new_size=new_size, device=device
            )
        elif new_owner >= 0:
            moved = move(local, piece.shape, piece.dtype, source=piece.owner, targets=[new_owner], device=device)
            staged |= {} if moved is None else {key: moved}
        else:
            receivers = [0, *range(old_size, new_size)]  # the others have it
            moved = move(local, piece.shape, piece.dtype, source=0, targets=receivers, device=device)
            staged[key] = local if rank < old_size else moved
    current().staged, current().staged_size = staged, new_size
    return sum(value.nbytes for value in staged.values() if isinstance(value, torch.Tensor))


def _all_pieces(own: Mapping[Key, Piece], old_size: int) -> dict[Key, Piece]:
    """Return what all ranks hold together, in the same order on all of them."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, dict(own))
    held = answers[:old_size]
    split = [{key for key, piece in answer.items() if piece.owner < 0} for answer in held]
    if different := set().union(*split) - set.intersection(*split):
        name = min(different)[0]
        raise RuntimeError(f"`{name}` does not have the same parameters and states on all ranks")
    together = {key: piece for answer in held for key, piece in answer.items()}
    return dict(sorted(together.items()))


def commit(old_size: int) -> Committed:
    """Use the staged shards instead of the old ones, and adapt the rest; does not communicate."""
    session = current()
    config, staged = session.config, session.staged
    models = fsdp_models()
    zeros = zero_optimizers()
    count = len(live_objects(_DDP)[0]) + len(models)
    resize_meshes(old_size)
    _commit_fsdp(models, staged)
    for name, optimizer in zeros.items():
        held = {(int(index), key): value for (variable, index, key), value in staged.items() if variable == name}
        owners = zero.owners(optimizer, config.world_size)
        held = {key: value for key, value in held.items() if owners[key[0]] == config.rank}
        zero.adopt(optimizer, held, rank=config.rank, size=config.world_size)
    session.staged, session.staged_size, session.resized_from = {}, 0, 0
    samplers = resize_samplers(old_size, rank=config.rank, size=config.world_size)
    return Committed(count, samplers, tuple(_drop_groups()), len(session.resize_functions))


def settle(config: JoinConfig, old_size: int) -> None:
    """End a resize that lost its notebook: in the world that the host agent knows; does not communicate.

    Args:
        config: This rank's place in that world.
        old_size: Number of ranks before the resize; 0: the resize did not get so far that this is the new world.
    """
    session = current()
    if session.config.world_size != config.world_size:
        set_world(config)
    elif old_size and session.staged_size == config.world_size:
        commit(old_size)
    session.staged, session.staged_size, session.resized_from = {}, 0, 0


def _commit_fsdp(models: Mapping[str, Any], staged: Mapping[Key, Any]) -> None:
    # Listed before anything changes: afterwards, an optimizer's parameters are no longer those of its states.
    optimizers = sharded_optimizers()
    replaced = {}
    for name, model in models.items():
        for parameter, group, record in list(fsdp.parameters(model)):
            local, gradient = staged[name, parameter, "parameter"], staged.get((name, parameter, "gradient"))
            before, now = fsdp.reshard_parameter(group, record, local, gradient)
            replaced[id(before)] = before, now
    fsdp.replace_parameters(replaced)
    for name, optimizer in optimizers.items():
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key in list(optimizer.state.get(parameter, {})):
                value = staged[name, str(index), key]
                optimizer.state[parameter][key] = _like(parameter, value, optimizer.state[parameter][key])


def _like(parameter: Any, value: Any, before: Any) -> Any:
    """Return a state as the parameter's kind of tensor, if it is split as the parameter is."""
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor) or before.shape != parameter.shape:
        return value
    return type(parameter.data).from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _drop_groups() -> list[str]:
    """Drop the groups of which ranks have left; return the variables that hold one."""
    left = groups_with_absent_ranks()
    variables = user_variables(current().kernel.shell)
    names = [name for name, value in variables.items() if any(value is group for group in left)]
    for group in left:
        group.disable()
        c10d.destroy_process_group(group)
    return names
