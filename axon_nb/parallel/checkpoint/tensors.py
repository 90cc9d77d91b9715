"""Tensors of a model and its optimizer, by parameter name, written to files and read back.

torch's own `save` and `load` plan, write and finish in one call. Here these are separate steps, so that writing can run
in the background without a collective, from a copy of only this rank's part. Parameters are identified by name, which
is valid for any number of ranks, also shards that are not DTensors.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from axon_nb.comm.placements import Placed, placed
from axon_nb.parallel.checkpoint.folder import CheckpointMismatchError, CheckpointSaveError, Peers, sync_file
from axon_nb.parallel.data.sharded_model import FSDP
from axon_nb.parallel.pipeline.stages import HeldStages
from axon_nb.parallel.three_d import Parallel3D

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
Optimizers = Optimizer | Iterable[Optimizer] | None
"""One optimizer, or several that train different parameters."""
_PREFIX = "optimizer"


class _StagedPlanner(DefaultSavePlanner):
    """Passes host copies to the writer, if staged, and counts the bytes written."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Any, Any] | None = None
        self.bytes_written = 0

    def stage(self, plan: SavePlan) -> None:
        """Copy what this rank will write to host memory."""
        copies = {}
        for item in plan.items:
            data = super().resolve_data(item)
            copies[item.index] = data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data
        self.copies = copies
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the copy, or the tensor itself."""
        data = super().resolve_data(write_item) if self.copies is None else self.copies.pop(write_item.index)
        self.bytes_written += _size(data)
        return data


class TensorWriter(Struct):
    """Writes the tensors of one save on one rank."""

    draft: Path
    """Folder to write to."""
    planner: _StagedPlanner
    writer: FileSystemWriter
    plan: SavePlan
    metadata: Metadata
    rank: int
    world_size: int
    bytes_total: int
    """Bytes that this rank writes."""

    @classmethod
    def prepare(cls, state: dict[str, Any], draft: Path, peers: Peers) -> TensorWriter:
        """Plan which rank writes what. Collective.

        Args:
            state: Tensors by name; DTensors are shards. Of replicated tensors, one rank writes.
            draft: The folder to write to, visible to all ranks.
            peers: The ranks.

        Raises:
            CheckpointSaveError: the tensors of the ranks do not fit together.
        """
        planner, writer = _StagedPlanner(), FileSystemWriter(draft, sync_files=True)

        def plan_locally() -> SavePlan:
            planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=peers.rank == 0)
            writer.set_up_storage_writer(peers.rank == 0, rank=peers.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans = peers.run_on_all(plan_locally, error=CheckpointSaveError, what="The checkpoint could not be planned")

        def plan_globally() -> tuple[list[SavePlan], Metadata]:
            fitted, metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(fitted), metadata

        fitted, metadata = peers.run_on_first(
            plan_globally, error=CheckpointSaveError, what="The checkpoint could not be planned"
        )
        plan = planner.finish_plan(fitted[peers.rank])
        total = sum(_item_size(item) for item in plan.items)
        return cls(draft, planner, writer, plan, metadata, peers.rank, peers.size, total)

    def stage(self) -> None:
        """Copy the tensors, so that training can change the model."""
        self.planner.stage(self.plan)

    def write(self) -> None:
        """Write this rank's part, flush it to disk, and leave a marker file."""
        results = self.writer.write_data(self.plan, self.planner)
        results.wait()
        marker = self.marker(self.rank)
        draft_marker = marker.with_name(f"{marker.name}.new")
        draft_marker.write_bytes(pickle.dumps(results.value()))
        sync_file(draft_marker)
        draft_marker.rename(marker)

    def marker(self, rank: int) -> Path:
        """Return the path of a rank's marker file."""
        return self.draft / f".done_{rank:05d}"

    def all_written(self) -> bool:
        """Whether all ranks have written their parts."""
        return all(self.marker(rank).exists() for rank in range(self.world_size))

    def write_index(self) -> None:
        """Write the index of all tensors, once all parts exist. Call it on one rank."""
        # Safe to unpickle: written by this save, into a folder that it created.
        results = [pickle.loads(self.marker(rank).read_bytes()) for rank in range(self.world_size)]
        self.writer.finish(self.metadata, results)

    @property
    def bytes_written(self) -> int:
        """Bytes written so far."""
        return self.planner.bytes_written


def mismatches(state: dict[str, Any], metadata: Metadata) -> list[str]:
    """Return, as phrases, which tensors of `state` the checkpoint lacks or has with another shape."""
    problems = []
    for name, value in state.items():
        saved = metadata.state_dict_metadata.get(name)
        shown = name.partition(".")[2]
        if saved is None:
            problems.append(f"{shown} is not in the checkpoint")
        elif isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata) and value.shape != saved.size:
            problems.append(f"{shown} has shape {tuple(value.shape)} here and {tuple(saved.size)} in the checkpoint")
    return problems


def read_tensors(state: dict[str, Any], folder: Path, metadata: Metadata) -> None:
    """Read into the tensors of `state`; of a DTensor only this rank's shard, whichever rank wrote it.

    Raises:
        CheckpointMismatchError: the checkpoint lacks something.
    """
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        plan = reader.prepare_local_plan(planner.create_local_plan())
    except (RuntimeError, ValueError) as error:
        raise CheckpointMismatchError(f"{os.fspath(folder)}: {error}") from error
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _size(data: Any) -> int:
    if isinstance(data, DTensor):
        data = data.to_local()
    return int(data.nbytes) if isinstance(data, torch.Tensor) else len(data.getbuffer())


def _item_size(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    size = item.tensor_data.properties.dtype.itemsize
    for length in item.tensor_data.chunk.sizes:
        size *= length
    return size


def plain_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers, or this rank's part of it, with the names of a single process."""
    while isinstance(model, DistributedDataParallel | FSDP | HeldStages | Parallel3D):
        model = model.pipeline if isinstance(model, Parallel3D) else model.module
    return model


class Shards:
    """The parameters of a model by name; plain tensors that are shards become DTensors.

    Such are the parameters of `axon_nb.parallel.tensor` layers, and tensors with declared placements: one shard per
    rank under the same name. As a DTensor, a shard carries its position in the full tensor, so that another number of
    ranks can read it.

    Args:
        model: The model without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layouts: dict[str, Placed] = {}
        meshes: dict[Any, DeviceMesh] = {}
        for prefix, module in model.named_modules():
            dims: dict[str, int] = getattr(module, "shard_dims", {})
            if not dims or module.group.size() == 1:
                continue
            group = module.group.torch_group
            for name, dim in dims.items():
                tensor = module.get_parameter(name)
                if group not in meshes:
                    meshes[group] = DeviceMesh.from_group(group, tensor.device.type)
                shape = list(tensor.shape)
                shape[dim] *= module.group.size()
                layout = Placed(tensor, tuple(shape), meshes[group], (Shard(dim),))
                self._layouts[strip_wrapper_names(f"{prefix}.{name}" if prefix else name)] = layout
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if not isinstance(tensor, DTensor) and (found := placed(tensor)) is not None:
                self._layouts[strip_wrapper_names(name)] = found
        self.sharded_names = frozenset(self._layouts)
        self.parameters = {strip_wrapper_names(name): parameter for name, parameter in model.named_parameters()}

    def as_dtensor(self, name: str, tensor: Any, shape: torch.Size | None = None) -> Any:
        """Return a tensor of the parameter `name`, as a DTensor over the same memory if it is a shard.

        Args:
            name: Name of the parameter or buffer.
            tensor: The parameter, or an optimizer state; a state of another shape is not a shard.
            shape: Shape of the shard; None: that of the tensor.
        """
        if name not in self._layouts or not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            return tensor
        if shape is not None and tensor.shape != shape:
            return tensor
        return self._layouts[name].as_dtensor(tensor)

    def full_shape(self, name: str) -> torch.Size:
        """Return the shape of the full parameter."""
        shape: torch.Size = self.as_dtensor(name, self.parameters[name]).shape
        return shape

    def names(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter once, with its name."""
        yield from self.parameters.items()


def strip_wrapper_names(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers add."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def model_state(model: nn.Module, shards: Shards) -> dict[str, Any]:
    """Return parameters and buffers, sharing the model's memory; shards are DTensors.

    Args:
        model: The model without wrappers.
        shards: Its parameters.
    """
    return {name: shards.as_dtensor(name, value) for name, value in get_model_state_dict(model).items()}


def set_model_state(model: nn.Module, shards: Shards, state: dict[str, Any]) -> None:
    """Load a state as returned by `model_state`, or a part of it, into the model."""
    local = {
        name: value.to_local() if name in shards.sharded_names and isinstance(value, DTensor) else value
        for name, value in state.items()
    }
    set_model_state_dict(model, local, options=StateDictOptions(strict=False))


class OptimizerStates:
    """Reads and sets the states of the optimizers of one model.

    Tensors have names such as ``optimizer.exp_avg.block0.up.weight`` and the layout of their parameter. Everything else
    (learning rates, states that are not tensors) is plain data. A ZeroRedundancyOptimizer has one part per rank.

    Args:
        optimizers: One optimizer, or several.
        shards: The model's parameters.
    """

    def __init__(self, optimizers: Optimizers, shards: Shards) -> None:
        several = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        self._optimizers = several
        # The states of a ZeroRedundancyOptimizer are in its local optimizer of this rank's parameters.
        self._local_optimizers: list[Optimizer] = [getattr(optimizer, "optim", optimizer) for optimizer in several]
        self._shards = shards
        self._names = {id(parameter): name for name, parameter in shards.names()}

    def tensors(self) -> dict[str, Any]:
        """Return the states that are tensors, by name."""
        states = {}
        for optimizer, _, name, parameter in self._parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    states[f"{_PREFIX}.{key}.{name}"] = self._shards.as_dtensor(name, value, parameter.shape)
        return states

    def plain(self) -> dict[str, Any]:
        """Return everything else: options by parameter name, and states that are not tensors."""
        options, states = {}, {}
        # A scheduler changes the outer one, which passes that on in its next step.
        self._copy_options(to_outer=False)
        for optimizer, group, name, parameter in self._parameters():
            options[name] = {key: value for key, value in group.items() if key != "params"}
            other = optimizer.state.get(parameter, {}).items()
            states[name] = {key: value for key, value in other if not isinstance(value, torch.Tensor)}
        return {"options": options, "states": {name: state for name, state in states.items() if state}}

    def expected(self, metadata: Metadata) -> dict[str, Any]:
        """Return tensors of the saved sizes to read into; those of a parameter's shape have its layout."""
        saved: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
        for full, entry in metadata.state_dict_metadata.items():
            prefix, _, rest = full.partition(".")
            key, _, name = rest.partition(".")
            if prefix == _PREFIX and isinstance(entry, TensorStorageMetadata):
                saved.setdefault(name, []).append((key, entry))
        blanks = {}
        for _, group, name, parameter in self._parameters():
            for key, entry in saved.get(name, []):
                dtype = entry.properties.dtype
                if entry.size == self._shards.full_shape(name) and len(entry.size):
                    blank = torch.zeros_like(parameter.detach(), dtype=dtype)
                    blanks[f"{_PREFIX}.{key}.{name}"] = self._shards.as_dtensor(name, blank)
                else:
                    device = parameter.device if group.get("capturable") or group.get("fused") else "cpu"
                    blanks[f"{_PREFIX}.{key}.{name}"] = torch.zeros(entry.size, dtype=dtype, device=device)
        return blanks

    def restore(self, tensors: dict[str, Any], plain: dict[str, Any]) -> None:
        """Set the states that were read.

        Raises:
            CheckpointMismatchError: the saved optimizer did not train one of the parameters.
        """
        missing = [name for _, _, name, _ in self._parameters() if name not in plain["options"]]
        if missing:
            raise CheckpointMismatchError(
                f"The saved optimizer does not have {_some(missing)}; create the optimizer from the same parameters."
            )
        by_name: dict[str, dict[str, Any]] = {}
        for full, value in tensors.items():
            _, key, name = full.split(".", 2)
            by_name.setdefault(name, {})[key] = value
        for optimizer, group, name, parameter in self._parameters():
            group.update(plain["options"][name])
            state = {key: self._local(name, value) for key, value in by_name.get(name, {}).items()}
            state |= plain["states"].get(name, {})
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        self._copy_options(to_outer=True)

    def _local(self, name: str, value: Any) -> Any:
        return value.to_local() if name in self._shards.sharded_names and isinstance(value, DTensor) else value

    def _copy_options(self, *, to_outer: bool) -> None:
        """Copy options of a ZeroRedundancyOptimizer from its local optimizer, or to it."""
        for outer, local in zip(self._optimizers, self._local_optimizers, strict=True):
            if outer is not local:
                for groups in zip(outer.param_groups, local.param_groups, strict=True):
                    target, source = groups if to_outer else reversed(groups)
                    target.update({key: value for key, value in source.items() if key != "params"})

    def _parameters(self) -> Iterator[tuple[Optimizer, dict[str, Any], str, torch.nn.Parameter]]:
        for optimizer in self._local_optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names.get(id(parameter))
                    if name is None:
                        raise CheckpointMismatchError(
                            f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not "
                            "in the model; create it after the model, and save it with that model."
                        )
                    yield optimizer, group, name, parameter


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
