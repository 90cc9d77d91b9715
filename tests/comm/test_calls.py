"""How calls reach torch's groups, directly where they can, and `axon_nb.calls()`, which counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import axon_nb
from axon_nb import comm
from axon_nb.comm import ReduceOp, World, WorldClosedError
from axon_nb.comm import world as query
from axon_nb.comm.collectives import direct
from axon_nb.plan.hardware import rounds_and_volume
from axon_nb.records.hooks import hook
from axon_nb.records.spans import ring

pytestmark = pytest.mark.timeout(600)

N = 4
since_214 = pytest.mark.skipif(
    not hook("comm.group_hooks").is_used, reason="torch's own groups have no hooks before 2.14"
)


def _one_of_each(world: World) -> Any:
    rank, part, whole = world.rank(), torch.zeros(6), torch.zeros(24)
    with axon_nb.calls() as counted:
        dist.all_reduce(whole)
        dist.all_gather([torch.empty(6) for _ in range(N)], part)
        comm.all_gather(part)
        dist.reduce_scatter(torch.empty(6), list(whole.chunk(N)))
        comm.reduce_scatter_sum(whole)
        dist.broadcast(whole, src=1)
        dist.reduce(whole, dst=1)
        dist.gather(part, [torch.empty(6) for _ in range(N)] if rank == 1 else None, dst=1)
        dist.scatter(part, list(whole.chunk(N)) if rank == 1 else None, src=1)
        dist.all_to_all_single(whole.clone(), whole)
        dist.barrier()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, part, (rank + 1) % N),
                dist.P2POp(dist.irecv, torch.empty(6), (rank - 1) % N),
            ]
        ):
            work.wait()
        funcol.wait_tensor(funcol.all_reduce(whole, "sum", dist.group.WORLD))
    dist.all_reduce(whole)  # counts no more
    return {(row.operation, row.peer): tuple(row[2:]) for row in counted.rows}


@pytest.mark.parametrize("backend", ["mock", pytest.param("gloo", marks=since_214)])
def test_each_operation_counts_its_payload_and_what_a_ring_sends(backend: str, request: pytest.FixtureRequest) -> None:
    world = World.mock(N) if backend == "mock" else request.getfixturevalue(f"{backend}_world")
    for rank, rows in enumerate(world.run(_one_of_each)):
        assert rows == {
            ("all_reduce", -1): (2, 192, 288),
            ("all_gather", -1): (2, 48, 144),
            ("reduce_scatter", -1): (2, 192, 144),
            ("broadcast", -1): (1, 96, 144),
            ("reduce", -1): (1, 96, 144),
            ("gather", -1): (1, 24, 0 if rank == 1 else 24),
            ("scatter", -1): (1, 24, 72 if rank == 1 else 0),
            ("all_to_all", -1): (1, 96, 72),
            ("barrier", -1): (1, 0, 0),
            ("send", (rank + 1) % N): (1, 24, 24),
            ("recv", (rank - 1) % N): (1, 24, 0),
        }


def test_parts_of_an_all_to_all_that_stay_are_not_sent() -> None:
    def work(world: World) -> Any:
        with axon_nb.calls() as counted:
            sizes_of = [sizes[source][world.rank()] for source in range(N)]
            comm.all_to_all(torch.zeros(24), send_sizes=sizes[world.rank()], recv_sizes=sizes_of)
        return tuple(counted.of("all_to_all")[2:])

    sizes = [[24, 0, 0, 0], [24, 0, 0, 0], [24, 0, 0, 0], [0, 0, 0, 24]]
    assert World.mock(N).run(work) == [(1, 96, 0), (1, 96, 96), (1, 96, 96), (1, 96, 0)]


def test_log_keeps_the_first_calls_in_order() -> None:
    def work(_: World) -> tuple[int, list[Any]]:
        with axon_nb.calls() as counted:
            for _ in range(600):
                dist.all_reduce(torch.zeros(2))
                dist.broadcast(torch.zeros(3), src=0)
        return counted.num_calls, counted.log

    for rank, (num_calls, log) in enumerate(World.mock(2).run(work)):
        assert num_calls == 1200
        assert len(log) == 1000
        assert [(caller, call.operation, call.bytes) for caller, call in log[:3]] == [
            (rank, "all_reduce", 8),
            (rank, "broadcast", 12),
            (rank, "all_reduce", 8),
        ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sent_bytes_agree_with_those_of_plans(size: int) -> None:
    shares = {"all_gather": 1 / size}
    operations = {
        "all_reduce": lambda: dist.all_reduce(torch.zeros(12)),
        "all_gather": lambda: comm.all_gather(torch.zeros(12 // size)),
        "reduce_scatter": lambda: comm.reduce_scatter_sum(torch.zeros(12)),
        "broadcast": lambda: dist.broadcast(torch.zeros(12), src=0),
        "all_to_all": lambda: comm.all_to_all(torch.zeros(12)),
    }

    def work(world: World) -> Any:
        with axon_nb.calls() as counted:
            for call in operations.values():
                call()
        return counted

    for counted in World.mock(size).run(work):
        for operation in operations:
            row = counted.of(operation)
            assert row.bytes == 48 * shares.get(operation, 1)
            assert row.sent == pytest.approx(rounds_and_volume(operation, size)[1] * 48)


def test_messages_are_counted_by_peer_in_ranks_of_the_default_group() -> None:
    def work(world: World) -> Any:
        odd = dist.new_group([1, 3])
        with axon_nb.calls() as counted:
            if world.rank() == 1:
                comm.send(torch.zeros(3), 1, header=False, group=odd)
                dist.recv(torch.zeros(5), src=3)
            elif world.rank() == 3:
                comm.recv(0, out=torch.empty(3), header=False, group=odd)
                dist.send(torch.zeros(5), dst=1)
        return [tuple(row) for row in counted.rows]

    zero, one, two, three = World.mock(N).run(work)
    assert zero == two == []
    assert one == [("send", 3, 1, 12, 12), ("recv", 3, 1, 20, 0)]
    assert three == [("recv", 1, 1, 12, 0), ("send", 1, 1, 20, 20)]


def test_around_a_mock_world_all_ranks_are_counted_and_blocks_nest() -> None:
    def work(world: World) -> Any:
        with axon_nb.calls() as first, axon_nb.calls() as same:
            dist.all_reduce(torch.zeros(4))
        dist.barrier()
        return first.num_calls, same.num_calls

    with axon_nb.calls() as everything:
        assert World.mock(3).run(work) == [(1, 1)] * 3
    assert (everything.num_calls, everything.bytes, everything.sent) == (6, 48, 66)
    World.mock(3).run(work)
    assert everything.num_calls == 6


def test_counts_display_as_a_table_and_convert_to_a_frame() -> None:
    def work(world: World) -> Any:
        with axon_nb.calls() as nothing:
            pass
        with axon_nb.calls() as counted:
            dist.all_reduce(torch.zeros(1 << 18))
        with axon_nb.calls() as messages:
            dist.send(torch.zeros(2), 1 - world.rank())
            dist.recv(torch.zeros(2), 1 - world.rank())
        return repr(nothing), repr(counted), repr(messages), counted.to_frame().to_dict("records")

    nothing, counted, messages, records = World.mock(2).run(work)[0]
    assert nothing == "no calls"
    assert counted.split("\n") == [
        "operation   calls     bytes      sent",
        "all_reduce      1  1.00 MiB  1.00 MiB",
    ]
    assert messages.split("\n") == [
        "operation  peer  calls  bytes  sent",
        "send          1      1    8 B   8 B",
        "recv          1      1    8 B   0 B",
        "all                  2   16 B   8 B",
    ]
    assert records == [{"operation": "all_reduce", "peer": -1, "calls": 1, "bytes": 1 << 20, "sent": 1 << 20}]


def test_buckets_of_ddp_are_counted() -> None:
    def work(world: World) -> Any:
        model = DistributedDataParallel(torch.nn.Linear(100, 10))
        model(torch.ones(2, 100)).sum().backward()  # the first step only measures the order of gradients
        with axon_nb.calls() as counted:
            model(torch.ones(2, 100)).sum().backward()
        return tuple(counted.of("all_reduce")[2:4])

    assert World.mock(2).run(work) == [(1, 4040)] * 2


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_under_torchrun_calls_of_the_library_are_counted(backend: str, request: pytest.FixtureRequest) -> None:
    def work(world: World) -> Any:
        with axon_nb.calls() as counted:
            comm.all_reduce(torch.zeros(4))
            comm.all_reduce(torch.zeros(4, 2).t())
        return query.rank(), tuple(counted.of("all_reduce")[2:])

    assert request.getfixturevalue(f"{backend}_world").run(work) == [(rank, (2, 48, 72)) for rank in range(N)]


def begin(folder: Path, name: str = "store") -> None:
    """Create a Gloo world of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / name), 1), rank=0, world_size=1)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """See `begin`."""
    begin(tmp_path)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_both_paths_give_the_same_result(gloo_world: Any, dtype: torch.dtype) -> None:
    """A tensor that requires a gradient takes the general path; otherwise the two calls are the same."""

    def work(world: World) -> Any:
        rank, answers = world.rank(), []
        for group in (None, world.default_group(), dist.group.WORLD, world.new_group(range(4))):
            short, careful = (((torch.arange(24) * (rank + 1)) % 7).view(8, 3).to(dtype) for _ in range(2))
            ops = [op for op in ReduceOp if op is not ReduceOp.AVERAGE or dtype.is_floating_point]
            pairs: list[tuple[Any, Any]] = []
            for op in ops:
                assert direct.fast_all_reduce(short.clone(), op, group) is not None
                pairs.append((comm.all_reduce(short.clone(), op, group=group), careful.clone()))
                comm.all_reduce(pairs[-1][1], op, group=group, async_op=True).wait()
                scattered = comm.reduce_scatter(careful, op, group=group, async_op=True).wait()
                pairs.append((comm.reduce_scatter(short, op, group=group), scattered))
            gathered = comm.all_gather(careful, group=group, async_op=True).wait()
            pairs.append((comm.all_gather(short, group=group), gathered))
            sent = comm.broadcast(careful.clone(), src=2, group=group, async_op=True).wait()
            pairs.append((comm.broadcast(short.clone(), src=2, group=group), sent))
            answers += [one.dtype is dtype and torch.equal(one, other) for one, other in pairs]
        return answers

    for answers in gloo_world.run(work):
        assert all(answers)


NOT_SHORT: dict[str, Callable[[], Any]] = {
    "numpy": lambda: torch.ones(4).numpy(),
    "a list": lambda: [1.0],
    "parameter": lambda: nn.Parameter(torch.ones(4)),
    "gradient": lambda: torch.ones(4, requires_grad=True),
    "strided": lambda: torch.ones(8)[::2],
    "sparse": lambda: torch.eye(4).to_sparse(),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "truths": lambda: torch.ones(4, dtype=torch.bool),
    "short numbers": lambda: torch.ones(4, dtype=torch.int16),
    "meta": lambda: torch.ones(4, device="meta"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("make", NOT_SHORT.values(), ids=NOT_SHORT)
def test_unsupported_tensors_take_the_general_path(make: Callable[[], Any]) -> None:
    given = make()
    assert direct.fast_all_reduce(given, ReduceOp.SUM, None) is None
    assert direct.fast_broadcast(given, 0, None) is None
    assert direct.fast_all_gather(given, None) is None
    assert direct.fast_reduce_scatter(given, ReduceOp.SUM, None) is None


class Looks(TorchFunctionMode):
    """A function mode that does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class LooksDeeper(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("alone")
def test_torch_supports_the_fast_path() -> None:
    assert direct.is_torch_group(dist.group.WORLD)
    assert direct.num_dispatch_modes() == 0
    assert type(dist.distributed_c10d._world) is direct.TorchWorld


@pytest.mark.usefixtures("alone")
def test_errors_and_modes_take_the_general_path() -> None:
    ones = torch.ones(4)
    assert direct.fast_all_reduce(ones, ReduceOp.SUM, None) is ones
    assert direct.fast_all_reduce(ones, "sum", None) is None
    assert direct.fast_all_reduce(ones.long(), ReduceOp.AVERAGE, None) is None
    assert direct.fast_broadcast(ones, 1, None) is None
    assert direct.fast_broadcast(ones, None, None) is None
    assert direct.fast_all_gather(torch.tensor(1.0), None) is None
    assert direct.fast_reduce_scatter(torch.tensor(1.0), ReduceOp.SUM, None) is None
    with Looks():
        assert direct.fast_all_reduce(ones, ReduceOp.SUM, None) is None
    with LooksDeeper():
        assert direct.fast_all_reduce(ones, ReduceOp.SUM, None) is None
    with comm.checking():
        assert direct.fast_all_reduce(ones, ReduceOp.SUM, None) is None
    with dist._coalescing_manager():
        assert direct.fast_all_reduce(ones, ReduceOp.SUM, None) is None
        comm.all_reduce(ones)


@pytest.mark.usefixtures("alone")
def test_each_call_records_one_span() -> None:
    position, ones = ring.position, torch.ones(6)
    comm.all_reduce_mean(ones)
    comm.broadcast(ones)
    comm.all_gather(ones)
    comm.reduce_scatter_sum(ones)
    spans = ring.since(position)[0]
    assert [(span.kind, span.name, span.bytes, span.rank) for span in spans] == [
        ("collective", name, 24, 0) for name in ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
    ]
    assert all(0 < span.start_ns <= span.end_ns and span.group == dist.group.WORLD.group_name for span in spans)


def test_destroyed_world_is_released(tmp_path: Path) -> None:
    for number in range(2):
        begin(tmp_path, f"store{number}")
        assert comm.all_reduce_sum(torch.ones(2)).tolist() == [1.0, 1.0]
        dist.destroy_process_group()
        assert not direct._fast_paths
        with pytest.raises(WorldClosedError):
            comm.all_reduce_sum(torch.ones(2))
