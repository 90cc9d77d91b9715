"""Write tensors to files and read them back, with the planners of torch.distributed.checkpoint.

torch's own `save` and `load` plan, write and finish in one call. Here these are separate steps, so that writing can run
in the background without a collective, from a copy of only this rank's part. Parameters are identified by name, also
shards that are not DTensors.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from axon_nb.comm.placements import Placed, placed
from axon_nb.parallel.checkpoint.errors import CheckpointMismatchError, CheckpointSaveError
from axon_nb.parallel.checkpoint.folder import sync_file
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.data.fsdp import FSDP
from axon_nb.parallel.pipeline.held_stages import HeldStages
from axon_nb.parallel.three_d import Parallel3D

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


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


@dataclass
class TensorWriter:
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
