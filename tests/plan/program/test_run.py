"""`plan.run`: memory by line, calls, time, and which ranks run: as few as tell all ranks apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from axon_nb import plan
from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import DDP, FSDP, Pipeline
from axon_nb.plan.errors import PlanError
from axon_nb.plan.program.record import Peak, RankRecord, distinct_ranks
from tests.plan.program import programs
from tests.plan.recording import begin, calls_of, recording

pytestmark = pytest.mark.timeout(600)
MIB = 2**20


def _grows() -> Any:
    """Holds 1 MiB, then 64 MiB more."""
    small = torch.empty(MIB // 4, device="cuda")
    large = torch.empty(16 * MIB, device="cuda")
    return small, large


def _reads() -> Any:
    loss = torch.ones(3).sum()
    if loss.item() > 2:  # a value
        loss = loss * 2
    dist.all_reduce(loss)


def _by_rank() -> Any:
    """The last rank holds twice as much."""
    last = dist.get_rank() == dist.get_world_size() - 1
    held = torch.empty((2 if last else 1) * MIB)
    dist.all_reduce(held[:4])
    return held


def _waits_forever() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.empty(3), 1)  # nobody sends


@pytest.fixture(scope="module")
def large_ddp() -> plan.ProgramPlan:
    """DDP on 1,024 ranks."""
    return plan.run(programs.ddp, 1024, device="h100")


def test_muon_sends_what_ranks_send() -> None:
    def work(world: World) -> list[int]:
        begin()
        programs.muon()
        return [size for _, operation, size in calls_of(world.rank()) if operation == "all_to_all_single"]

    planned = plan.run(programs.muon, 2, device="cpu")
    with recording():
        found = World.mock(2).run(work)
    for rank, sizes in enumerate(found):
        (row,) = [row for row in planned.rank(rank).calls if row.operation == "all_to_all"]
        assert (row.calls, row.bytes) == (len(sizes) / programs.STEPS, sum(sizes) / programs.STEPS)
    assert len(found[0]) == 6 * programs.STEPS, "there and back, in three turns"
    assert sum(map(sum, found)) == 2 * 5 * programs.WIDTH**2 * 2 * programs.STEPS, "each in bfloat16, there and back"


def test_equivalent_ranks_are_simulated_once(large_ddp: plan.ProgramPlan) -> None:
    (one,) = large_ddp.ranks
    assert len(one.ranks) == 1024
    assert one.num_steps == programs.STEPS


def test_memory_is_grouped_by_the_line_that_allocated_it(large_ddp: plan.ProgramPlan) -> None:
    (one,) = large_ddp.ranks
    assert sum(one.memory.values()) == one.peak_bytes
    size = sum(p.nbytes for p in programs.Block().parameters()) * 3
    states = next(held for line, held in one.memory.items() if "optimizer.step()" in line)
    assert 2 * size <= states
    assert all(line.startswith("programs.py:") for line in one.memory), one.memory


def test_calls_and_bytes_match_a_step(large_ddp: plan.ProgramPlan) -> None:
    (row,) = large_ddp.ranks[0].calls
    size = sum(p.nbytes for p in programs.Block().parameters()) * 3
    assert (row.operation, row.num_ranks, row.bytes) == ("all_reduce", 1024, size)


def test_parts_add_up_to_the_step_and_steps_to_the_program(large_ddp: plan.ProgramPlan) -> None:
    (one,) = large_ddp.ranks
    assert sum(large_ddp.parts.values()) == pytest.approx(large_ddp.step_s)
    assert 0 < large_ddp.step_s < one.total_s < 10 * programs.STEPS * large_ddp.step_s
    kinds = {span.kind for span in large_ddp.spans}
    assert {"forward", "backward", "optimizer", "collective"} <= kinds
    assert max(span.end_ns for span in large_ddp.spans) <= round(one.total_s * 1e9)


def test_the_figure_shows_memory_by_line_and_the_parts_of_a_step(large_ddp: plan.ProgramPlan) -> None:
    bars = large_ddp.figure().data
    held, spent = ([bar for bar in bars if bar.xaxis == axis] for axis in (None, "x2"))
    assert {bar.x for bar in bars} == {("ranks 0-1023",)}
    assert sum(bar.y[0] for bar in held) == pytest.approx(large_ddp.peak_bytes / MIB)
    assert sum(bar.y[0] for bar in spent) == pytest.approx(1e3 * large_ddp.step_s)
    assert any("optimizer.step()" in bar.name for bar in held)


def test_stages_of_a_pipeline_wait_for_each_other() -> None:
    planned = plan.run(programs.pipeline, 4, device="h100", ranks="all")
    assert [one.ranks for one in planned.ranks] == [(0,), (1,), (2,), (3,)]
    assert all(one.parts["waiting for other ranks"] > 0 for one in planned.ranks)
    assert [len({span.rank for span in one.spans}) for one in planned.ranks] == [1] * 4


def test_ranks_along_each_axis_run_once() -> None:
    planned = plan.run(programs.two_axes, 64, device="h100")
    assert sum(len(one.ranks) for one in planned.ranks) == 64
    assert len(planned.ranks) <= 4
    sizes = {(row.operation, row.num_ranks) for row in planned.ranks[0].calls}
    assert {("all_gather", 32), ("reduce_scatter", 32), ("all_reduce", 2)} <= sizes


def test_differing_rank_is_detected() -> None:
    planned = plan.run(_by_rank, 100, device="cpu")
    assert planned.rank(99).peak_bytes == 2 * planned.rank(0).peak_bytes == 8 * MIB + planned.rank(99).peak_bytes % MIB
    assert planned.rank(98) is planned.rank(0)
    assert not planned.has_times


def test_running_out_of_memory_names_the_line() -> None:
    planned = plan.run(_grows, 2, memory=32 / 1024)
    assert planned.out_of_memory is not None
    assert re.search(r"ranks 0-1: test_run\.py:\d+ large = torch\.empty.* past 32\.0 MiB", planned.out_of_memory)
    assert planned.out_of_memory in str(planned)
    assert plan.run(_grows, 2).out_of_memory is None


def test_reading_an_unknown_value_raises() -> None:
    with pytest.raises(PlanError, match=r"^Line \d+ of .*test_run\.py reads a tensor's value \(\.item\(\)\).*item="):
        plan.run(_reads, 2)
    assert plan.run(_reads, 2, item=3.0).ranks[0].calls[0].operation == "all_reduce"


def _calls_differ() -> None:
    value = torch.ones(4)
    if dist.get_rank() == 1:
        dist.broadcast(value, 0)
    else:
        dist.all_reduce(value)


def _one_call_too_few() -> None:
    for _ in range(2 if dist.get_rank() else 1):
        dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_waits_forever, r"hangs: recv on rank 0 in test_run\.py:\d+ dist\.recv.* waits for rank 1; rank 1 made all"),
        (_calls_differ, r"all_reduce on rank 0 in test_run\.py:\d+ .*, but broadcast on rank 1 in test_run\.py:\d+ "),
        (_one_call_too_few, r"all_reduce on ranks? 1.* in test_run\.py:\d+ .* waits for rank 0; rank 0 made all"),
    ],
    ids=["receive", "other call", "one call too few"],
)
def test_hang_names_ranks_and_lines(program: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.run(program, 2, device="cpu")


def test_unplanned_ranks_do_not_count_as_a_hang() -> None:
    planned = plan.run(_waits_forever, 2, device="cpu", ranks=[0])
    assert any("waits in line" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h1000"}, "device must be one of .*h100.*got 'h1000'"),
        ({"memory": 0}, "memory must be GiB per rank"),
        ({"ranks": "some"}, "ranks must be 'distinct', 'all' or numbers"),
        ({"ranks": [2]}, "ranks"),
        ({"overlap": 2}, "overlap must be a fraction"),
    ],
)
def test_invalid_options_are_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.run(_grows, 2, **options)


def test_failure_names_the_line() -> None:
    def fails() -> None:
        nn.Linear(2, 3)(torch.ones(2, 5))

    with pytest.raises(PlanError, match=r"Line \d+ of .*test_run\.py failed on rank 0: RuntimeError"):
        plan.run(fails, 2)


def _wrapped_by_ours() -> Any:
    """The wrappers of `axon_nb.parallel`, which exchange objects with other ranks."""
    model = DDP(programs.Block())
    sharded = FSDP(programs.Block())
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(model(torch.randn(4, programs.WIDTH))).sum().backward()
    optimizer.step()
    return model, sharded, optimizer


def test_axon_nb_wrappers_work() -> None:
    planned = plan.run(_wrapped_by_ours, 16)
    assert {"all_reduce", "all_gather", "reduce_scatter"} <= {row.operation for row in planned.ranks[0].calls}


def _piped() -> Any:
    """A pipeline of `axon_nb.parallel`; only the ranks at its ends have data."""
    pipe = Pipeline.split(nn.Sequential(*(programs.Block() for _ in range(dist.get_world_size()))), num_microbatches=8)
    optimizer = torch.optim.AdamW(pipe.parameters())
    batch = torch.randn(programs.BATCH, programs.WIDTH)
    for _ in range(3):
        pipe.step(batch if pipe.is_first else None, batch if pipe.is_last else None, loss=nn.functional.mse_loss)
        optimizer.step()
        optimizer.zero_grad()
    return pipe, optimizer


def test_our_own_pipelines_work() -> None:
    planned = plan.run(_piped, 4, device="h100", ranks="all")
    sizes = [{(row.operation, row.bytes) for row in one.calls} for one in planned.ranks]
    sent = programs.BATCH * programs.WIDTH * 4
    assert [("send", sent) in rows for rows in sizes] == [True, False, False, True]
    assert [("send", 2 * sent) in rows for rows in sizes] == [False, True, True, False]
    assert planned.rank(0).peak_bytes > 16 * sum(p.numel() for p in programs.Block().parameters())


def _by_parity() -> Any:
    held = torch.empty((1 + dist.get_rank() % 2) * MIB)
    dist.all_reduce(held.sum())
    return held


def test_ranks_differing_by_parity_are_distinguished() -> None:
    planned = plan.run(_by_parity, 12, device="cpu")
    assert [one.ranks for one in planned.ranks] == [tuple(range(0, 12, 2)), tuple(range(1, 12, 2))]


def _products(dtype: torch.dtype, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    weight = torch.empty(2048, 2048, dtype=dtype)
    for _ in range(10):
        weight = weight @ weight


def test_products_run_at_the_rate_of_their_dtype() -> None:
    kinds = [(torch.float32, "highest"), (torch.float32, "high"), (torch.bfloat16, "highest")]
    full, rounded, half = (plan.run(_products, 1, device="h100", args=kind) for kind in kinds)
    assert full.ranks[0].total_s / half.ranks[0].total_s == pytest.approx(989.4 / 66.9, rel=0.1)
    assert rounded.ranks[0].total_s / half.ranks[0].total_s == pytest.approx(2, rel=0.1)
    assert any("TF32" in note for note in full.notes)
    assert not any("TF32" in note for note in (*rounded.notes, *half.notes))


def _from_meta() -> Any:
    with torch.device("meta"):
        model = nn.Linear(1024, 1024)
    dist.barrier()
    return model.to_empty(device="cuda")


def test_tensors_on_the_meta_device_take_no_memory() -> None:
    (one,) = plan.run(_from_meta, 2).ranks
    (line,) = (line for line, size in one.memory.items() if size > MIB)
    assert "to_empty" in line
    assert one.memory[line] == 4 * (1024 * 1024 + 1024)


def _found(size: int, kind: Callable[[int], int], groups: tuple[tuple[int, ...], ...]) -> tuple[list[int], int]:
    """The kind that each rank is taken to have, and how many ranks ran."""
    ran: dict[int, RankRecord] = {}

    def run(ranks: Sequence[int]) -> Mapping[int, RankRecord]:
        for rank in ranks:
            ran[rank] = RankRecord(rank, (), (), (), groups, 0.0, Peak(0, 0, {}, None), 0, kind(rank))
        return ran

    lanes = distinct_ranks(size, run)
    kinds = {rank: lane.record.signature for lane in lanes for rank in lane.ranks}
    assert sorted(kinds) == list(range(size))
    return [kinds[rank] for rank in range(size)], len(ran)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        (lambda _: 0, 4),
        (lambda rank: rank == 0, 4),
        (lambda rank: rank == 1023, 18),
        (lambda rank: (rank >= 100) + (rank >= 700), 28),
        (lambda rank: rank % 2, 1024),
        (lambda rank: rank, 1024),
    ],
    ids=["uniform", "first", "last", "uneven shards", "parity", "all"],
)
def test_every_rank_gets_its_class(kind: Callable[[int], int], most: int) -> None:
    kinds, count = _found(1024, kind, (tuple(range(1024)),))
    assert kinds == [int(kind(rank)) for rank in range(1024)]
    assert count <= most


def test_axes_match_the_programs_groups() -> None:
    tp, dp, pp = (0, 1), tuple(range(0, 64, 2)), tuple(range(0, 512, 64))
    kinds, count = _found(512, lambda rank: rank // 64, (tp, dp, pp))
    assert kinds == [rank // 64 for rank in range(512)]
    assert count <= 20
