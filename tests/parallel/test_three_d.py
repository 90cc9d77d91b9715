"""Pipeline x FSDP x tensor parallelism on 8 ranks equals one process over several optimizer steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from axon_nb.comm import World
from axon_nb.errors import UsageError
from axon_nb.parallel import Parallel3D, coordinates, make_mesh
from axon_nb.parallel.models import GPT, GPTConfig, next_byte_loss
from axon_nb.records import spans as trace
from tests.parallel.conftest import make

CONFIG = GPTConfig(context=8, hidden=16, heads=2, blocks=5)
STEPS, BATCH, MAX_NORM = 4, 16, 0.3


def plan() -> dict[str, Any]:
    """Return the tensor-parallel plan for the blocks of a GPT."""
    cut = {f"block*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    ends: dict[str, Any] = {"block*.attention.out": RowwiseParallel(), "block*.down": RowwiseParallel()}
    return cut | ends | {"block*.up": ColwiseParallel()}


def build(seed: int = 4) -> GPT:
    """A GPT in double precision."""
    torch.manual_seed(seed)
    return GPT(CONFIG).double()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step."""
    tokens = torch.randint(256, (BATCH, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def alone(max_norm: float = math.inf) -> tuple[list[float], list[float], GPT]:
    """Losses, norms of the gradients and model of one process."""
    model, losses, norms = build(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = data(step)
        loss = next_byte_loss(model(x), y)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def train(world: World, axes: dict[str, int], schedule: str, microbatches: int) -> Any:
    """Do the same as one rank of a mesh; replicas start with different weights, which must not matter."""
    mesh = make_mesh(**axes, device="cpu")
    place = coordinates(mesh)
    model = Parallel3D(
        build(4 + place.get("dp", 0) + place.get("tp", 0)),
        mesh,
        tp_plan=plan(),
        schedule=schedule,
        num_microbatches=microbatches,
        loss=next_byte_loss,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = map(model.local_batch, data(step))
        losses.append(model.mean_loss(model.step(x, y)))
        if step == 1:
            model(x)  # a forward between steps changes nothing
        norms.append(model.clip_grad_norm(MAX_NORM))
        optimizer.step()
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    whole = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}
    x, _ = map(model.local_batch, data(0))
    return losses, norms, whole, held, model(x)


@pytest.mark.parametrize(
    ("axes", "schedule", "microbatches"),
    [
        ({"pp": 2, "dp": 2, "tp": 2}, "1F1B", 4),
        pytest.param({"dp": 2, "pp": 4}, "GPipe", 2, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2, "tp": 2}, "Interleaved1F1B", 4, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2, "tp": 2}, "ZBVZeroBubble", 4, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2, "dp": 2}, "DualPipeV", 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_axes_train_as_one_process(
    process_worlds: Any, axes: dict[str, int], schedule: str, microbatches: int
) -> None:
    expected, expected_norms, model = alone(MAX_NORM)
    assert min(expected_norms) > MAX_NORM
    world = make("ranks-8", process_worlds)
    world.run(lambda _: Parallel3D)  # eight imports on two cores take a while
    answers = world.run(train, axes, schedule, microbatches)
    seen = set()
    for losses, norms, whole, held, output in answers:
        assert losses == pytest.approx(expected, rel=1e-10)
        assert norms == pytest.approx(expected_norms, rel=1e-9)
        for name, value in whole.items():
            torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-9, atol=1e-11)
            seen.add(name)
        assert held < 0.6 * sum(p.numel() for p in model.parameters())
        if output is not None:
            assert output.shape == (BATCH // axes["dp"], 8, 256)
    assert seen == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("four", ["ranks-4", pytest.param("mock-4", marks=pytest.mark.slow)], indirect=True)
def test_gradients_add_up_and_batches_may_change(four: Any) -> None:
    """The first step with new shapes runs an extra microbatch, after which torch drops gradients of FSDP2."""
    sizes = (8, 8, 16)

    def work(world: World) -> Any:
        model = Parallel3D(build(), make_mesh(pp=2, dp=2, device="cpu"), num_microbatches=2, loss=next_byte_loss)
        for number, rows in enumerate(sizes):
            x, y = (model.local_batch(part[:rows]) for part in data(number))
            model.step(x, y)
        return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    model = build()
    for number, rows in enumerate(sizes):
        x, y = (part[:rows] for part in data(number))
        next_byte_loss(model(x), y).backward()
    for gradients in four.run(work):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.parametrize("four", ["ranks-4"], indirect=True)
def test_gathered_and_freed_parameters_and_reduced_gradients_are_recorded(four: Any, schedule: str) -> None:
    def work(world: World) -> Any:
        mesh = make_mesh(pp=2, dp=2, device="cpu")
        model = Parallel3D(build(), mesh, num_microbatches=4, schedule=schedule, loss=next_byte_loss)
        for step in range(2):
            position = trace.ring.position
            model.step(*map(model.local_batch, data(step)))
        spans = [span for span in trace.ring.since(position)[0] if span.stage >= 0 and span.kind != "p2p"]
        assert {span.rank for span in spans} == {world.rank()}
        stages = model.pipeline.stage_indices
        return {stage: [span.name for span in spans if span.stage == stage] for stage in stages}

    for stages in four.run(work):
        assert len(stages) == (1 if schedule == "1F1B" else 2)
        for names in stages.values():
            computed = [name for name in names if len(name) == 1]
            assert sorted(computed) == ["B"] * 4 + ["F"] * 4
            if schedule == "1F1B":  # torch gathers in the first forward, and has no actions for it
                assert names == [*computed, "REDUCE_GRAD"]
            else:
                assert names[:2] == ["UNSHARD", "F"]
                assert {"REDUCE_GRAD", "UNSHARD"} <= set(names) - {"RESHARD", "WAIT_REDUCE_GRAD"} - set(computed)
                assert names.count("REDUCE_GRAD") == 1
                assert names[-1] not in computed


@pytest.mark.parametrize("four", ["mock-4", pytest.param("ranks-4", marks=pytest.mark.slow)], indirect=True)
def test_in_bfloat16(four: Any) -> None:
    """Losses of the first steps within 2 % of those in single precision."""

    def work(world: World) -> Any:
        mesh = make_mesh(pp=2, dp=2, device="cpu")
        model = Parallel3D(
            build().float(), mesh, num_microbatches=4, loss=next_byte_loss, mixed_precision=torch.bfloat16
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            losses.append(model.mean_loss(model.step(*map(model.local_batch, data(step)))))
            optimizer.step()
        output = model(model.local_batch(data(0)[0]))
        return losses, {p.dtype for p in model.parameters()}, None if output is None else output.dtype

    expected, _, _ = alone()
    for rank, (losses, dtypes, output) in enumerate(four.run(work)):
        assert losses == pytest.approx(expected, rel=0.02)
        assert dtypes == {torch.float32}
        assert output == (torch.bfloat16 if rank >= 2 else None)


@pytest.mark.parametrize("two", ["mock-2", pytest.param("ranks-2", marks=pytest.mark.slow)], indirect=True)
def test_invalid_meshes_raise(two: Any) -> None:
    def reported(call: Any) -> str:
        try:
            call()
        except UsageError as error:
            return str(error)
        return ""

    def work(world: World) -> list[str]:
        model, mesh = build(), make_mesh(pp=2, device="cpu")
        flat = Parallel3D(model, mesh, loss=next_byte_loss)
        return [
            reported(lambda: Parallel3D(model, make_mesh(dp=2, device="cpu"))),
            reported(lambda: Parallel3D(model, make_mesh(pp=1, tp=2, device="cpu"))),
            reported(lambda: Parallel3D(model, mesh, tp_plan={"block*.gate": ColwiseParallel()})),
            reported(lambda: Parallel3D(model, make_mesh(pp=1, dp=2, device="cpu")).local_batch(torch.ones(5))),
            reported(lambda: Parallel3D(model, mesh, mixed_precision=torch.bfloat16)),
            str(flat.local_batch(torch.ones(5)).shape),
        ]

    for texts in two.run(work):
        assert texts[0].startswith("The mesh must have the axis pp, and optionally dp and tp")
        assert texts[1].startswith("tp=2 needs tp_plan, the layers to shard")
        assert texts[2] == "tp_plan['block*.gate'] matches no module of the model."
        assert texts[3] == "The batch size must be divisible by dp (2); got 5."
        assert texts[4].startswith("mixed_precision=torch.bfloat16 needs dp=2 or more, as FSDP implements it")
        assert texts[5] == "torch.Size([5])"
