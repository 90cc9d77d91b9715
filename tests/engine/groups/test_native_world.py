"""Worlds whose groups are torch's own, as on NCCL: how they form and recover. On CPUs, Gloo stands in for NCCL."""

from __future__ import annotations

import io
import operator
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh

from axon_nb.engine.groups import creation, recovery
from axon_nb.engine.groups.creation import c10d, named_group
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.transfer.namespace import NamespacePickler
from tests.engine.groups.native_ranks import CPU, GLOO, join_native, run_on_ranks, wait_for_threads

SIZE = 4


def _sum(group: Any = None) -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _lives(rank: int, store: Any) -> dict[str, Any]:
    started: list[Any] = []
    join_native(rank, store, SIZE, kind=replace(GLOO, start=lambda backend, _: started.append(backend)))
    world, found = dist.group.WORLD, {}
    found["bound before"] = str(world.bound_device_id)
    found["connected"] = [backend is world._get_backend(CPU) for backend in started]
    some: Any = None
    if rank in (0, 2):  # as `subgroup` in a cell on these ranks
        with named_group("some"):
            some = dist.new_group([0, 2], use_local_synchronization=True)
        found["some"] = _sum(some), started[-1] is some._get_backend(CPU)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axes = [mesh.get_group("dp"), mesh.get_group("tp")]
    found["mesh"] = [_sum(axis) for axis in axes], [axis._get_backend(CPU) in started for axis in axes]
    beside = dist.new_group(list(range(SIZE)), backend="gloo")
    found["beside"] = type(beside) is RecoverableGroup, _sum(beside)
    partial = dist.new_group(list(range(SIZE)))
    partial_gloo = dist.new_group(list(range(SIZE)), backend="gloo")
    if rank == 1:  # as if it had been aborted in `new_group`
        dist.destroy_process_group(partial)
        dist.destroy_process_group(partial_gloo)
    store.add("ready", 1)
    while store.add("ready", 0) < SIZE:  # Gloo hangs when an abort meets an operation that is just beginning
        pass
    before = recovery.num_calls()
    _sum()
    found["counted"] = recovery.num_calls() - before
    store.add("counted", 1)
    while store.add("counted", 0) < SIZE:
        pass
    wait_for_threads()
    recovery.abort(again=False)
    found["aborted"] = current_groups().abort.is_set()
    found["rebuilt"] = recovery.recover(3).groups
    before = recovery.num_calls()
    _sum()
    found["counted again"] = recovery.num_calls() - before
    found["bound after"] = str(world.bound_device_id)
    found["sums"] = [_sum(group) for group in (None, beside, *axes, *([some] if some is not None else []))]
    found["dropped"] = not {partial, partial_gloo} & set(c10d._world.pg_map)
    file = io.BytesIO()
    NamespacePickler(file, lambda _: (0, 0)).dump([world, axes[0], beside])
    found["copied"] = all(map(operator.is_, pickle.loads(file.getvalue()), [world, axes[0], beside]))
    found["later"] = _sum(dist.new_group(list(range(SIZE))))
    natives = creation.native_groups()
    found["owns beside"] = natives is not None and beside in natives.all()
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What each of four ranks finds."""
    return run_on_ranks(_lives, SIZE, tmp_path_factory.mktemp("ranks"))


def test_no_device_is_bound_to_a_group(lives: dict[int, dict[str, Any]]) -> None:
    assert {(found["bound before"], found["bound after"]) for found in lives.values()} == {("None", "None")}


def test_default_group_connects_on_creation(lives: dict[int, dict[str, Any]]) -> None:
    assert [found["connected"] for found in lives.values()] == [[True]] * SIZE


def test_subset_of_ranks_creates_a_group_alone(lives: dict[int, dict[str, Any]]) -> None:
    assert {rank: found.get("some") for rank, found in lives.items()} == {
        0: (2.0, True),
        1: None,
        2: (2.0, True),
        3: None,
    }


def test_two_axis_mesh_has_connected_groups(lives: dict[int, dict[str, Any]]) -> None:
    assert [found["mesh"] for found in lives.values()] == [([2.0, 2.0], [True, True])] * SIZE


def test_gloo_groups_beside_those_of_nccl_work_after_an_abort(lives: dict[int, dict[str, Any]]) -> None:
    for rank, found in lives.items():
        assert found["beside"] == (True, float(SIZE))
        assert found["aborted"]
        assert found["sums"] == [4.0, 4.0, 2.0, 2.0, *([2.0] if rank in (0, 2) else [])]
        assert not found["owns beside"]
        assert found["later"] == float(SIZE)


def test_group_missing_on_one_rank_is_dropped_on_all(lives: dict[int, dict[str, Any]]) -> None:
    assert [found["rebuilt"] for found in lives.values()] == [5, 4, 5, 4]
    assert all(found["dropped"] for found in lives.values())


def test_collectives_of_torchs_own_groups_are_counted(lives: dict[int, dict[str, Any]]) -> None:
    assert [(found["counted"], found["counted again"]) for found in lives.values()] == [(1, 1)] * SIZE


def test_group_variables_are_copied_as_groups(lives: dict[int, dict[str, Any]]) -> None:
    assert all(found["copied"] for found in lives.values())


def _is_debugged(rank: int, store: Any) -> Any:
    join_native(rank, store, 2)
    wrapper = type(dist.group.WORLD._get_backend(CPU)).__name__
    natives = creation.native_groups()
    assert natives is not None
    owned = natives.all() == [dist.group.WORLD]
    recovery.abort(again=False)
    return wrapper, owned, recovery.recover(3).groups, _sum()


def test_debug_wrapped_groups_are_rebuilt(tmp_path: Any) -> None:
    results = run_on_ranks(_is_debugged, 2, tmp_path, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert results == dict.fromkeys((0, 1), ("_ProcessGroupWrapper", True, 1, 2.0))


PROBLEM = "Rank 1 cannot use cuda:0 any more (a lost context). Run `%distributed repair --ranks 1`."


def _loses_its_device(rank: int, store: Any) -> list[Any]:
    join_native(rank, store, SIZE)
    before = recovery.num_calls()
    creation.device_problem = lambda *_, rank: PROBLEM if rank == 1 else ""  # type: ignore[assignment]
    lost = recovery.recover(3)
    untouched = recovery.num_calls() == before
    creation.device_problem = lambda *_, rank: ""  # type: ignore[assignment]
    return [lost.groups, lost.lost_device, untouched, recovery.recover(4).groups, _sum()]


def test_lost_device_is_reported_before_communication(tmp_path: Path) -> None:
    found = run_on_ranks(_loses_its_device, SIZE, tmp_path)
    assert found == {rank: [0, PROBLEM if rank == 1 else "", True, 1, float(SIZE)] for rank in range(SIZE)}
