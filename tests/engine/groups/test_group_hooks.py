"""torch's hooks before the calls of its groups, since 2.14: they record what our groups do, and refuse what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import axon_nb
from axon_nb.engine.groups import recovery
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import current_groups
from axon_nb.errors import UsageError
from axon_nb.records.hooks import hook
from tests.engine.groups.native_ranks import join_native, run_on_ranks

pytestmark = pytest.mark.skipif(
    not hook("comm.group_hooks").is_used, reason="torch's own groups have no hooks before 2.14"
)


def _program(group: Any, rank: int) -> None:
    part, whole = torch.ones(4), torch.ones(8)
    dist.all_reduce(whole, group=group)
    dist.broadcast(whole, group_src=1, group=group)
    dist.all_gather_into_tensor(torch.empty(8), part, group=group)
    dist.reduce_scatter_tensor(torch.empty(4), whole, group=group)
    dist.scatter(part, list(whole.chunk(2)) if rank == 1 else None, group_src=1, group=group)
    dist.gather(part, [torch.empty(4), torch.empty(4)] if rank == 1 else None, group_dst=1, group=group)
    dist.all_to_all_single(torch.empty(8), whole, group=group)
    dist.all_gather_object([None, None], {"a": 1}, group=group)
    dist.barrier(group=group)
    peer = 1 - rank
    dist.send(part, group_dst=peer, group=group) if rank else dist.recv(part, group_src=peer, group=group)
    ops = [dist.P2POp(kind, part, group_peer=peer, group=group) for kind in (dist.isend, dist.irecv)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    torch.compile(lambda tensor: funcol.all_reduce(tensor, "sum", group) + 1, backend="eager")(whole)
    model: nn.Module = DistributedDataParallel(nn.Linear(4, 4), process_group=group)
    model(torch.ones(2, 4)).sum().backward()
    model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    model(torch.ones(2, 4)).sum().backward()


def _records(rank: int, store: Any) -> Any:
    join_native(rank, store, 2)
    found = []
    for group in (dist.new_group([0, 1], backend="gloo"), dist.group.WORLD):
        with axon_nb.calls() as counted:
            _program(group, rank)
        found.append([tuple(row) for _, row in counted.log])
    return [type(group) is RecoverableGroup for group in dist.distributed_c10d._world.pg_map], *found


def test_hooks_of_torchs_groups_record_what_ours_do(tmp_path: Path) -> None:
    for kinds, ours, torchs in run_on_ranks(_records, 2, tmp_path).values():
        assert kinds == [False, True]
        assert ours == torchs
        assert {row[0] for row in ours} >= {"all_reduce", "all_gather", "reduce_scatter", "recv", "send", "barrier"}


def _refused(call: Any) -> str:
    try:
        call()
    except (UsageError, RuntimeError) as error:
        return str(error)
    return ""


def _runs_in_a_part(rank: int, store: Any) -> Any:
    join_native(rank, store, 3)
    pair, calls = dist.new_group([0, 1]), current_groups().calls
    if rank == 2:
        dist.all_reduce(torch.ones(1))
        return 0.0
    calls.begin_exclusive([0, 1])
    tensor = torch.ones(2)
    found = [
        _refused(lambda: dist.all_reduce(tensor)),
        _refused(lambda: dist.recv(tensor, 2)),
        _refused(lambda: dist.all_reduce(tensor, group=pair)),
        _refused(lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)),
    ]
    calls.end_exclusive()
    total = torch.ones(1)
    dist.all_reduce(total)
    return tensor.tolist(), total.item(), found


def test_call_that_ranks_outside_the_cell_would_have_to_make_is_refused(tmp_path: Path) -> None:
    found = run_on_ranks(_runs_in_a_part, 3, tmp_path)
    for rank in (0, 1):
        values, total, (default, message, own, both) = found[rank]
        assert default == (
            "all_reduce on the group of ranks 0-2 in a cell on ranks 0-1: rank 2 does not run this cell. "
            "Use `group=subgroup`, the group of this cell's ranks, or run the cell on all ranks."
        )
        assert message == (
            "recv with rank 2 in a cell on ranks 0-1: rank 2 does not run this cell. Run the cell on ranks 0-2."
        )
        assert (own, both) == ("", "")
        assert (values, total) == ([2.0, 2.0], 3.0)


class _Store(dist.FileStore):
    """A store that knows a folder of the host, as that of the ranks does."""

    folder: Path


def _passes_something_else(rank: int, store: Any) -> Any:
    root = _Store(f"{store.path}-root", 2)
    root.folder = Path(store.path).parent
    join_native(rank, root, 2)
    four, three, whole = torch.ones(4), torch.ones(3), torch.ones(8, dtype=torch.int32)
    pairs: list[list[Any]] = [
        [lambda: dist.all_reduce(four, async_op=True), lambda: dist.all_reduce(three, async_op=True)],
        [lambda: dist.all_reduce(four, async_op=True), lambda: dist.all_reduce(four.int(), async_op=True)],
        [lambda: dist.all_reduce(four, async_op=True), lambda: dist.all_gather([three, four], four, async_op=True)],
        [lambda: dist.broadcast(four, 0, async_op=True), lambda: dist.broadcast(four, 1, async_op=True)],
        [lambda: dist.all_reduce(four, async_op=True), lambda: dist.broadcast(four, 0, async_op=True)],
        [
            lambda: dist.reduce_scatter_tensor(torch.empty(4, dtype=torch.int32), whole, async_op=True),
            lambda: dist.all_gather([torch.empty(4), torch.empty(4)], four, async_op=True),
        ],
    ]
    found = []
    for number, calls in enumerate(pairs):
        if rank == 0:  # starts first, and waits while the other one makes its own call, then the same one
            work = calls[0]()
            store.set(f"started {number}", "")
            work.wait()
        else:
            store.wait([f"started {number}"])
            found.append(_refused(calls[1]))
            calls[0]().wait()
    recovery.abort(again=False)
    recovery.recover(1)
    after = torch.ones(2)
    dist.all_reduce(after)
    return found, four.tolist(), after.tolist()


def test_call_that_differs_from_another_ranks_is_refused_before_it_starts(tmp_path: Path) -> None:
    found = run_on_ranks(_passes_something_else, 2, tmp_path)
    said, values, after = found[1]
    assert found[0] == ([], values, after)
    assert values == [16.0] * 4, "each call that was not refused ran once"
    assert after == [2.0, 2.0]
    same = "all ranks of a group must pass the same."
    size, dtype, failed, root, operation, gather = said
    assert size == f"all_reduce: rank 1 passed 3 float32, rank 0 passed 4 float32; {same}"
    assert dtype == f"all_reduce: rank 1 passed 4 int32, rank 0 passed 4 float32; {same}"
    assert "gloo" in failed.lower() or "invalid" in failed.lower(), "torch's own error; it does not count"
    roots = "rank 1 passed 16 bytes with root rank 1, rank 0 passed 16 bytes with root rank 0"
    assert root == f"broadcast: {roots}; {same}"
    assert operation == "Collective mismatch: rank 1 is in broadcast, rank 0 in all_reduce, on the same group."
    assert gather == "Collective mismatch: rank 1 is in all_gather, rank 0 in reduce_scatter, on the same group."
