"""Horovod's collectives in a mock world and on processes, and training with DistributedOptimizer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.compat import horovod as hvd
from axon_nb.compat.horovod.collectives import as_op
from tests.support.training.models import batch, blocks, loss_of

Call = Callable[[int], Any]

VALUES: dict[str, tuple[Call, Call]] = {
    "size and ranks": (
        lambda r: (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.is_initialized()),
        lambda r: (r, 3, r, 3, True),
    ),
    "average": (lambda r: hvd.allreduce(torch.tensor([r, 3.0 * r])).tolist(), lambda r: [1.0, 3.0]),
    "sum": (lambda r: hvd.allreduce(torch.tensor([r + 1.0]), name="total", op=hvd.Sum).tolist(), lambda r: [6.0]),
    "scalar": (lambda r: hvd.allreduce(torch.tensor(float(r))).item(), lambda r: 1.0),
    "integers are truncated": (lambda r: hvd.allreduce(torch.tensor([-r * r, r * r])).tolist(), lambda r: [-1, 1]),
    "fp16": (
        lambda r: hvd.allreduce(torch.full((2,), 1 / 3), compression=hvd.Compression.fp16, op=hvd.Sum).tolist(),
        lambda r: [torch.tensor(1 / 3).half().mul(3).item()] * 2,
    ),
    "view": (lambda r: hvd.allreduce(torch.arange(6.0).view(2, 3).t() * r, op=hvd.Sum)[2, 1].item(), lambda r: 15.0),
    "rows": (
        lambda r: hvd.allgather(torch.full((r + 1, 2), r)).tolist(),
        lambda r: [[n, n] for n in range(3) for _ in range(n + 1)],
    ),
    "equal parts": (
        lambda r: hvd.alltoall(torch.arange(6) + 100 * r).tolist(),
        lambda r: [100 * n + 2 * r + i for n in range(3) for i in range(2)],
    ),
    "splits": (
        lambda r: [part.tolist() for part in hvd.alltoall(torch.full((r + 2,), r), torch.tensor([r + 1, 0, 1]))],
        lambda r: [[[0, 1, 1, 2, 2, 2], [], [0, 1, 2]][r], [[1, 2, 3], [0, 0, 0], [1, 1, 1]][r]],
    ),
    "broadcast": (lambda r: hvd.broadcast(torch.tensor([r]), 2, name="epoch").item(), lambda r: 2),
    "object": (lambda r: hvd.broadcast_object({"rank": r}, root_rank=1), lambda r: {"rank": 1}),
}


def test_older_parameter_warns() -> None:
    with pytest.warns(DeprecationWarning, match="replaced with `op`"):
        assert as_op(None, average=False) is hvd.Sum


@pytest.mark.parametrize("what", VALUES)
def test_values(world: Any, what: str) -> None:
    call, expected = VALUES[what]

    def work(world: World) -> Any:
        hvd.init()
        return call(world.rank())

    assert world.run(work) == [expected(rank) for rank in range(3)]


@pytest.mark.parametrize(("op", "gradient"), [(hvd.Average, 2.0), (hvd.Sum, 6.0)])
def test_allreduce_has_a_gradient_and_keeps_its_input(world: Any, op: int, gradient: float) -> None:
    def work(world: World) -> Any:
        hvd.init()
        value = torch.full((2,), float(world.rank()), requires_grad=True)
        (hvd.allreduce(value, op=op) * (world.rank() + 1)).sum().backward()
        return value.tolist(), value.grad.tolist()  # type: ignore[union-attr]

    assert world.run(work) == [([float(rank)] * 2, [gradient] * 2) for rank in range(3)]


def test_joined_ranks_count_as_zeros(world: Any) -> None:
    """Rank r has r batches; each gets the average over all ranks, and who joined last."""

    def work(world: World) -> Any:
        hvd.init()
        averages = [hvd.allreduce(torch.ones(1), name=f"batch {number}").item() for number in range(world.rank())]
        return averages, hvd.join(), hvd.join()

    third = pytest.approx(1 / 3)
    assert world.run(work) == [([], 2, 2), ([pytest.approx(2 / 3)], 2, 2), ([pytest.approx(2 / 3), third], 2, 2)]


BETWEEN_RANKS: dict[str, tuple[Call, str]] = {
    "shapes": (
        lambda r: hvd.allreduce(torch.ones(3 + r), name="grad"),
        r"hvd.allreduce 'grad': rank 0 passed Average of torch.float32 of shape \(3,\), rank 1 .*shape \(4,\)",
    ),
    "as many elements": (lambda r: hvd.allreduce(torch.ones((6,) if r else (2, 3))), r"shape \(2, 3\), rank 1 passed "),
    "dtypes": (lambda r: hvd.allreduce(torch.ones(2, dtype=torch.float64 if r else None)), "rank 1 passed .*float64"),
    "operations": (lambda r: hvd.allreduce(torch.ones(2), op=hvd.Sum if r else hvd.Average), "rank 1 passed Sum"),
    "names": (
        lambda r: hvd.allreduce(torch.ones(2), name=f"by {min(r, 1)}"),
        "rank 0 called hvd.allreduce 'by 0', rank 1 called hvd.allreduce 'by 1'. Make the same calls in the same order",
    ),
    "roots": (lambda r: hvd.broadcast(torch.ones(2), r), "with root rank 0, rank 1 passed .* with root rank 1"),
    "columns": (lambda r: hvd.allgather(torch.ones(2, 2 + r)), r"shape \(any, 2\), rank 1 passed .*\(any, 3\)"),
    "columns of alltoall": (lambda r: hvd.alltoall(torch.ones(3, 2 + r)), r"shape \(any, 2\), rank 1 passed "),
    "parameters": (
        lambda r: hvd.broadcast_parameters({"a": torch.ones(1), "b": torch.ones(1 + r)}, 0),
        r"hvd.broadcast_parameters: rank 0 passed b: torch.float32 of shape \(1,\).*, rank 1 passed b: .*shape \(2,\)",
    ),
    "collectives": (
        lambda r: hvd.allreduce(torch.ones(2)) if r else hvd.broadcast_object(1),
        "rank 0 called hvd.broadcast_object, rank 1 called hvd.allreduce",
    ),
    "a joined rank": (
        lambda r: hvd.join() if r == 2 else hvd.allgather(torch.ones(2)),
        r"hvd.allgather: rank 2 called hvd.join\(\), and only hvd.allreduce works then",
    ),
}


@pytest.mark.parametrize("what", BETWEEN_RANKS)
def test_every_rank_gets_an_error_if_calls_differ(world: Any, what: str) -> None:
    call, pattern = BETWEEN_RANKS[what]

    def work(world: World) -> Any:
        hvd.init()
        problem: Any = None
        try:
            call(world.rank())
        except hvd.HorovodInternalError as error:
            problem = str(error)
        if what == "a joined rank" and world.rank() < 2:
            hvd.join()
        return problem, hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item()

    for rank, (problem, total) in enumerate(world.run(work)):
        assert total == 3.0
        if what == "a joined rank" and rank == 2:
            assert problem is None
        else:
            assert problem is not None
            assert re.search(pattern, problem), problem


ALONE: dict[str, tuple[Call, type[Exception], str]] = {
    "a list": (lambda r: hvd.allreduce([1.0]), ValueError, "needs a torch.Tensor"),  # type: ignore[arg-type]
    "sparse": (lambda r: hvd.allreduce(torch.eye(2).to_sparse()), ValueError, r"pass tensor.to_dense\(\)"),
    "booleans": (lambda r: hvd.allreduce(torch.ones(2).bool()), ValueError, "cannot average booleans"),
    "both": (lambda r: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), ValueError, "supersedes average"),
    "no op": (lambda r: hvd.allreduce(torch.ones(2), op=17), ValueError, "op must be .* got 17"),
    "scalar rows": (lambda r: hvd.allgather(torch.tensor(1.0)), ValueError, r"use tensor.reshape\(1\)"),
    "gradient": (lambda r: hvd.allgather(torch.ones(1, requires_grad=True)), NotImplementedError, "no gradient here"),
    "uneven": (lambda r: hvd.alltoall(torch.ones(4)), ValueError, "4 rows without splits"),
    "splits": (lambda r: hvd.alltoall(torch.ones(2), [1, 1, 1]), ValueError, "splits must be 3 integers"),
    "float splits": (lambda r: hvd.alltoall(torch.ones(3), torch.ones(3)), ValueError, "splits must be 3 integers"),
    "root": (lambda r: hvd.broadcast(torch.ones(2), 3), ValueError, "root_rank=3: must be from 0 to 2"),
    "parameters": (lambda r: hvd.broadcast_parameters(5, 0), ValueError, "invalid params of type"),  # type: ignore[arg-type]
    "no tensor": (lambda r: hvd.broadcast_parameters({"a": 1}, 0), ValueError, "a is not a tensor"),
    "predivide": (
        lambda r: hvd.DistributedOptimizer(optimizer(), op=hvd.Sum, gradient_predivide_factor=2.0),
        ValueError,
        "not supported with op != Average",
    ),
    "passes": (lambda r: hvd.DistributedOptimizer(optimizer(), backward_passes_per_step=0), ValueError, "must be > 0"),
}


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def test_bad_input_raises_before_communication(world: Any) -> None:
    def work(world: World) -> list[Any]:
        hvd.init()
        problems = []
        for call, kind, pattern in ALONE.values():
            try:
                problems.append(f"gave {call(world.rank())}")
            except Exception as error:
                fits = isinstance(error, kind) and re.search(pattern, str(error))
                problems.append(None if fits else f"{type(error).__name__}: {error}")
            assert hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum).item() == 3.0
        return problems

    for problems in world.run(work):
        assert {name: problem for name, problem in zip(ALONE, problems, strict=True) if problem} == {}


def test_calls_before_init_raise(world: Any) -> None:
    calls: list[Callable[[], Any]] = [
        hvd.size,
        hvd.local_rank,
        hvd.join,
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.DistributedOptimizer(optimizer()),
    ]

    def work(world: World) -> Any:
        hvd.shutdown()
        for call in calls:
            with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)\."):
                call()
        return hvd.is_initialized()

    assert world.run(work) == [False] * 3


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("Adasum", "hvd.Average"),
        ("ProcessSet", "torch.distributed.new_group"),
        ("SyncBatchNorm", "axon_nb.parallel.SyncBatchNorm"),
        ("allreduce_async_", "torch.distributed.all_reduce"),
        ("elastic", "%distributed repair"),
        ("grouped_allgather_async", "torch.distributed.all_gather"),
        ("grouped_reducescatter", "torch.distributed.reduce_scatter_tensor"),
        ("nccl_built", "torch.distributed.get_backend"),
        ("sparse_allreduce_async", "to_dense"),
        ("synchronize", "torch.distributed.all_reduce"),
    ],
)
def test_unsupported_names_suggest_torch_calls(name: str, instead: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"hvd\.{name} is not offered here: use .*{instead}"):
        getattr(hvd, name)
    with pytest.raises(AttributeError, match="has no attribute 'allreduc'"):
        hvd.allreduc  # noqa: B018


pytestmark = pytest.mark.timeout(600)

SIZE = 12
"""Samples of a batch, 4 for each rank."""

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "tests/compat/horovod_digits.py"
LIMIT_S = 400

FAILING = """
import torch
import axon_nb.compat.horovod as hvd
hvd.init()
hvd.allreduce(torch.ones(100))
if hvd.rank() == 1:
    raise ValueError("a bug of the user's")
hvd.allreduce(torch.ones(3))
"""


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(model: nn.Module, optimizer: Any, samples: slice, *, pieces: int = 1) -> list[torch.Tensor]:
    """Return the parameters after 3 steps on a part of each batch, in so many pieces."""
    x, y = (part[samples] for part in batch(SIZE))
    for step in range(3):
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            (loss_of(model(inputs * (step + 1)), targets) / pieces).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


class SinglePrecision(hvd.Compressor):
    """A user's compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.float(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


OPTIONS: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any], float]] = {
    "sgd": (sgd, {}, 1e-12),
    "adam": (adam, {}, 1e-9),
    "sum": (sgd, {"op": hvd.Sum}, 1e-12),
    "predivided": (sgd, {"gradient_predivide_factor": 4.0}, 1e-12),
    "passes": (sgd, {"backward_passes_per_step": 2}, 1e-12),
    "fp16": (sgd, {"compression": hvd.Compression.fp16}, 5e-3),
    "compressor": (sgd, {"compression": SinglePrecision}, 1e-5),
    "no names": (sgd, {"named_parameters": None}, 1e-12),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_ranks_train_as_one_process(world: Any, what: str) -> None:
    make, options, tolerance = OPTIONS[what]

    def work(world: World) -> Any:
        hvd.init()
        torch.manual_seed(world.rank())
        model = blocks()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)  # another start on each rank
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        plain = make(model)
        if options.get("op") == hvd.Sum:
            plain.param_groups[0]["lr"] /= hvd.size()
        optimizer = hvd.DistributedOptimizer(plain, **{"named_parameters": model.named_parameters(), **options})
        assert isinstance(optimizer, type(plain))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        samples = slice(4 * world.rank(), 4 * world.rank() + 4)
        return start, trained(model, optimizer, samples, pieces=options.get("backward_passes_per_step", 1))

    answers = world.run(work)
    reference = blocks()
    with torch.no_grad():
        for parameter, value in zip(reference.parameters(), answers[0][0], strict=True):
            parameter.copy_(value)
    expected = trained(reference, make(reference), slice(None))
    for start, weights in answers:
        for index, value in enumerate(weights):
            assert torch.equal(start[index], answers[0][0][index])
            assert torch.equal(value, answers[0][1][index])
            torch.testing.assert_close(value, expected[index], rtol=tolerance, atol=tolerance)


def test_differing_graphs_and_joined_ranks(world: Any) -> None:
    """Gradients that a rank has not computed count as zeros; so do those of a rank that has joined."""

    def work(world: World) -> Any:
        hvd.init()
        layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
        for layer in layers:
            nn.init.zeros_(layer.weight)
        plain = torch.optim.SGD(layers.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(plain, layers.named_parameters())
        if world.rank() < 2:
            layers[world.rank()](torch.full((1, 1), 3.0)).sum().backward()
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(layers.state_dict(), root_rank=0)
        return [layer.weight.item() for layer in layers]

    assert world.run(work) == [[-1.0, -1.0]] * 3


def test_sparse_gradients_are_summed(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        model = nn.Embedding(4, 1, sparse=True)
        nn.init.zeros_(model.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=3.0), model.named_parameters())
        model(torch.tensor([world.rank(), 3])).sum().backward()
        optimizer.step()
        return model.weight.flatten().tolist()

    assert world.run(work) == [[-1.0, -1.0, -1.0, -3.0]] * 3


def test_synchronize_clip_and_step(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
        model(torch.full((1, 2), 3.0 * world.rank())).sum().backward()
        optimizer.synchronize()
        assert torch.equal(model.weight.grad, torch.full((1, 2), 3.0))  # type: ignore[arg-type]
        model.weight.grad.fill_(0.25 if world.rank() else 0.5)  # type: ignore[union-attr]
        with optimizer.skip_synchronize():
            optimizer.step()
        return model.weight.tolist()

    assert world.run(work) == [[[0.5, 0.5]], [[0.75, 0.75]], [[0.75, 0.75]]]


def test_state_schedulers_closures_and_wrapping_twice(world: Any) -> None:
    def work(world: World) -> Any:
        hvd.init()
        model = blocks(1)
        x, y = (part.chunk(3)[world.rank()] for part in batch(SIZE))
        plain = torch.optim.Adam(model.parameters(), lr=0.1 * (world.rank() + 1))
        if world.rank() == 0:
            loss_of(model(x), y).backward()
            plain.step()
        hvd.broadcast_parameters(list(model.parameters()), root_rank=0)
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # a cell that is run again
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
        closure()
        optimizer.step()
        bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer.add_param_group({"params": [bias], "lr": 0.05})
        optimizer.zero_grad()
        ((loss_of(model(x), y) + bias) * (world.rank() + 1)).sum().backward()
        optimizer.step()
        steps = {int(state["step"]) for state in optimizer.state_dict()["state"].values()}
        values = [*(parameter.detach().clone() for parameter in model.parameters()), bias.detach().clone(), bias.grad]
        return values, optimizer.param_groups[0]["lr"], steps

    answers = world.run(work)
    for values, rate, steps in answers:
        assert rate == pytest.approx(0.05)
        assert steps == {4, 1}
        assert values[-1].item() == 2.0
        assert all(torch.equal(value, other) for value, other in zip(values, answers[0][0], strict=True))


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.mark.slow
def test_script_trains_under_torchrun() -> None:
    run = torchrun(SCRIPT, "--epochs=2")
    assert run.returncode == 0, run.stderr[-3000:]
    lines = run.stdout.splitlines()
    weights = [line for line in lines if line.startswith("weights ")]
    assert len(weights) == 2
    assert len(set(weights)) == 1
    accuracies = [float(line.rpartition(" ")[2].rstrip("%")) for line in lines if line.startswith("Test set")]
    assert accuracies[-1] > 70


@pytest.mark.slow
def test_failed_rank_ends_the_torchrun_job(tmp_path: Path) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    run = torchrun(str(script))
    assert run.returncode != 0
    assert "a bug of the user's" in run.stderr


def test_single_process_is_a_world_of_one() -> None:
    code = (
        "import torch, axon_nb.compat.horovod as hvd\nhvd.init()\nprint(hvd.rank(), hvd.size(), hvd.local_rank())\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())\n"
        "hvd.broadcast_parameters(model.state_dict(), 0)\nmodel(torch.ones(1, 2)).sum().backward()\noptimizer.step()\n"
        "print(hvd.allreduce(torch.tensor([2.0])).item(), hvd.broadcast_object('x'), hvd.join())"
    )
    hidden = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "PMI_RANK", "OMPI_COMM_WORLD_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (run.returncode, run.stdout.splitlines()) == (0, ["0 1 0", "2.0 x 0"]), run.stderr
