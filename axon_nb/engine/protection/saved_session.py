"""Writes the session of all ranks to a folder, and loads it: on as many ranks, all of it; on others, its models.

The folder has a file per rank, with what a protected slot holds; a checkpoint per model, which any number of ranks can
load; and, written last, a record that lists both.
"""

from __future__ import annotations

import json
import mmap
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from axon_nb.engine.elastic.sharded_states import outer_modules
from axon_nb.engine.groups import creation, recovery
from axon_nb.engine.protection.slots import groups_in, pack, unpack
from axon_nb.engine.session import current, user_variables
from axon_nb.engine.sharding import unreplicated_parameters
from axon_nb.engine.snapshot.history import Snapshot
from axon_nb.engine.snapshot.memory import HostMemory
from axon_nb.engine.snapshot.state import StateFinder
from axon_nb.engine.transfer.namespace import StateFile, structure_of
from axon_nb.parallel.checkpoint import CheckpointError, Checkpoints
from axon_nb.parallel.checkpoint.folder import Peers
from axon_nb.records.protocol.recovery import GroupRecord
from axon_nb.records.protocol.transfer import LoadedSession, SavedSession

_RECORD = "session.json"
_MODELS = "models"
_ARGUMENTS = ("step", "model", "optimizer", "extra", "strict")
"""Names that `Checkpoints` uses itself."""


def save(folder: str) -> SavedSession:
    """Write the session; collective. A saved session of that name is replaced once the new one is complete.

    Raises:
        CheckpointError: the folder exists and is something else, or a rank could not write.
    """
    root, peers = Path(folder), Peers()
    draft = root.with_name(f".{root.name}.draft")
    peers.run_on_first(lambda: _begin(root, draft), error=CheckpointError, what=f"{root} cannot be written")
    left_out: dict[str, str] = {}
    sizes = peers.run_on_all(
        lambda: _write(draft, left_out), error=CheckpointError, what=f"The session could not be written to {draft}"
    )
    models, not_portable = _save_models(draft / _MODELS, peers)

    def finish() -> None:
        (draft / _RECORD).write_text(json.dumps({"world_size": peers.size, "models": models}))
        before = root.with_name(f".{root.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        if root.exists():
            root.rename(before)
        draft.rename(root)
        shutil.rmtree(before, ignore_errors=True)

    peers.run_on_first(finish, error=CheckpointError, what=f"{root} could not be completed")
    return SavedSession(sum(sizes), tuple(models), left_out, not_portable)


def _begin(root: Path, draft: Path) -> None:
    if root.exists() and not (root / _RECORD).is_file():
        raise CheckpointError(f"{root} exists and is not a saved session: use another name.")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.session"


def _write(folder: Path, left_out: dict[str, str]) -> int:
    session = current()
    snapshot = Snapshot(StateFinder(session.kernel.shell.user_ns).find())
    snapshot.save([], HostMemory(), session.steps)
    with _file(folder, session.config.rank).open("xb") as file:
        state = StateFile(file)
        return state.finish(pack(session, snapshot, state.save, left_out))


def _save_models(folder: Path, peers: Peers) -> tuple[dict[str, Any], dict[str, str]]:
    """Save each model with its optimizers, for other numbers of ranks; return them, and why others cannot be saved."""
    variables = user_variables(current().kernel.shell)
    ours = _models(variables)
    everywhere = [sorted(peer) for peer in peers.gather(ours)]
    models, reasons = {}, {}
    for name, parts in ours.items():
        if any(name not in names for names in everywhere):
            continue
        try:
            if any(id(parameter) in unreplicated_parameters() for parameter in variables[name].parameters()):
                raise CheckpointError("each rank holds another part of it")
            Checkpoints(folder / name).save(0, **_arguments(name, parts, variables))
            models[name] = parts
        except CheckpointError as error:
            reasons[name] = str(error)
    return models, reasons


def _arguments(name: str, parts: Mapping[str, list[str]], variables: Mapping[str, Any]) -> dict[str, Any]:
    optimizers = [variables[one] for one in parts["optimizers"]]
    return {"model": variables[name], "optimizer": optimizers or None} | {
        one: variables[one] for one in parts["others"]
    }


def _models(variables: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Return the models that no other one contains, with the variables that are their optimizers, and other states."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, model in outer_modules().items():
        parameters = {id(parameter) for parameter in model.parameters()}
        if not parameters:
            continue
        optimizers = {
            key: value
            for key, value in sorted(variables.items())
            if isinstance(value, torch.optim.Optimizer)
            and all(id(one) in parameters for group in value.param_groups for one in group["params"])
        }
        schedulers = [
            key
            for key, value in sorted(variables.items())
            if isinstance(value, LRScheduler) and key not in _ARGUMENTS and value.optimizer in optimizers.values()
        ]
        found[name] = {"optimizers": list(optimizers), "others": schedulers}
    return found


def load(folder: str) -> LoadedSession:
    """Load a session; collective.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not fit this session.
    """
    root, peers = Path(folder), Peers()
    record = peers.run_on_first(lambda: _read_record(root), error=CheckpointError, what=f"{root} cannot be read")
    session = current()
    if record["world_size"] == peers.size:
        _load_all(root, peers)
    else:
        _load_models(root, record)
    session.snapshots.forget_cells()
    session.protection.forget()
    return LoadedSession(record["world_size"], tuple(record["models"]))


def _read_record(root: Path) -> dict[str, Any]:
    if not (root / _RECORD).is_file():
        raise CheckpointError(f"{root} is not a saved session: `%distributed save {root.name}` writes one.")
    record: dict[str, Any] = json.loads((root / _RECORD).read_text())
    return record


def _load_all(root: Path, peers: Peers) -> None:
    session = current()
    with _file(root, session.config.rank).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
        data, groups = peers.run_on_all(
            lambda: _structure(view), error=CheckpointError, what=f"{root} cannot be loaded"
        )[peers.rank]
        recovery.recreate_groups(groups)
        recovery.sync_group_count("cpu")
        creation.forget_equal_meshes()
        unpack(session, data, lambda offset, size: bytearray(view[offset : offset + size]))


def _structure(view: mmap.mmap) -> tuple[bytearray, list[GroupRecord]]:
    data = structure_of(view)
    groups = groups_in(data)
    there = {group.name: group.ranks for group in recovery.list_groups()}
    if clash := [group.name for group in groups if there.get(group.name, group.ranks) != group.ranks]:
        raise CheckpointError(
            f"Other process groups exist already ({clash[0]}): run `%distributed restart`, then load."
        )
    return data, [group for group in groups if group.name not in there]


def _load_models(root: Path, record: Mapping[str, Any]) -> None:
    variables = user_variables(current().kernel.shell)
    needed = [one for name, parts in record["models"].items() for one in (name, *parts["optimizers"], *parts["others"])]
    if absent := [name for name in needed if name not in variables]:
        raise CheckpointError(
            f"This session was saved by {record['world_size']} ranks. Run the cells that create "
            f"{', '.join(f'`{name}`' for name in absent)} first, then load."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says that the number of ranks differs
        for name, parts in record["models"].items():
            Checkpoints(root / _MODELS / name).load(0, **_arguments(name, parts, variables))
