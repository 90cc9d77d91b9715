"""Groups over shared memory do what c10d asks of a backend, with many ranks, too, and refuse dtypes that differ."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from axon_nb.comm import World
from axon_nb.comm.errors import CollectiveMismatchError, TensorMismatchError
from tests.support.ranks import RankWorld

N = 4
SIZES = [0, 1, 5, 3000, 40_000, 1_500_000]
"""Elements: empty, tiny, one piece, several steps, several pieces."""

COUNTS = [3, 40_000]
"""Elements per rank: one piece, and several of what 16 ranks have."""


def gloo() -> Any:
    """A Gloo group of all ranks, made once in each process."""
    import torch.distributed as dist

    made = vars(dist).setdefault("_test_gloo", [])
    if not made:
        made.append(dist.new_group(backend="gloo"))
    return made[0]


@pytest.mark.parametrize("size", SIZES)
def test_sums_match_gloo_and_are_identical_on_all_ranks(shm_world: Any, size: int) -> None:
    def work(world: World) -> Any:
        import torch.distributed as dist

        generator = torch.Generator().manual_seed(world.rank())
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
            tensor = torch.randn(size, generator=generator).to(dtype)
            ours, again, theirs = tensor.clone(), tensor.clone(), tensor.clone()
            dist.all_reduce(ours)
            dist.all_reduce(again)
            wide = torch.complex128 if dtype.is_complex else torch.float64
            theirs = theirs.to(wide)
            dist.all_reduce(theirs, group=gloo())
            tolerance = {torch.bfloat16: 0.04, torch.float16: 0.005, torch.float64: 1e-12}.get(dtype, 1e-5)
            torch.testing.assert_close(ours.to(wide), theirs, rtol=tolerance, atol=tolerance)
            assert torch.equal(ours, again)
            found.append(ours.view(torch.uint8).tolist()[:4000] if not dtype.is_complex else ours[:500].tolist())
        return found

    results = shm_world.run(work)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str)
def test_integers_with_every_operation(shm_world: Any, dtype: torch.dtype) -> None:
    def work(world: World) -> Any:
        import torch.distributed as dist

        op = dist.ReduceOp
        names = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
        found = {}
        for name in names:
            tensor = (torch.arange(1001) * 7 + 3 * world.rank()).to(dtype)
            ours, theirs = tensor.clone(), tensor.clone()
            dist.all_reduce(ours, getattr(op, name))
            if not (dtype is torch.bool and name in ("BAND", "BOR", "BXOR")) and dtype not in (torch.bool, torch.int16):
                dist.all_reduce(theirs, getattr(op, name), group=gloo())
                assert torch.equal(ours, theirs), name
            found[name] = ours.tolist()
        return found

    results = shm_world.run(work)
    assert all(result == results[0] for result in results)
    whole = [(torch.arange(1001) * 7 + 3 * rank).to(dtype) for rank in range(N)]
    assert results[0]["BXOR"] == (whole[0] ^ whole[1] ^ whole[2] ^ whole[3]).tolist()
    assert results[0]["BAND"] == (whole[0] & whole[1] & whole[2] & whole[3]).tolist()


def test_averages_and_scaled_sums(shm_world: Any) -> None:
    def work(world: World) -> Any:
        import torch.distributed as dist
        from torch._C._distributed_c10d import _make_nccl_premul_sum

        average = torch.full((5,), float(world.rank()), dtype=torch.bfloat16)
        dist.all_reduce(average, dist.ReduceOp.AVG)
        whole = torch.tensor([-7 * world.rank(), 5])
        dist.all_reduce(whole, dist.ReduceOp.AVG)
        scaled = torch.full((3,), float(world.rank()))
        dist.all_reduce(scaled, _make_nccl_premul_sum(0.5))
        with pytest.raises(Exception, match="BAND is not defined for float32"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
        with pytest.raises(Exception, match="MAX"):
            dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
        return average.tolist(), whole.tolist(), scaled.tolist()

    for average, whole, scaled in shm_world.run(work):
        assert average == [1.5] * 5
        assert whole == [-10, 5]
        assert scaled == [3.0] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [0, 3, 50_000, 3_000_000])
def test_every_collective(shm_world: Any, size: int, asynchronous: bool) -> None:
    def work(world: World) -> None:
        import torch.distributed as dist

        rank, n = world.rank(), world.world_size()

        def call(function: Any, *args: Any, **kwargs: Any) -> None:
            handle = function(*args, async_op=asynchronous, **kwargs)
            if asynchronous:
                handle.wait()

        def data(source: int) -> torch.Tensor:
            return torch.arange(size, dtype=torch.int32) * 3 + source

        total = data(0) * n + sum(range(n))
        tensor = data(rank)
        call(dist.broadcast, tensor, 2)
        assert torch.equal(tensor, data(2))
        tensor = data(rank)
        call(dist.reduce, tensor, 1)
        if rank == 1:
            assert torch.equal(tensor, total)
        parts = [torch.empty(size, dtype=torch.int32) for _ in range(n)]
        call(dist.all_gather, parts, data(rank))
        assert all(torch.equal(part, data(source)) for source, part in enumerate(parts))
        whole = torch.empty(n * size, dtype=torch.int32)
        call(dist.all_gather_into_tensor, whole, data(rank))
        assert torch.equal(whole, torch.cat([data(source) for source in range(n)]))
        parts = [torch.empty(size, dtype=torch.int32) for _ in range(n)]
        call(dist.gather, data(rank), parts if rank == 3 else None, dst=3)
        if rank == 3:
            assert all(torch.equal(part, data(source)) for source, part in enumerate(parts))
        tensor = torch.empty(size, dtype=torch.int32)
        call(dist.scatter, tensor, [data(10 + target) for target in range(n)] if rank == 0 else None, src=0)
        assert torch.equal(tensor, data(10 + rank))
        tensor = torch.empty(size, dtype=torch.int32)
        call(dist.reduce_scatter, tensor, [data(target) for target in range(n)])
        assert torch.equal(tensor, data(rank) * n)
        call(dist.reduce_scatter_tensor, tensor, torch.cat([data(target) for target in range(n)]))
        assert torch.equal(tensor, data(rank) * n)
        parts = [torch.empty(size, dtype=torch.int32) for _ in range(n)]
        call(dist.all_to_all, parts, [data(10 * rank + target) for target in range(n)])
        assert all(torch.equal(part, data(10 * source + rank)) for source, part in enumerate(parts))
        call(dist.all_to_all_single, whole, torch.cat([data(10 * rank + target) for target in range(n)]))
        assert torch.equal(whole, torch.cat([data(10 * source + rank) for source in range(n)]))
        call(dist.barrier)

    shm_world.run(work)


def test_uneven_splits_strided_tensors_and_wrong_splits(shm_world: Any) -> None:
    def work(world: World) -> Any:
        import torch.distributed as dist

        rank, n = world.rank(), world.world_size()
        sent, taken = [rank + target for target in range(n)], [source + rank for source in range(n)]
        out = torch.zeros(sum(taken), 2)
        dist.all_to_all_single(out, torch.full((sum(sent), 2), float(rank)), taken, sent)
        strided = torch.zeros(6, 8)[:, ::2]
        strided += rank
        dist.all_reduce(strided)
        transposed = torch.full((3, 5), float(rank)).t()
        dist.broadcast(transposed, 1)
        with pytest.raises(RuntimeError) as caught:
            dist.all_to_all_single(torch.zeros(n + (rank == 2)), torch.zeros(n), [1, 1, 1, 1 + (rank == 2)], [1] * n)
        dist.all_reduce(torch.ones(1))
        return out[:, 0].tolist(), strided.unique().tolist(), transposed.unique().tolist(), str(caught.value)

    for rank, (out, strided, transposed, sentence) in enumerate(shm_world.run(work)):
        assert out == [float(source) for source in range(N) for _ in range(source + rank)]
        assert strided == [6.0]
        assert transposed == [1.0]
        assert "rank 3 sends 4 bytes to rank 2, which expects 8" in sentence


def test_sparse_tensors_are_summed(shm_world: Any) -> None:
    def work(world: World) -> Any:
        import torch.distributed as dist

        rank = world.rank()
        tensor = torch.sparse_coo_tensor([list(range(rank + 1))], torch.full((rank + 1, 2), 1.0 + rank), (6, 2))
        dist.all_reduce(tensor)
        with pytest.raises(RuntimeError, match="must be dense"):
            dist.broadcast(torch.zeros(3, 2).to_sparse_csr(), 0)
        dist.barrier()
        return tensor.to_dense()[:, 0].tolist()

    assert shm_world.run(work) == [[10.0, 9.0, 7.0, 4.0, 0.0, 0.0]] * N


def test_objects_subsets_and_threads(shm_world: Any) -> None:
    def work(world: World) -> Any:
        import threading

        import torch.distributed as dist

        rank, n = world.rank(), world.world_size()
        objects: list[Any] = [None] * n
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank * 1000})
        assert [item["rank"] for item in objects] == list(range(n))
        box = [("from", rank)] if rank == 2 else [None]
        dist.broadcast_object_list(box, 2)
        assert box == [("from", 2)]
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 3])]
        for ranks, group in zip(([0, 1], [2, 3], [0, 3]), pairs, strict=True):
            if rank in ranks:
                dist.all_reduce(tensor := torch.tensor([rank]), group=group)
                assert tensor.item() == sum(ranks)
        groups = [dist.new_group(backend="shm") for _ in range(4)]
        failures = []

        def use(group: Any) -> None:
            try:
                for step in range(50):
                    tensor = torch.full((1000 * (step % 5) + 1,), float(rank + step))
                    handle = dist.all_reduce(tensor, group=group, async_op=True)
                    if step % 3:
                        handle.wait()
                        assert tensor[0] == 6 + 4 * step
                    else:
                        dist.barrier(group)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=use, args=(group,)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        for group in groups:
            dist.destroy_process_group(group)
        return dist.get_backend()

    assert shm_world.run(work) == ["shm"] * N


@pytest.mark.parametrize("count", [4, 600_000])
def test_gathered_tensor_may_be_the_place_of_another_ranks(shm_world: Any, count: int) -> None:
    def work(world: World) -> list[bool]:
        import torch.distributed as dist

        whole = torch.zeros(N, count)
        parts = list(whole.unbind())
        place = parts[(world.rank() + 1) % N]
        place.fill_(world.rank())
        dist.all_gather(parts, place)
        together = torch.zeros(N * count)
        own = together[:count].fill_(world.rank())
        dist.all_gather_into_tensor(together, own)
        expected = torch.arange(N).float().repeat_interleave(count)
        return [torch.equal(whole.flatten(), expected), torch.equal(together, expected)]

    assert shm_world.run(work) == [[True, True]] * N


@pytest.mark.parametrize("count", [4, 50_000])
def test_product_is_computed_per_rank_shard(shm_world: Any, count: int) -> None:
    def work(world: World) -> list[float]:
        import torch.distributed as dist
        from torch._C._distributed_c10d import _make_nccl_premul_sum

        own = _make_nccl_premul_sum(world.rank() + 1.0)
        summed, rooted, part = torch.ones(count), torch.ones(count), torch.empty(count)
        dist.all_reduce(summed, own)
        dist.reduce(rooted, 0, own)
        dist.reduce_scatter_tensor(part, torch.ones(count * N), own)
        found = [summed, part, *([rooted] if world.rank() == 0 else [])]
        return sorted({float(value) for tensor in found for value in (tensor.min(), tensor.max())})

    assert shm_world.run(work) == [[10.0]] * N


def test_forked_child_is_rejected_without_side_effects(shm_world: Any) -> None:
    def work(world: World) -> tuple[str, float]:
        import torch.distributed as dist

        refused = ""
        if world.rank() == 0:
            reader, writer = os.pipe()
            if (child := os.fork()) == 0:
                try:
                    dist.all_reduce(torch.full((4,), 100.0))
                except RuntimeError as error:
                    os.write(writer, str(error).encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            refused = os.read(reader, 1000).decode()
        tensor = torch.full((4,), world.rank() + 1.0)
        dist.all_reduce(tensor)
        return refused, tensor.max().item()

    answers = shm_world.run(work)
    assert "This process was forked from a rank" in answers[0][0]
    assert [result for _, result in answers] == [10.0] * N


def test_callback_waits_for_the_collective_it_starts(shm_world: Any) -> None:
    def work(world: World) -> list[float]:
        import torch.distributed as dist

        def next_sum(future: Any) -> Any:  # as in torch's PowerSGD hook
            return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

        totals = []
        for number in range(3):
            if world.rank() == number:
                time.sleep(0.1)  # so that the first sum is not complete when the others chain the next ones to it
            first = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            chained = first.then(next_sum).then(lambda future: [future.value()]).then(next_sum)
            totals.append(float(chained.wait()))
        return totals

    assert shm_world.run(work) == [[64.0] * 3] * N


def _several(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone() for _ in range(N)]


CALLS: dict[str, Callable[[int, torch.Tensor], Any]] = {
    "broadcast": lambda rank, own: dist.broadcast(own, 1),
    "all_gather": lambda rank, own: dist.all_gather(_several(own), own),
    "all_gather_into_tensor": lambda rank, own: dist.all_gather_into_tensor(own.new_empty(4 * N), own),
    "gather": lambda rank, own: dist.gather(own, _several(own) if rank == 0 else None),
    "scatter": lambda rank, own: dist.scatter(own, _several(own) if rank == 0 else None),
    "all_to_all": lambda rank, own: dist.all_to_all(_several(own), _several(own)),
    "all_to_all_single": lambda rank, own: dist.all_to_all_single(own.clone(), own),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtype_mismatch_in_collective_raises_on_all_ranks(shm_world: Any, name: str) -> None:
    def work(world: World) -> tuple[str, list[float]]:
        rank = world.rank()
        own = torch.ones(4, dtype=torch.int32 if rank == 2 else torch.float32)
        with pytest.raises(CollectiveMismatchError) as found:
            CALLS[name](rank, own)
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == N
        return str(found.value), own.tolist()

    answers = shm_world.run(work)
    assert all(own == [1.0] * 4 for _, own in answers)
    count = "" if name.startswith("all_to_all") else "4 "
    words = [
        f"rank 2 passed {count}int32",
        f"ranks 0-1,3 passed {count}float32",
        name.partition("_into")[0].removesuffix("_single"),
    ]
    assert any(all(word in sentence for word in words) for sentence, _ in answers), answers


@pytest.mark.parametrize("size", [3, 2_000_000])
@pytest.mark.parametrize("first", ["the send", "the receive"])
def test_message_of_another_dtype_is_rejected(shm_world: Any, size: int, first: str) -> None:
    def work(world: World) -> tuple[str, Any]:
        rank, sentence, next_one = world.rank(), "", torch.zeros(1)
        taken = torch.zeros(size, dtype=torch.int32)
        handle: Any = None
        if rank == 0:
            if first == "the receive":
                dist.recv(torch.empty(1), 1, tag=9)  # rank 1 has posted its receive
            handle = dist.isend(torch.ones(size), 1)
            dist.isend(torch.full((1,), 7.0), 1, tag=3).wait()  # type: ignore[union-attr]
        elif rank == 1:
            if first == "the receive":
                handle = dist.irecv(taken, 0)
                dist.send(torch.ones(1), 0, tag=9)
            else:
                dist.recv(next_one, 0, tag=3)
                handle = dist.irecv(taken, 0)
        if handle is not None:
            try:
                handle.wait()
            except TensorMismatchError as error:
                sentence = str(error)
        if rank == 1 and first == "the receive":
            dist.recv(next_one, 0, tag=3)
        dist.barrier()
        return sentence, (taken.any().item(), next_one.item())

    answers = shm_world.run(work)
    expected = "rank 0 sends float32, but rank 1 receives into int32; both tensors must have the same dtype."
    assert expected in answers[1][0]
    assert answers[1][1] == (False, 7.0)
    # A message of one piece is sent once it is in memory, whether it is received or not.
    if size > 3 and first == "the receive":
        assert expected in answers[0][0]


def _row(rank: int, count: int) -> Any:
    """What a rank puts in: whole numbers, so that sums are exact in any order."""
    return np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float64)


def _collect(rank: int, size: int, count: int) -> dict[str, Any]:
    """The result of each collective on this rank."""
    own, found = torch.from_numpy(_row(rank, count)), {}
    found["all_reduce"] = own.clone()
    dist.all_reduce(found["all_reduce"])
    found["maximum"] = own.clone()
    dist.all_reduce(found["maximum"], dist.ReduceOp.MAX)
    found["broadcast"] = own.clone()
    dist.broadcast(found["broadcast"], size - 1)
    found["reduce"] = own.clone()
    dist.reduce(found["reduce"], size // 2)
    found["all_gather"] = own.new_empty(size * count)
    dist.all_gather_into_tensor(found["all_gather"], own)
    rows = [torch.empty_like(own) for _ in range(size)] if rank == 1 else None
    dist.gather(own, rows, 1)
    found["gather"] = torch.cat(rows) if rows else None
    found["scatter"] = torch.empty_like(own)
    dist.scatter(found["scatter"], [own + peer for peer in range(size)] if rank == 2 else None, 2)
    wide = torch.cat([own + peer for peer in range(size)])
    found["reduce_scatter"] = torch.empty_like(own)
    dist.reduce_scatter_tensor(found["reduce_scatter"], wide)
    found["all_to_all"] = torch.empty_like(wide)
    dist.all_to_all_single(found["all_to_all"], wide)
    ring = torch.empty_like(own)
    ops = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, ring, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    found["ring"] = ring
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    found["objects"] = [item["rank"] for item in objects]
    dist.barrier()
    return found


def _expected(rank: int, size: int, count: int) -> dict[str, Any]:
    rows = np.stack([_row(peer, count) for peer in range(size)])
    return {
        "all_reduce": rows.sum(0),
        "maximum": rows.max(0),
        "broadcast": rows[size - 1],
        "reduce": rows.sum(0) if rank == size // 2 else None,  # undefined on the others
        "all_gather": rows.ravel(),
        "gather": rows.ravel() if rank == 1 else None,
        "scatter": rows[2] + rank,
        "reduce_scatter": rows.sum(0) + size * rank,
        "all_to_all": (rows + rank).ravel(),
        "ring": rows[(rank - 1) % size],
        "objects": list(range(size)),
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_collectives_and_messages_of_many_ranks_match_numpy(size: int) -> None:
    def work(world: World) -> list[str]:
        torch.set_num_threads(1)
        wrong = []
        for count in COUNTS:
            found = _collect(world.rank(), size, count)
            for name, value in _expected(world.rank(), size, count).items():
                if value is not None and not np.array_equal(np.asarray(found[name]), value):
                    wrong.append(f"{name} of {count}")
        return wrong

    with RankWorld(size, backend="shm") as world:
        assert world.run(work) == [[]] * size
