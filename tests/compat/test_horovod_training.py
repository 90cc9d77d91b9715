"""Training with DistributedOptimizer, and a published script's shape under torchrun."""

from __future__ import annotations

import os
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
from tests.support.training.models import batch, blocks, loss_of

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
