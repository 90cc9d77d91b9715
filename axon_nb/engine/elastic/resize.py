"""A resize on one rank: obstacles, the new world, shards sent to their new ranks, and the user's `axon_nb.on_resize`.

What cannot be carried over is named with the reason and the fix, before anything is changed. Shards for the new world
lie beside the old ones until all ranks have theirs. The default group stays the same object, so whatever holds it (DDP,
samplers, `world`) belongs to the new world once the groups are rebuilt.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from axon_nb.comm.group import ProcessGroup, forget, resolve
from axon_nb.engine.elastic import sharded_states
from axon_nb.engine.groups.creation import c10d, rebuildable_groups
from axon_nb.engine.live_objects import DDP, FSDP, live_objects, objects_of, with_subclasses
from axon_nb.engine.session import current, own_rank, set_world_environment, user_variables
from axon_nb.engine.sharding import is_dtensor, is_sharded, is_stage, loaded_class, unreplicated_reason
from axon_nb.errors import UsageError
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.recovery import Committed, JoinConfig

_FIX = "Save a checkpoint, delete it with `del {name}`, resize, then recreate it and load the checkpoint"
_UNNAMED = "assign it to a variable, so that its shards can be found"
_SAMPLER = ("torch.utils.data.distributed", "DistributedSampler")
ResizeFunction = Callable[[int, int], Any]
"""Called with the old and the new number of ranks."""
F = TypeVar("F", bound=ResizeFunction)


def find_obstacles(new_size: int) -> dict[str, str]:
    """Return, by name, why variables of this rank cannot be carried over to `new_size` ranks, and the fix.

    FSDP2 models that a forward has left unsharded are sharded again.
    """
    reasons = {}
    for name, value in user_variables(current().kernel.shell).items():
        reason = ""
        with contextlib.suppress(Exception):  # an odd object of the user must not prevent a resize
            reason = _reason(value)
        if reason:
            reasons[name] = f"{reason}. {_FIX.format(name=name)}"
    if not reasons and dict(_unnamed()):
        current().snapshots.forget_cells()  # they keep alive what a cell has deleted; a resize drops them anyway
        reasons = dict(_unnamed())
    if not reasons:
        for model in sharded_states.fsdp_models().values():
            for state in sharded_states.fsdp_states(model):
                for module in state._modules:
                    module.reshard()
    return reasons


def _reason(value: Any) -> str:
    if is_stage(value):
        return "is a pipeline stage, which no other rank holds"
    if isinstance(value, torch.nn.Module):
        return _reason_of_model(value)
    if sharded_states.is_zero(value):
        if absent := missing_hooks("elastic.zero"):
            return f"cannot change its ranks: this torch lacks {absent[0]}"
        if value._overlap_with_ddp or value.process_group is not dist.group.WORLD:
            return "overlaps with DDP, or belongs to a part of the ranks"
        return ""
    if isinstance(value, torch.optim.Optimizer):
        return ""  # as its parameters
    return "is sharded over ranks" if is_sharded(value) else ""


def _reason_of_model(model: torch.nn.Module) -> str:
    size = current().config.world_size
    managed: set[int] = set()
    for _, group, record in sharded_states.fsdp_parameters(model):
        managed.add(id(record.sharded_param))
        info, after = group.mesh_info, group.post_forward_mesh_info
        if not sharded_states.is_world_mesh(info.mesh, size) or (after is not None and after is not info):
            return "is sharded over a part of the ranks, or over a mesh with several axes"
        if record.is_dtensor:
            return "is sharded by tensor parallelism as well"
    if managed and (absent := missing_hooks("elastic.fsdp2")):
        return f"cannot change its ranks: this torch lacks {absent[0]}"
    for module in model.modules():
        offload = getattr(module, "cpu_offload", None)
        if getattr(offload, "name", "NONE") != "NONE":
            return "is offloaded to the host"
        if is_stage(module):
            return "contains a pipeline stage"
        if getattr(module, "shard_dims", {}):
            return "has tensor-parallel layers"
    others = [parameter for parameter in model.parameters() if id(parameter) not in managed]
    if managed and not any(is_dtensor(parameter) for parameter in others):
        return ""
    return unreplicated_reason(others)


def _unnamed() -> Iterator[tuple[str, str]]:
    """Yield what is sharded and in no variable."""
    gc.collect()  # wrappers are in cycles of references
    known = {id(module) for model in sharded_states.fsdp_models().values() for module in model.modules()}
    (modules,) = live_objects(FSDP)
    for module in modules:
        if id(module) not in known:
            yield type(module).__name__, f"is sharded and in no variable: {_UNNAMED}"
    named = {
        id(optimizer)
        for optimizer in (*sharded_states.sharded_optimizers().values(), *sharded_states.zero_optimizers().values())
    }
    named |= {id(optimizer.optim) for optimizer in sharded_states.zero_optimizers().values()}
    zero = loaded_class("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer")
    for optimizer in objects_of(set(with_subclasses(torch.optim.Optimizer))):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        is_split = isinstance(optimizer, zero) or any(is_dtensor(parameter) for parameter in parameters)
        if is_split and id(optimizer) not in named:
            yield type(optimizer).__name__, f"has sharded states and is in no variable: {_UNNAMED}"


@torch.no_grad()
def reshard(
    local: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    dim: int,
    old_size: int,
    new_size: int,
    device: torch.device,
) -> torch.Tensor:
    """Return this rank's part of a tensor in the new world; collective over the ranks of both worlds.

    Args:
        local: This rank's part in the old world; None if it was not there.
        shape: Shape of the full tensor.
        dtype: Its dtype.
        dim: The dimension that is split.
        old_size: Number of ranks before.
        new_size: Number of ranks afterwards.
        device: Where the part is made.

    Returns:
        The part; without elements if this rank leaves.
    """
    rank, length = dist.get_rank(), shape[dim]

    def part(size: int, index: int) -> tuple[int, int]:
        """Start and end of a rank's part, as `torch.chunk` splits; of a rank that is not there, nothing."""
        step = -(-length // size)
        start = min(length, index * step)
        return (start, min(length, start + step)) if index < size else (0, 0)

    start, end = part(new_size, rank)
    result = torch.empty((*shape[:dim], end - start, *shape[dim + 1 :]), dtype=dtype, device=device)
    works: list[Any] = []
    received: list[tuple[torch.Tensor, torch.Tensor]] = []
    for peer in range(old_size):
        first, last = _overlap(part(old_size, peer), (start, end))
        if first < last:
            place = result.narrow(dim, first - start, last - first)
            if peer == rank and local is not None:
                place.copy_(local.narrow(dim, first - part(old_size, rank)[0], last - first))
            elif place.numel():
                buffer = torch.empty_like(place, memory_format=torch.contiguous_format)
                works.append(dist.irecv(buffer, peer))
                received.append((place, buffer))
    bounds = part(old_size, rank)
    for peer in range(new_size):
        first, last = _overlap(bounds, part(new_size, peer))
        if first < last and peer != rank and local is not None:
            piece = local.narrow(dim, first - bounds[0], last - first).contiguous()
            if piece.numel():
                works.append(dist.isend(piece, peer))
    for work in works:
        work.wait()
    for place, buffer in received:
        place.copy_(buffer)
    return result


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


@torch.no_grad()
def move(
    tensor: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    source: int,
    targets: Sequence[int],
    device: torch.device,
) -> torch.Tensor | None:
    """Send a tensor from one rank to others; collective over these ranks.

    Args:
        tensor: The tensor, on rank `source`.
        shape: Its shape.
        dtype: Its dtype.
        source: The rank that has it.
        targets: The ranks that need it; may include `source`.
        device: Where the other ranks make it.

    Returns:
        The tensor on the ranks that need it, None on all others.
    """
    rank = dist.get_rank()
    if rank == source and tensor is not None:
        works = [dist.isend(tensor.contiguous(), peer) for peer in targets if peer != rank and tensor.numel()]
        for work in works:
            work.wait()  # type: ignore[union-attr]
    elif rank in targets:
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        if tensor.numel():
            dist.recv(tensor, source)
    return tensor if rank in targets else None


def set_world(config: JoinConfig) -> None:
    """Make this rank one of a world of another size, before its groups are rebuilt; does not communicate.

    The same call with the old configuration undoes it.

    Args:
        config: This rank's place in the new world.
    """
    session = current()
    before, session.config = session.config, config
    session.snapshots.forget_cells()  # their shards are those of the world before
    session.protection.forget()
    session.resized_from = 0 if session.resized_from == config.world_size else before.world_size
    if not session.resized_from:
        session.staged, session.staged_size = {}, 0
    default: Any = c10d._get_default_group()
    default.resize(config.rank, config.world_size)
    c10d._world.pg_group_ranks[default] = {rank: rank for rank in range(config.world_size)}
    # Wrappers hold ranks and size: `axon_nb.comm` creates one for each function that gets the group.
    forget(default)
    for wrapper in objects_of({ProcessGroup}):
        if wrapper.is_member and wrapper.torch_group is default:
            wrapper.info = resolve(default).info
    torch.set_num_threads(config.threads)
    set_world_environment(config)
    names = session.kernel.shell.user_ns
    for name in ("rank", "local_rank", "world_size"):
        if names.get(name) == getattr(before, name):  # not what the user stored under the name
            names[name] = getattr(config, name)
    session.subgroup = None


def resize_samplers(old_size: int, *, rank: int, size: int) -> int:
    """Have every sampler over all `old_size` ranks split its dataset over `size`; return how many there are.

    An iteration that has begun keeps its samples. axon_nb's `ResumableSampler` continues after the samples that all
    ranks have seen.

    Args:
        old_size: Number of ranks before.
        rank: This rank.
        size: Number of ranks now.
    """
    (samplers,) = live_objects(_SAMPLER)
    chosen = [sampler for sampler in samplers if getattr(sampler, "num_replicas", None) == old_size]
    for sampler in chosen:
        _resize(sampler, rank, size)
    return len(chosen)


def _resize(sampler: Any, rank: int, size: int) -> None:
    # As torch's constructor calculates it.
    sampler.rank, sampler.num_replicas = rank, size
    length = len(sampler.dataset)
    rest = sampler.drop_last and length % size != 0
    sampler.num_samples = math.ceil((length - size) / size) if rest else math.ceil(length / size)
    sampler.total_size = sampler.num_samples * size


def stage(old_size: int, new_size: int) -> int:
    """Send shards to where they belong in the new world; collective over the ranks of both worlds.

    Returns:
        Bytes of this rank's shards.

    Raises:
        RuntimeError: the ranks do not hold the same models.
    """
    rank = current().config.rank
    local_pieces = sharded_states.own_pieces() if rank < old_size else {}
    pieces = _all_pieces({key: piece for key, (piece, _) in local_pieces.items()}, old_size)
    owners = {
        name: sharded_states.zero_owners(optimizer, new_size)
        for name, optimizer in sharded_states.zero_optimizers().items()
    }
    staged: dict[sharded_states.Key, Any] = {}
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


def _all_pieces(
    own: Mapping[sharded_states.Key, sharded_states.Piece], old_size: int
) -> dict[sharded_states.Key, sharded_states.Piece]:
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
    models = sharded_states.fsdp_models()
    zeros = sharded_states.zero_optimizers()
    count = len(live_objects(DDP)[0]) + len(models)
    sharded_states.resize_meshes(old_size)
    _commit_fsdp(models, staged)
    for name, optimizer in zeros.items():
        held = {(int(index), key): value for (variable, index, key), value in staged.items() if variable == name}
        owners = sharded_states.zero_owners(optimizer, config.world_size)
        held = {key: value for key, value in held.items() if owners[key[0]] == config.rank}
        sharded_states.adopt_zero_states(optimizer, held, rank=config.rank, size=config.world_size)
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


def _commit_fsdp(models: Mapping[str, Any], staged: Mapping[sharded_states.Key, Any]) -> None:
    # Listed before anything changes: afterwards, an optimizer's parameters are no longer those of its states.
    optimizers = sharded_states.sharded_optimizers()
    replaced = {}
    for name, model in models.items():
        for parameter, group, record in list(sharded_states.fsdp_parameters(model)):
            local, gradient = staged[name, parameter, "parameter"], staged.get((name, parameter, "gradient"))
            before, now = sharded_states.reshard_parameter(group, record, local, gradient)
            replaced[id(before)] = before, now
    sharded_states.replace_parameters(replaced)
    for name, optimizer in optimizers.items():
        for index, parameter in enumerate(sharded_states.parameters_of(optimizer)):
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
    size, ranks_of = current().config.world_size, c10d._world.pg_group_ranks
    left = [group for group in rebuildable_groups() if max(ranks_of[group]) >= size]
    variables = user_variables(current().kernel.shell)
    names = [name for name, value in variables.items() if any(value is group for group in left)]
    for group in left:
        group.disable()
        c10d.destroy_process_group(group)
    return names


def on_resize(function: F) -> F:
    """Register a function that `%distributed resize` calls afterwards on all ranks, also on new ones. Use in a cell.

    It gets the old and the new number of ranks, and may communicate. A function replaces an
    earlier one of the same name, so a cell can run again. New ranks get the functions together with the variables.

    Args:
        function: Such as ``def rebuild_loader(old_size, new_size): …``.

    Returns:
        The function, so that this works as a decorator.

    Raises:
        UsageError: the argument is not a function, or this process is not a rank.
    """
    if not callable(function):
        raise UsageError(f"on_resize needs a function of the old and the new number of ranks; got {function!r}.")
    if own_rank() is None:
        raise UsageError("on_resize registers a function on ranks: call it in a `%%distributed` cell.")
    current().resize_functions[getattr(function, "__name__", repr(function))] = function
    return function


def call_functions(old_size: int, new_size: int) -> None:
    """Call the registered functions in the order of their registration; as a cell, on all ranks."""
    for function in list(current().resize_functions.values()):
        function(old_size, new_size)
