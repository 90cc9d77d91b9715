"""Saves a checkpoint in the background, with each rank's own state, or exports a full model as one safetensors file.

A rank's own state: random number generators, samplers, schedulers, and the user's own values.

The format of safetensors (huggingface.co/docs/safetensors), which other libraries can read: 8 bytes, little-endian: the
length of the header; the header, JSON, which gives dtype, shape and offset of each tensor; then the tensors, row by
row, little-endian, without gaps.
"""

from __future__ import annotations

import io
import json
import operator
import os
import pickle
import random
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from msgspec import Struct
from torch import nn
from torch.distributed.tensor import DTensor

from axon_nb.parallel.checkpoint import tensors
from axon_nb.parallel.checkpoint.folder import (
    CheckpointError,
    CheckpointFolder,
    CheckpointMismatchError,
    CheckpointSaveError,
    CorruptCheckpointError,
    Peers,
    describe,
    sync_file,
    sync_folder,
)
from axon_nb.random_states import random_states, set_random_states

_POLL_S = 0.02
_EXIT_TIMEOUT_S = 20.0
_NOT_SAVED = "The checkpoint could not be written"
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 8


class PendingSave:
    """A save in the background, as returned by `Checkpoints.async_save`.

    Every rank writes its part; once all parts exist, rank 0 completes the checkpoint. The threads communicate only
    through files, so they never interfere with collectives of the training.
    """

    step: int
    """Step of the save."""

    def __init__(
        self,
        step: int,
        writer: tensors.TensorWriter,
        folder: CheckpointFolder,
        *,
        keep: int | None,
        wait: Callable[[], None],
    ) -> None:
        self.step = step
        self.token = writer.draft.name
        self._writer, self._folder, self._keep = writer, folder, keep
        self._wait = wait
        self._part_written = threading.Event()
        self._stop = threading.Event()
        self._failure: str | None = None
        self._path: Path | None = None
        self._thread = threading.Thread(target=self._run, name=f"axon_nb-save-{step}", daemon=False)

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    @property
    def progress(self) -> float:
        """Fraction of this rank's bytes that are written, 0 to 1."""
        if self._part_written.is_set() and self._failure is None:
            return 1.0
        return min(1.0, self._writer.bytes_written / max(1, self._writer.bytes_total))

    @property
    def done(self) -> bool:
        """Whether this rank has finished; on rank 0, whether the checkpoint is complete or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete, like `Checkpoints.wait`. Collective.

        Raises:
            CheckpointSaveError: it could not be written; raised on all ranks.
        """
        self._wait()

    @property
    def failure(self) -> str | None:
        """Error on this rank; None if there is none so far."""
        return self._failure

    def part_outcome(self) -> str | None:
        """Wait until this rank's part is written; return the error, if any."""
        self._part_written.wait()
        return self._failure

    def outcome(self) -> str | None:
        """Wait until this rank has finished; return the error, if any."""
        self._thread.join()
        return self._failure

    def abort(self) -> None:
        """Abort: another rank will not write its part."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._writer.write()
            self._part_written.set()
            if self._writer.rank == 0:
                self._finish()
        except Exception as error:
            self._failure = describe(error)
            if not threading.main_thread().is_alive():
                print(f"The checkpoint of step {self.step} was not saved: {self._failure}", file=sys.stderr)
        finally:
            self._part_written.set()

    def _finish(self) -> None:
        deadline = None
        while not self._writer.all_written():
            if self._stop.wait(_POLL_S) or not self._writer.draft.exists():
                raise CheckpointSaveError("A rank has not written its part.")
            if deadline is None and not threading.main_thread().is_alive():
                deadline = time.monotonic() + _EXIT_TIMEOUT_S
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointSaveError(
                    f"A rank has not written its part within {_EXIT_TIMEOUT_S:.0f} s after the program ended."
                )
        self._path = commit(self._writer, self._folder, step=self.step, keep=self._keep)

    def __repr__(self) -> str:
        state = "failed" if self._failure else "done" if self.done else f"{self.progress:.0%} written"
        return f"PendingSave(step={self.step}, {state})"


def commit(writer: tensors.TensorWriter, folder: CheckpointFolder, *, step: int, keep: int | None) -> Path:
    """Turn the parts written by all ranks into a checkpoint. Call it on one rank."""
    writer.write_index()
    return folder.finish(writer.draft, step=step, world_size=writer.world_size, keep=keep)


def finish_pending(
    peers: Peers, folder: CheckpointFolder, pending: PendingSave | None, clear: Callable[[], None]
) -> None:
    """Wait for the background save, if there is one. Collective.

    Args:
        peers: The ranks; one that was replaced has no save.
        folder: Destination of the save.
        pending: This rank's save.
        clear: Called when the outcome is known on all ranks, before an error is raised.

    Raises:
        CheckpointSaveError: the save failed; raised on all ranks.
    """
    everyone = peers.gather(None if pending is None else (pending.step, pending.token, pending.part_outcome()))
    if not any(everyone):
        return
    step, token, _ = next(state for state in everyone if state)
    failures = [f"rank {rank}: {state[2]}" for rank, state in enumerate(everyone) if state and state[2]]
    replaced = [rank for rank, state in enumerate(everyone) if not state or state[1] != token]
    failures += [f"rank {rank} was replaced and did not take part" for rank in replaced]
    if pending is not None:
        if failures:
            pending.abort()
        elif text := pending.outcome():
            failures.append(f"rank {peers.rank}: {text}")
    saved, errors = peers.run_on_first(
        lambda: (folder.is_committed(token), failures), error=CheckpointSaveError, what="Reading the folder failed"
    )
    clear()
    if not saved:
        if peers.rank == 0:
            folder.discard(folder.path / token)
        raise CheckpointSaveError(f"The background save of step {step} failed: {'; '.join(errors)}. Save again.")


class Contents(Struct, frozen=True):
    """The contents of a checkpoint."""

    model: nn.Module
    optimizer: tensors.Optimizers
    extra: Any
    stateful: dict[str, Any]


def prepare(peers: Peers, folder: CheckpointFolder, step: int, contents: Contents) -> tensors.TensorWriter:
    """Write everything but the tensors, and plan who writes those. Collective.

    Raises:
        CheckpointSaveError: a file could not be written.
        CheckpointError: something cannot be saved, or ranks save different steps or see different folders.
    """
    _check_same_step(peers, step)
    token = peers.run_on_first(
        lambda: folder.start().name, error=CheckpointSaveError, what=f"{folder.path} cannot be written"
    )
    draft = folder.path / token
    try:
        return _prepare(peers, draft, contents)
    except CheckpointError:
        if peers.rank == 0:
            folder.discard(draft)
        raise


def _prepare(peers: Peers, draft: Path, contents: Contents) -> tensors.TensorWriter:
    shards = tensors.Shards(plain := tensors.plain_model(contents.model))
    states = tensors.OptimizerStates(contents.optimizer, shards)

    def write_rank_part() -> dict[str, Any]:
        if not draft.is_dir():
            raise CheckpointError(
                f"Rank {peers.rank} on host {socket.gethostname()} cannot see what rank 0 created in {draft.parent}; "
                "use a folder on a disk that all hosts share."
            )
        write_plain(rank_state(contents.stateful, contents.extra), draft / f"rank_{peers.rank:05d}.pt", "extra")
        return states.plain()

    parts = peers.run_on_all(write_rank_part, error=CheckpointSaveError, what=_NOT_SAVED)

    def write_shared_part() -> None:
        merged: dict[str, Any] = {kind: {} for kind in parts[0]}
        for part in parts:
            for kind, values in part.items():
                merged[kind].update(values)
        write_plain(merged, draft / "optimizer.pt", "the optimizer's options")

    if contents.optimizer is not None:
        peers.run_on_first(write_shared_part, error=CheckpointSaveError, what=_NOT_SAVED)
    state = {f"model.{name}": value for name, value in tensors.model_state(plain, shards).items()}
    return tensors.TensorWriter.prepare({**state, **states.tensors()}, draft, peers)


def _check_same_step(peers: Peers, step: int) -> None:
    def checked_step() -> int:
        number = operator.index(step)
        if number < 0:
            raise CheckpointError(f"step must be 0 or more; got {step}.")
        return number

    steps = peers.run_on_all(checked_step, error=CheckpointError, what=f"step must be an integer; got {step!r}")
    for rank, other in enumerate(steps):
        if other != steps[0]:
            raise CheckpointError(f"All ranks must save the same step; rank 0 saves {steps[0]}, rank {rank} {other}.")


def derive_rng(*, step: int, rank: int) -> None:
    """Seed a rank that has no saved state; deterministic for a given step and rank."""
    seed = (step * 1_000_003 + rank * 7_919) % (1 << 32)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rank_state(stateful: Mapping[str, Any], extra: Any) -> bytes:
    """Serialize this rank's state.

    Raises:
        CheckpointError: an object has no state, or a value is not a tensor, number, string or container of them.
    """
    states = {name: _state_of(name, item) for name, item in stateful.items()}
    return _serialize({"rng": random_states(), "stateful": states, "extra": extra}, "extra or an object's state")


def set_rank_state(saved: dict[str, Any], stateful: Mapping[str, Any], *, is_own: bool, step: int, rank: int) -> None:
    """Restore a state returned by `rank_state`.

    Args:
        saved: The deserialized state.
        stateful: Objects under the names with which they were saved.
        is_own: Whether the state is this rank's own. Otherwise it is rank 0's, and random states are derived from step
            and rank.
        step: Step of the checkpoint.
        rank: Rank of this process.

    Raises:
        CheckpointMismatchError: an object is not in the checkpoint.
    """
    absent = [name for name in stateful if name not in saved["stateful"]]
    if absent:
        there = ", ".join(saved["stateful"]) or "none"
        raise CheckpointMismatchError(f"Not in the checkpoint: {', '.join(absent)}; it has {there}.")
    for name, item in stateful.items():
        state = saved["stateful"][name]
        if callable(getattr(item, "load_state_dict", None)):
            item.load_state_dict(state)
        else:
            item.set_epoch(state["epoch"])
    if is_own:
        set_random_states(saved["rng"])
    else:
        derive_rng(step=step, rank=rank)


def _state_of(name: str, item: Any) -> Any:
    if callable(getattr(item, "state_dict", None)):
        return item.state_dict()
    if callable(getattr(item, "set_epoch", None)) and hasattr(item, "epoch"):
        return {"epoch": item.epoch}
    raise CheckpointError(
        f"{name} must have state_dict() or set_epoch(); got {type(item).__name__}. Pass plain values in extra=…"
    )


def _serialize(content: Any, what: str) -> bytes:
    """Serialize like `torch.save`, and verify that it can be read without running code."""
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"Cannot save {what}: only tensors, numbers, strings and containers of them ({str(error)[:200]})."
        ) from None
    return buffer.getvalue()


def write_plain(content: Any, path: Path, what: str) -> None:
    """Write plain values, or the bytes of `rank_state`, and flush them to disk."""
    path.write_bytes(content if isinstance(content, bytes) else _serialize(content, what))
    sync_file(path)


def read_plain(path: Path) -> Any:
    """Read a file written by `write_plain`.

    Raises:
        CorruptCheckpointError: the file cannot be read.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpointError(f"Cannot read {path}: {type(error).__name__}: {str(error)[:200]}") from error


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
    shards = tensors.Shards(plain := tensors.plain_model(model))
    state = tensors.model_state(plain, shards)
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
