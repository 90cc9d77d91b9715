"""FSDP units: which submodules are gathered together, their parameters gathered in full, and offloaded between uses.

Units are a model's blocks: those that its class names, as Hugging Face's do, or modules that a container repeats.

Offload moves FSDP's parameters, or an optimizer's states, to host memory. Only the local tensor of a DTensor is moved.
The DTensor itself stays, so modules, optimizers and checkpoints keep their references. CPU ranks make the same moves,
from memory to memory.

While the local tensor is on the host, views of the DTensor (`detach`, `view`) raise: torch gives them its storage,
which is on the GPU. `state_dict` makes such views, so it gets copies on the GPU; `to_local` and `full_tensor` do not.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from axon_nb.comm.group import GroupLike, rank_device, resolve
from axon_nb.errors import UsageError
from axon_nb.parallel.memory import ModuleKinds, ShardingStrategy, local_optimizer, matches, optimizer_states
from axon_nb.records.hooks import missing_hooks

Wrap = ModuleKinds | int | None
"""Classes, a function called with each module, a minimum number of parameters, or None."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward, before which a unit could be gathered."""
_ROWS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMES = "_no_split_modules"
"""Attribute in which models of transformers list the classes of their blocks."""
_HOST = torch.device("cpu")


def make_units(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    """Return the submodules that are units of their own, inner ones first. The model itself is another unit.

    A submodule that shares a parameter with modules outside of it, such as an embedding with the output layer, is not a
    unit: the parameter is gathered with the unit that contains both.

    Args:
        model: The model whose submodules are considered.
        wrap: The same as in `FSDP`.

    Raises:
        UsageError: the minimum number of parameters is below 1.
    """
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))

    def is_whole(unit: nn.Module) -> bool:
        inside = {id(module) for module in unit.modules()}
        return all(owners[id(parameter)] <= inside for parameter in unit.parameters())

    return [unit for unit in _select(model, wrap) if is_whole(unit)]


def describe_units(units: Iterable[nn.Module]) -> str:
    """Describe units by class and number, and how to choose others."""
    kinds = Counter(type(unit).__name__ for unit in units)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    what = f"{shown}, and one of all other parameters" if kinds else "the whole model is one"
    return f"FSDP units: {what}. Choose others with FSDP(model, wrap=…) or plan.memory(model, wrap=…)."


def _select(model: nn.Module, wrap: Wrap) -> list[nn.Module]:
    if wrap is None:
        return named_blocks(model) or _children_or_blocks(model)
    if isinstance(wrap, int):
        if wrap < 1:
            raise UsageError(f"wrap must be at least 1 parameter; got {wrap}.")
        return _by_size(model, wrap)
    inner = [module for module in reversed(list(model.modules())) if module is not model]
    return [module for module in inner if matches(module, wrap) and not isinstance(module, _CONTAINERS)]


def _children_or_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the direct children that have parameters; instead of a child, the repeated blocks inside it."""
    blocks = repeated_blocks(model)
    units: list[nn.Module] = []
    for child in _children(model):
        inside = set(map(id, child.modules()))
        whole = [child] if any(True for _ in child.parameters()) else []
        units += [block for block in blocks if id(block) in inside] or whole
    return units


def _children(module: nn.Module) -> list[nn.Module]:
    children = []
    for child in module.children():
        children += _children(child) if isinstance(child, _CONTAINERS) else [child]
    return children


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Return units of at least `least` parameters that are not in an inner unit."""
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        if module is not model and left >= least and not isinstance(module, _CONTAINERS):
            units.append(module)
            return 0
        return left

    visit(model)
    return units


def resolve_mesh(
    group: GroupLike | Any, mesh: DeviceMesh | None, strategy: ShardingStrategy, model: nn.Module
) -> DeviceMesh:
    """Return the given mesh, or create the one that the strategy needs on the ranks of a group.

    Raises:
        UsageError: the mesh does not fit the strategy, a group is given as well, or HYBRID_SHARD has no mesh.
        NotInGroupError: this rank is not a member of the group.
    """
    if mesh is not None:
        if group is not None:
            raise UsageError("Pass either group or mesh, not both: the mesh already defines the ranks.")
        return _check_mesh(mesh, strategy)
    resolved = resolve(group)
    device = "cuda" if any(parameter.is_cuda for parameter in model.parameters()) else rank_device(resolved).type
    if strategy is ShardingStrategy.HYBRID_SHARD:
        raise UsageError("HYBRID_SHARD needs a mesh of (replicas, shards), such as make_mesh(replicate=2, shard=-1).")
    if strategy is ShardingStrategy.NO_SHARD:
        # Each rank is a replica, "sharded" over itself alone.
        return DeviceMesh(
            device, torch.tensor(resolved.ranks, device="cpu").view(-1, 1), mesh_dim_names=("replicate", "shard")
        )
    return DeviceMesh.from_group(resolved.torch_group, device, mesh_dim_names=("shard",))


def _check_mesh(mesh: DeviceMesh, strategy: ShardingStrategy) -> DeviceMesh:
    wanted = 2 if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD) else 1
    if mesh.ndim != wanted:
        raise UsageError(f"{strategy.name} needs a {wanted}-D mesh; got a {mesh.ndim}-D one.")
    if strategy is ShardingStrategy.NO_SHARD and mesh.size(1) != 1:
        raise UsageError(f"NO_SHARD needs a mesh whose second dimension is 1; got shape {tuple(mesh.shape)}.")
    return mesh


def local_device(mesh: DeviceMesh) -> torch.device:
    """Return this rank's compute device."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def named_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules of the classes that the model, or a model inside it, names as its blocks."""
    names = {name for module in model.modules() for name in getattr(module, _NAMES, None) or ()}
    return _outermost(model, names) if names else []


def _outermost(module: nn.Module, names: set[str]) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for child in module.children():
        is_block = type(child).__name__ in names and any(True for _ in child.parameters())
        blocks += [child] if is_block else _outermost(child, names)
    return blocks


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with parts and parameters whose container holds several of their class."""
    kinds = Counter(type(child) for child in module.children() if _is_block(child)) if _is_row(module) else Counter()
    blocks: list[nn.Module] = []
    for child in module.children():
        blocks += [child] if _is_block(child) and kinds[type(child)] > 1 else repeated_blocks(child)
    return blocks


def _is_row(module: nn.Module) -> bool:
    return isinstance(module, _ROWS)


def _is_block(module: nn.Module) -> bool:
    return not _is_row(module) and any(True for _ in module.children()) and any(True for _ in module.parameters())


def rows_of_blocks(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """Yield consecutive modules of one class in one container, by name."""
    for path, container in model.named_modules():
        if not _is_row(container):
            continue
        row: dict[str, nn.Module] = {}
        for name, child in container.named_children():
            if row and type(child) is not type(next(iter(row.values()))):
                yield row
                row = {}
            row[f"{path}.{name}" if path else name] = child
        yield row


def num_parameters(blocks: list[nn.Module]) -> int:
    """Return the number of parameter elements in these modules."""
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def equal_row(model: nn.Module) -> list[nn.Module] | None:
    """Return the modules of one class, at least two in a row, that have the most parameters; None: there are none."""
    rows = [list(row.values()) for row in rows_of_blocks(model) if len(row) > 1]
    best = max(rows, key=num_parameters, default=None)
    return best if best and num_parameters(best) else None


class ParameterGatherer:
    """Gathers the full parameters of a model on every rank, and shards them again.

    Args:
        model: A model processed by `fully_shard`.
        mesh: Its mesh; the last dimension is the shard dimension.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self._mesh = mesh
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        self._shards: dict[str, tuple[torch.Tensor, tuple[int, int]]] | None = None
        for unit in self._units:
            unit.register_forward_pre_hook(self._before_forward, prepend=True)

    def gather(self) -> None:
        """Gather full parameters on every rank. Collective."""
        if self._shards is None:
            self.reshard()  # parameters left unsharded by a forward may be older than a later optimizer step
            self._shards = {name: (p, versions(p)) for name, p in self._model.named_parameters()}
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Keep only this rank's shard, including changes made since `gather`."""
        self._save_changes()
        self._shards = None
        for unit in self._units:
            unit.reshard()

    def _before_forward(self, *_: Any) -> None:
        self._save_changes()  # units are sharded again after a forward

    def _save_changes(self) -> None:
        shards = self._shards or {}
        for name, parameter in self._model.named_parameters() if shards else ():
            shard, version = shards.get(name, (parameter, None))
            # A forward or backward in between has resharded units; and a shard changed since then is newer.
            if parameter is not shard and versions(shard) == version:
                self._copy_changes(shard, parameter)
                shards[name] = shard, versions(shard)

    @torch.no_grad()
    def _copy_changes(self, shard: torch.Tensor, parameter: torch.Tensor) -> None:
        part, full = local_shard(shard), local_shard(parameter)
        if not part.numel():
            return
        ranks = self._mesh.size(self._mesh.ndim - 1)
        start = self._mesh.get_local_rank(self._mesh.ndim - 1) * -(-full.shape[0] // ranks)
        local = full.narrow(0, start, part.shape[0]).to(part.device)
        # Unchanged elements keep the shard's value, which may be more precise than the gathered one.
        changed = local != part.to(local.dtype)
        if changed.any():
            part.copy_(torch.where(changed, local.to(part.dtype), part))


def full_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the full tensor in host memory, on every rank. Collective for a sharded tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    mesh, local = tensor.device_mesh, local_shard(tensor)
    if local.device.type != mesh.device_type:
        # Offloaded to a device that the group cannot access.
        local = local.to(mesh.device_type)
        placements, shape, stride = tensor.placements, tensor.shape, tensor.stride()
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    full: torch.Tensor = tensor.full_tensor()
    return full.detach().cpu()


@torch.no_grad()
def copy_full_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a full value, present on every rank, into `tensor` or into this rank's shard of it."""
    if isinstance(tensor, DTensor):
        value = value.to(tensor.device_mesh.device_type)
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local_shard(tensor).copy_(local_shard(value))


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`, detached from autograd."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def versions(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what counts the writes to a tensor, and to what this rank holds of it."""
    # Operations on a DTensor bump its own version only, those on its local tensor that one's.
    return tensor._version, local_shard(tensor)._version


def on_backward_start(output: Any, call: Callable[[], None]) -> None:
    """Call `call` when backward reaches `output`, or at once if `output` contains no tensor with a gradient."""
    roots = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn}
    for root in roots:
        root.register_prehook(lambda gradients: call())
    if not roots:
        call()


class ParameterOffloader:
    """Keeps FSDP's parameter shards in host memory, except during optimizer steps; gradients stay on the device.

    FSDP2 fills its all-gather buffers from `_sharded_param_data`, which may be on any device. With it on the host, each
    all-gather copies only its unit's parameters to the device.

    Args:
        model: A model processed by `fully_shard`.
        device: Its compute device.

    Raises:
        UsageError: parameters have no data yet, or this torch lacks the hooks.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._parts = _fsdp_parameters(model)
        if absent := sorted({name for part in self._parts for name in missing_hooks("parallel.offload", part=part)}):
            raise UsageError(
                f"CPUOffload.PARAMS needs {', '.join(absent)}, which torch {torch.__version__} lacks; use "
                "CPUOffload.FULL, which also offloads gradients and optimizer states."
            )
        for part in self._parts:
            if part._sharded_param_data.is_meta:
                raise UsageError("CPUOffload.PARAMS: the parameters have no data; call model.to_empty(device=…) first.")
            part._sharded_param_data = _copy(part._sharded_param_data, _HOST)
            part.sharded_param._local_tensor = self._host_shard(part)
        held = {part.sharded_param: part for part in self._parts}
        for module in model.modules():
            if parts := [held[one] for one in module.parameters(recurse=False) if one in held]:
                module.register_state_dict_pre_hook(functools.partial(self._fetch_parts, parts))
                module.register_state_dict_post_hook(functools.partial(self._return_parts, parts))

    def attach(self, optimizer: Optimizer) -> None:
        """Copy the parameters to the device for the steps of `optimizer`."""
        optimizer.register_step_pre_hook(self._fetch)
        optimizer.register_step_post_hook(self._store)

    def _host_shard(self, part: Any) -> torch.Tensor:
        whole: torch.Tensor = part._sharded_param_data.view(part.padded_sharded_param_size)
        return whole.narrow(0, 0, part.sharded_size[0])

    @torch.no_grad()
    def _fetch_parts(self, parts: list[Any], *_: Any) -> None:
        for part in parts:
            part.sharded_param._local_tensor = _copy(self._host_shard(part), self._device)

    def _return_parts(self, parts: list[Any], *_: Any) -> None:
        for part in parts:
            part.sharded_param._local_tensor = self._host_shard(part)

    def _fetch(self, *_: Any) -> None:
        self._fetch_parts(self._parts)

    @torch.no_grad()
    def _store(self, *_: Any) -> None:
        for part in self._parts:
            host_shard = self._host_shard(part)
            host_shard.copy_(part.sharded_param._local_tensor)
            part.sharded_param._local_tensor = host_shard


def offload_states(optimizer: Optimizer, device: torch.device) -> None:
    """Keep the states of an optimizer in host memory, except during its steps.

    Args:
        optimizer: Any optimizer whose states are tensors.
        device: The device of its parameters.
    """

    def fetch(*_: Any) -> None:
        _move_states(optimizer, device)

    def store(*_: Any) -> None:
        _move_states(optimizer, _HOST)

    # ZeroRedundancyOptimizer has no states itself; its local optimizer does.
    inner = local_optimizer(optimizer)
    inner.register_step_pre_hook(fetch)
    inner.register_step_post_hook(store)


def _fsdp_parameters(model: nn.Module) -> list[Any]:
    parameters = []
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            # Up to torch 2.11: one group per module.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            parameters += [part for group in groups if group is not None for part in group.fsdp_params]
    return parameters


@torch.no_grad()
def _move_states(optimizer: Optimizer, device: torch.device) -> None:
    for state in optimizer_states(optimizer):
        if isinstance(state, DTensor):
            state._local_tensor = _copy(state._local_tensor, device)
        else:
            state.data = _copy(state, device)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Pinned: the GPU accesses it directly, at about twice the speed.
    pinned = device.type == "cpu" and tensor.is_cuda
    return torch.empty_like(tensor, device=device, pin_memory=pinned).copy_(tensor)
