"""Native groups are made, aborted and made again, and train as before."""

from __future__ import annotations

import ast
import io
import operator
import pickle
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from axon_nb.engine.groups import abort, creation, recovery
from axon_nb.engine.groups.abort import (
    AbortedError,
    BackendKind,
    BrokenGroupError,
    NativeGroups,
    connect_in_helper,
    wait_for_peers,
)
from axon_nb.engine.groups.creation import c10d, named_group
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.transfer.namespace import NamespacePickler
from axon_nb.records.hooks import missing_hooks
from tests.engine.groups.native_ranks import (
    CPU,
    GLOO,
    LIMIT,
    groups_on,
    join_native,
    rebuild_all,
    run_on_ranks,
    sums,
    trained,
    wait_for_threads,
)
from tests.support.processes import until

STOPS = ["", "in forward", "in backward", "step", "in backward", ""]

SIZE = 4


def _trains(rank: int, store: Any) -> dict[str, list[float]]:
    groups = groups_on(store)
    before = dist.group.WORLD
    result = {}
    for kind in ("ddp", "fsdp"):
        result[kind] = trained(kind, rank, groups, [""] * len(STOPS))
        result[f"{kind} aborted"] = trained(kind, rank, groups, STOPS)
    assert dist.group.WORLD is before
    assert dist.get_backend() == "gloo"
    return result


def test_training_continues_bitwise_on_fresh_backends(tmp_path: Path) -> None:
    results = run_on_ranks(_trains, 2, tmp_path)
    assert sorted(results) == [0, 1]
    for values in results.values():
        assert values["ddp aborted"] == values["ddp"] == results[0]["ddp"]
        assert values["fsdp aborted"] == values["fsdp"] == results[0]["fsdp"]


def _waits_and_is_aborted(rank: int, store: Any) -> tuple[str, str, list[float], str, list[float]]:
    groups = groups_on(store)
    own = dist.new_group([0, 1], group_desc="mine")
    name, desc = own.group_name, own.group_desc
    tensor = torch.full((1000,), float(rank))
    error = ""
    if rank == 0:
        work = dist.all_reduce(tensor, group=own, async_op=True)  # rank 1 never comes
        wait_for_threads()
        abort = threading.Timer(0.2, lambda: groups.abort(timeout_s=60))
        abort.start()
        try:
            work.wait()
        except RuntimeError as raised:
            error = str(raised)
        abort.join()  # which would close the fresh backends otherwise
        store.set("released", "1")
    store.wait(["released"])  # so that it was the abort that released rank 0, and not the rebuild of rank 1
    rebuild_all(groups, 1)
    assert (own.group_name, own.group_desc) == (name, desc)
    tensor = torch.full((2,), rank + 1.0)
    dist.all_reduce(tensor, group=own)
    later = dist.new_group([0, 1])
    more = torch.full((2,), rank + 1.0)
    dist.all_reduce(more, group=later)
    dist.barrier()
    return error, desc, tensor.tolist(), later.group_name, more.tolist()


def test_abort_releases_waiting_ranks_and_group_works_again(tmp_path: Path) -> None:
    results = run_on_ranks(_waits_and_is_aborted, 2, tmp_path)
    assert results[0][0] != ""
    assert results[1][0] == ""
    assert results[0][1:] == results[1][1:] == ("mine", [3.0, 3.0], results[0][3], [3.0, 3.0])


def _is_replaced(rank: int, store: Any) -> Any:
    join_native(rank, store, 2)
    dist.new_group([0, 1], group_desc="mine")
    dist.new_group([0, 1], backend="gloo", group_desc="beside")
    groups = creation.native_groups()
    assert groups is not None
    registry = [msgspec.to_builtins(group) for group in recovery.list_groups()]
    if rank == 1:  # from here on another process is rank 1
        folder = str(Path(store.path).parent)
        code = "import sys; from tests.engine.groups.native_ranks import be_newcomer; be_newcomer(*sys.argv[1:])"
        command = [sys.executable, "-c", code, folder, repr(registry), "7"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == 0, done.stderr
        answer = done.stdout
        store.set("newcomer", answer)
        dist.destroy_process_group(groups.all()[1])  # the others never had the groups that this process made
        rebuild_all(groups, 8)  # for the barrier at the end of the test's processes
        return registry, ast.literal_eval(answer)
    store.wait(["the newcomer is up"])
    done = recovery.recover(7, replaced=True)
    found = sums(rank)
    store.wait(["newcomer"])
    for group in groups.all()[1:]:
        dist.destroy_process_group(group)
    rebuild_all(groups, 8)
    return registry, found, done.groups


def test_replacement_rank_joins_the_existing_groups(tmp_path: Path) -> None:
    results = run_on_ranks(_is_replaced, 2, tmp_path)
    both = {"ranks": (0, 1)}
    registry = [
        {"name": "1", "desc": "mine", "backend": GLOO.torch_name, "timeout_s": 60.0, **both},
        {"name": "2", "desc": "beside", "backend": "gloo", "timeout_s": 60.0, **both},
    ]
    assert results[1] == (registry, [3.0] * 8)
    assert results[0] == (registry, [3.0] * 8, 3)


def _recovers(rank: int, store: Any) -> Any:
    join_native(rank, store, 2)
    if rank == 1:
        for _ in range(3):  # groups of its own, which the other rank does not know of
            dist.distributed_c10d._world.group_count += 1
    recovery.abort(again=False)
    refused = current_groups().abort.is_set()
    answer = recovery.recover(3)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return (
        refused,
        current_groups().abort.is_set(),
        answer.groups,
        tensor.item(),
        dist.distributed_c10d._world.group_count,
    )


def test_abort_and_recover_on_request(tmp_path: Path) -> None:
    results = run_on_ranks(_recovers, 2, tmp_path)
    assert results[0] == results[1]
    assert results[0][:4] == (True, False, 1, 2.0)


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A default group of this process alone, in this process."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=LIMIT)
    yield store
    current_groups().abort.clear()
    dist.destroy_process_group()


def test_hung_abort_is_abandoned_and_reported(alone: Any) -> None:
    never, asked = threading.Event(), []

    def stuck(backend: Any) -> None:
        asked.append(backend)
        never.wait()

    kind = BackendKind(
        torch_name="gloo",
        start=lambda backend, device: None,
        owns=lambda backend: isinstance(backend, ProcessGroupGloo),
        connect=lambda *args: None,
        abort=stuck,
        connect_timeout_s=0.1,
    )
    groups = NativeGroups(kind, alone, device=CPU, timeout=LIMIT, abort=current_groups().abort)
    dist.new_group([0])
    assert sorted(groups.abort(timeout_s=0.1)) == sorted(group.group_name for group in groups.all())
    assert until(lambda: len(asked) == 2)
    # Each backend is aborted once, however often it is asked for.
    assert groups.abort(timeout_s=0.1) == []
    assert len(asked) == 2
    never.set()


def test_group_accepts_249_backends_then_names_the_fix(alone: Any) -> None:
    assert missing_hooks("groups.swap") == []
    group = dist.group.WORLD
    backend = group._get_backend(CPU)
    for earlier in range(abort.MAX_SWAPS):
        abort.swap_backend(group, backend, CPU, earlier=earlier)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    with pytest.raises(BrokenGroupError, match=r"rebuilt 249 times.*%distributed restart"):
        abort.swap_backend(group, backend, CPU, earlier=abort.MAX_SWAPS)


def test_abort_ends_waits_for_peers_and_connections(alone: Any) -> None:
    threading.Timer(0.2, current_groups().abort.set).start()
    with pytest.raises(AbortedError):
        wait_for_peers(alone, 0, 2, raise_if_cancelled=current_groups().abort.raise_if_set, timeout_s=60)
    current_groups().abort.clear()

    go_on, disposed = threading.Event(), threading.Event()
    threading.Timer(0.2, current_groups().abort.set).start()

    def build() -> str:
        go_on.wait()
        return "backend"

    with pytest.raises(AbortedError):
        connect_in_helper(
            build,
            raise_if_cancelled=current_groups().abort.raise_if_set,
            timeout_s=60,
            dispose=lambda backend: disposed.set(),
        )
    go_on.set()
    assert disposed.wait(60)  # what comes too late is not kept


def test_late_peers_and_connections_are_reported(alone: Any) -> None:
    with pytest.raises(RuntimeError, match=r"group ranks 1-2 did not arrive within 0.1 s"):
        wait_for_peers(alone, 0, 3, raise_if_cancelled=lambda: None, timeout_s=0.1)
    stop = threading.Event()
    with pytest.raises(RuntimeError, match=r"connecting timed out after 0.1 s"):
        connect_in_helper(stop.wait, raise_if_cancelled=lambda: None, timeout_s=0.1, dispose=lambda backend: None)
    stop.set()
    with pytest.raises(ZeroDivisionError):
        connect_in_helper(lambda: 1 // 0, raise_if_cancelled=lambda: None, timeout_s=60, dispose=lambda backend: None)


def test_wait_for_peers_lasts_until_all_arrive(alone: Any) -> None:
    begun = time.monotonic()
    threading.Timer(0.2, lambda: alone.set("here1", "1")).start()
    wait_for_peers(alone, 0, 2, raise_if_cancelled=lambda: None, timeout_s=60)
    assert time.monotonic() - begun >= 0.1


def _keeps_its_timeout(rank: int, store: Any) -> list[float]:
    groups = groups_on(store)
    own = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    dist.barrier(group=own)  # the other rank may still be connecting, and a rebuild closes connections
    rebuild_all(groups, 1)
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in (own, dist.group.WORLD)]


def test_rebuilt_group_keeps_its_timeout(tmp_path: Path) -> None:
    timeouts = [7.0, LIMIT.total_seconds()]
    assert run_on_ranks(_keeps_its_timeout, 2, tmp_path) == {0: timeouts, 1: timeouts}


def _pauses(rank: int, store: Any) -> dict[str, Any]:
    """Gloo gives no memory back, so its backends only note that they were asked, and wait for each other as NCCL's."""
    join_native(rank, store, 2)
    own = dist.new_group([1, 0], backend=GLOO.torch_name)
    groups, notes = current_groups().native, []
    assert groups is not None
    found: dict[str, Any] = {"gloo": groups.suspend()}
    groups.resume()
    for name in ("suspend", "resume"):

        def ask(backend: Any, name: str = name) -> None:
            backend.barrier(dist.BarrierOptions()).wait()
            notes.append((name, [group._get_backend(CPU) is backend for group in (dist.group.WORLD, own)].index(True)))

        setattr(ProcessGroupGloo, name, ask)
    ProcessGroupGloo.memory_stats = lambda _: {}
    found["kept"] = groups.suspend()
    rebuild_all(groups, 1)  # as a repair: fresh backends have their memory
    groups.resume()
    found["kept again"] = groups.suspend()
    groups.resume()
    groups.resume()
    return found | {"sums": sums(rank), "notes": notes}


def test_paused_groups_take_their_memory_again_unless_they_were_rebuilt(tmp_path: Path) -> None:
    found = run_on_ranks(_pauses, 2, tmp_path)
    assert found[0] == found[1]
    assert found[0].pop("gloo") in (  # the second before torch 2.13
        "Backend gloo does not support getMemoryStats",
        f"this is torch {torch.__version__}",
    )
    suspended, resumed = [("suspend", 0), ("suspend", 1)], [("resume", 0), ("resume", 1)]
    assert found[0] == {"kept": "", "kept again": "", "sums": [3.0] * 6, "notes": suspended * 2 + resumed}


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
