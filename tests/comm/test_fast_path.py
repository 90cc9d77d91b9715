"""The fast path of collectives: which calls use it, that it gives the same results, and the spans it records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from axon_nb import comm
from axon_nb.comm import ReduceOp, World, WorldClosedError
from axon_nb.comm.collectives import direct
from axon_nb.records.spans import ring


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
