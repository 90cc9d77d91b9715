"""Tensors to files and back, by the planners of torch.distributed.checkpoint.

torch's own `save` and `load` plan, write and finish in one call; here each is a step of its own, so that writing can go
on in the background without a collective, and what it writes is a copy of no more than this rank's part.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from axon_nb.parallel.checkpoint.errors import CheckpointMismatch, SaveFailed
from axon_nb.parallel.checkpoint.folder import sync_file
from axon_nb.parallel.checkpoint.peers import Peers

__all__ = ["TensorWriter", "mismatches", "read_metadata", "read_tensors"]


class _StagedPlanner(DefaultSavePlanner):
    """Gives the writer copies on the host, when there are some, and counts what it has asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Any, Any] | None = None
        self.bytes_written = 0

    def stage(self, plan: SavePlan) -> None:
        """Copy what this rank will write."""
        copies = {}
        for item in plan.items:
            data = super().resolve_data(item)
            copies[item.index] = data.detach().to("cpu", copy=True) if isinstance(data, torch.Tensor) else data
        self.copies = copies
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The copy, or the tensor itself."""
        data = super().resolve_data(write_item) if self.copies is None else self.copies.pop(write_item.index)
        self.bytes_written += _size(data)
        return data


@dataclass
class TensorWriter:
    """One save's tensors on one rank."""

    draft: Path
    """Where it is written."""
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
        """Agree on who writes what; collective.

        Args:
            state: Tensors by name; DTensors are parts, and of what several ranks have one writes.
            draft: The folder to write into, which all see.
            peers: The ranks.

        Raises:
            SaveFailed: ranks bring tensors that do not fit together.
        """
        planner, writer = _StagedPlanner(), FileSystemWriter(draft, sync_files=True)

        def local() -> SavePlan:
            planner.set_up_planner(state, storage_meta=writer.storage_meta(), is_coordinator=peers.rank == 0)
            writer.set_up_storage_writer(peers.rank == 0, rank=peers.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        plans = peers.on_all(local, error=SaveFailed, what="the checkpoint cannot be planned")

        def together() -> tuple[list[SavePlan], Metadata]:
            fitted, metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(fitted), metadata

        fitted, metadata = peers.on_first(together, error=SaveFailed, what="the checkpoint cannot be planned")
        plan = planner.finish_plan(fitted[peers.rank])
        total = sum(_item_size(item) for item in plan.items)
        return cls(draft, planner, writer, plan, metadata, peers.rank, peers.size, total)

    def stage(self) -> None:
        """Copy the tensors, so that the model can go on changing."""
        self.planner.stage(self.plan)

    def write(self) -> None:
        """Write this rank's part, wait until it is on the disk, and leave a note that it is."""
        results = self.writer.write_data(self.plan, self.planner)
        results.wait()
        note = self.note(self.rank)
        fresh = note.with_name(f"{note.name}.new")
        fresh.write_bytes(pickle.dumps(results.value()))
        sync_file(fresh)
        fresh.rename(note)

    def note(self, rank: int) -> Path:
        """What a rank leaves when its part is there."""
        return self.draft / f".done_{rank:05d}"

    def all_written(self) -> bool:
        """Whether the parts of all ranks are there."""
        return all(self.note(rank).exists() for rank in range(self.world_size))

    def write_index(self) -> None:
        """Write which tensor is where, when all parts are there; on one rank."""
        # Made by this save alone, in a folder that it has made.
        results = [pickle.loads(self.note(rank).read_bytes()) for rank in range(self.world_size)]
        self.writer.finish(self.metadata, results)

    @property
    def bytes_written(self) -> int:
        """Bytes that were given to the disk so far."""
        return self.planner.bytes_written


def read_metadata(folder: Path) -> Metadata:
    """What a checkpoint has."""
    return FileSystemReader(folder).read_metadata()


def mismatches(state: dict[str, Any], metadata: Metadata) -> list[str]:
    """What of `state` is not in the checkpoint, or has another shape there: one phrase each."""
    told = []
    for name, value in state.items():
        saved = metadata.state_dict_metadata.get(name)
        shown = name.partition(".")[2]
        if saved is None:
            told.append(f"{shown} is not in the checkpoint")
        elif isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata) and value.shape != saved.size:
            told.append(f"{shown} has shape {tuple(value.shape)} here and {tuple(saved.size)} in the checkpoint")
    return told


def read_tensors(state: dict[str, Any], folder: Path, metadata: Metadata) -> None:
    """Read into the tensors of `state`: of a DTensor this rank's part, whoever wrote it.

    Raises:
        CheckpointMismatch: the checkpoint has not what is wanted.
    """
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    try:
        plan = reader.prepare_local_plan(planner.create_local_plan())
    except (RuntimeError, ValueError) as error:
        raise CheckpointMismatch(f"{os.fspath(folder)}: {error}") from error
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
