"""Export a full model as one safetensors file, which other libraries can read.

The format (huggingface.co/docs/safetensors): 8 bytes, little-endian: the length of the header; the header, JSON, which
gives dtype, shape and offset of each tensor; then the tensors, row by row, little-endian, without gaps.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from axon_nb.parallel.checkpoint.errors import CheckpointError, CheckpointSaveError
from axon_nb.parallel.checkpoint.folder import sync_folder
from axon_nb.parallel.checkpoint.peers import Peers
from axon_nb.parallel.checkpoint.states import model_state
from axon_nb.parallel.checkpoint.tensors import Shards, plain_model

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 8


def export_safetensors(model: nn.Module, path: str | os.PathLike[str], *, group: Any = None) -> Path:
    """Write full parameters and buffers, with the names of a single process. Collective.

    Rank 0 writes; tensors are gathered one at a time. The file appears under its name only when complete.

    Args:
        model: A plain, wrapped or sharded model, as for `Checkpoints.save`.
        path: The file, on rank 0's host; its folder is created.
        group: The ranks that hold the model. None: all, or this process alone if there is no world.

    Returns:
        Path of the file.

    Raises:
        CheckpointError: a value is not a tensor, or has a dtype that the format does not support.
        CheckpointSaveError: the file could not be written; raised on all ranks.
    """
    peers, target = Peers(group), Path(path)
    shards = Shards(plain := plain_model(model))
    state = model_state(plain, shards)
    header = peers.run_on_all(lambda: _header(state), error=CheckpointError, what="The model cannot be exported")[0]
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    failure: Exception | None = None
    file: BinaryIO | None = None
    try:
        if peers.rank == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = draft.open("wb")
            file.write(len(header).to_bytes(8, "little") + header)
    except OSError as error:
        failure = error
    for value in state.values():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        try:
            if file is not None and failure is None:
                file.write(_bytes(full))
        except OSError as error:  # the other ranks continue gathering
            failure = error

    def finish() -> None:
        try:
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
            if failure is not None:
                raise failure
            draft.replace(target)
            sync_folder(target.parent)
        finally:
            draft.unlink(missing_ok=True)

    peers.run_on_first(finish, error=CheckpointSaveError, what=f"{target} could not be written")
    return target


def _header(state: dict[str, Any]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"safetensors supports only tensors; {name} has type {type(value).__name__}.")
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in _NAMES:
            raise CheckpointError(f"safetensors does not support {kind}, the dtype of {name}; convert it first.")
        end = start + value.numel() * value.dtype.itemsize
        entries[name] = {"dtype": _NAMES[kind], "shape": list(value.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _bytes(tensor: torch.Tensor) -> Any:
    assert sys.byteorder == "little", "the format is little-endian"
    dense = tensor.detach().cpu().contiguous()
    rows = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    return rows.numpy().data
