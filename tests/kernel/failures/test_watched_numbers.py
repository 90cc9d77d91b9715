"""`config watch_numbers`: flipped bits and numbers that are not finite are named, and right programs raise no alarm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import Kernel

PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "watched.py"
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
MAKES = {"ddp": "ddp()", "hsdp": "hsdp()", "tensor": "tensor_parallel()"}
WITH_REPLICAS = {"ddp": range(6), "hsdp": range(6), "tensor": (0, 1, 5)}
FOUND = "(lambda f: f and (f.problem, f.stage, f.name, f.ranks, f.step, f.operation, f.where))(watched.numbers.finding)"


@pytest.fixture
def programs(kernel: Kernel) -> Iterator[Kernel]:
    """The kernel, whose ranks can make the programs, and whose cells are watched."""
    kernel.ok(f"%%distributed\n{PROGRAM.read_text(encoding='utf-8')}")
    kernel.ok("%distributed config watch_numbers=on")
    yield kernel
    kernel.ok("%distributed config watch_numbers=off")


def found(kernel: Kernel, cell: str) -> Any:
    """What was found first in a cell."""
    kernel.ok(f"%%distributed --out watched\n_ = {cell}")
    return kernel.value(FOUND)


def train(kernel: Kernel, program: str, fault: tuple[Any, ...]) -> Any:
    """What was found in one training, in whose steps a fault is planted."""
    kernel.ok(f"%%distributed\nmodel = {MAKES[program]}")
    return found(kernel, f"train(model, {fault!r})")


def partners(program: str, rank: int) -> tuple[int, ...]:
    """The ranks of which one is wrong, as far as it can be seen: two replicas may both be wrong."""
    return tuple(sorted((rank, (rank + 2) % 4))) if program == "hsdp" else (rank,)


@pytest.mark.parametrize("program", MAKES)
def test_flipped_bit_of_a_weight_is_named_with_rank_and_step(programs: Kernel, program: str) -> None:
    problem, stage, name, ranks, step, *_ = train(programs, program, ("weight", 2, 3, 1, 5, 4))
    assert (problem, stage, name, ranks, step) == ("differs", "weight", "0.bias", partners(program, 2), 3)


def test_flipped_bit_of_a_gradient_is_named_with_its_line(programs: Kernel) -> None:
    problem, stage, name, ranks, step, _, where = train(programs, "ddp", ("gradient", 1, 2, 2, 17, 0))
    assert (problem, stage, name, ranks, step) == ("differs", "gradient", "1.weight", (1,), 2)
    assert where.startswith("line 2 (train, ")


def test_report_says_what_differs_and_what_to_do(programs: Kernel) -> None:
    reply = programs.ok("%%distributed\n_ = train(ddp(), ('weight', 3, 1, 0, 0, 3))")
    (bundle,) = (bundle for bundle in reply.displays if "text/html" in bundle)
    assert (
        "The weight of 0.weight on rank 3 differs from that on ranks 0-2 after step 1 (line 2" in bundle["text/plain"]
    )
    assert "Run `%distributed sync` to copy models and optimizers from rank 0" in bundle["text/plain"]
    assert "Numbers of all ranks" in bundle["text/html"]


def test_origin_of_a_number_that_is_not_finite_is_named_with_module_and_function(programs: Kernel) -> None:
    problem, stage, name, ranks, step, operation, where = train(programs, "ddp", ("forward nan", 1, 2, 0, 0, 0))
    assert (problem, stage, name, ranks, step, operation) == ("not finite", "forward", "2", (1,), 2, "sqrt")
    assert where.startswith("forward, ")


def test_stop_ends_the_cell_before_the_weights_are_updated(programs: Kernel) -> None:
    programs.ok("%distributed config watch_numbers=stop")
    programs.ok("%%distributed\nmodel = ddp()")
    reply = programs.run("%%distributed\n_ = train(model, ('loss nan', 2, 3, 0, 0, 0), steps=1000)")
    assert "The loss is the first number that is not finite, on rank 2, in step 4 (line 2" in reply.traceback
    assert "run it again from this step" in reply.traceback
    finite = "all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())"
    assert programs.ok(f"%%distributed\n{finite}").lines() == ["[ranks 0-3] True"]
    programs.ok("%%distributed\nmodel = ddp()")
    reply = programs.run("%%distributed\n_ = train(model, ('weight', 0, 3, 4, 9, 1), steps=100_000)")
    assert "The weight of 3.weight on rank 0 differs from that on ranks 1-3 after step 3" in reply.traceback


@pytest.mark.parametrize("make", ["hsdp()", "tensor_parallel()"])
def test_ranks_of_a_split_model_repeat_its_forward_together(programs: Kernel, make: str) -> None:
    programs.ok("%distributed config watch_numbers=stop")
    programs.ok(f"%%distributed\nmodel = {make}")
    reply = programs.run("%%distributed\n_ = train(model, ('forward nan', 2, 3, 0, 0, 0))")
    assert "The output of 2 (Root) is the first number that is not finite, on rank 2, in step 4" in reply.traceback
    assert "computed by sqrt" in reply.traceback
    programs.ok("%distributed config watch_numbers=on")
    assert "are finite" in programs.ok(f"%%distributed\n_ = train({make})").stdout


RIGHT = {
    "program of the table": "_ = train({make})",
    "unequal batches": "_ = train(ddp(), batch=lambda step: 1 + (rank + step) % 3)",
    "one step": "_ = train(ddp(), steps=1)",
    "dropout and BatchNorm": (
        "model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), "
        "broadcast_buffers=False)\ntorch.manual_seed(rank)\n_ = train(model)"
    ),
    "gradient accumulation": (
        "model = ddp()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(6):\n"
        "    with model.no_sync() if step % 3 < 2 else __import__('contextlib').nullcontext():\n"
        "        model(torch.randn(4, WIDTH) + rank).square().mean().backward()\n"
        "    if step % 3 == 2:\n        optimizer.step()\n        optimizer.zero_grad()"
    ),
    "parameters of the rank": (
        "torch.manual_seed(rank)\nmodel = nn.Linear(8, 8)\nopt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n    model(torch.randn(4, 8)).square().mean().backward()\n    opt.step()"
    ),
    "ignored parameters": (
        "torch.manual_seed(0)\nmodel = plain_model()\n"
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ['3.bias'])\n"
        "_ = train(DistributedDataParallel(model))"
    ),
    "mask with infinity": (
        "model = DistributedDataParallel(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))\n"
        "opt = torch.optim.SGD(model.parameters(), 0.1)\n"
        "mask = torch.full((4, 4), float('-inf')).triu(1)\n"
        "for _ in range(3):\n    model(torch.randn(2, 4, 8), src_mask=mask).mean().backward()\n    opt.step()"
    ),
    "scaler that overflows": (
        "model = ddp()\nopt = torch.optim.Adam(model.parameters(), fused=True)\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**127)\n"
        "for _ in range(3):\n    scaler.scale(model(torch.randn(4, WIDTH)).square().mean()).backward()\n"
        "    scaler.step(opt)\n    scaler.update()\n    opt.zero_grad()"
    ),
    "two optimizers": (
        "one, two = ddp(), ddp()\nopts = [torch.optim.SGD(m.parameters(), 0.1) for m in (one, two)]\n"
        "for step in range(4):\n    two(one(torch.randn(4, WIDTH) + rank)).mean().backward()\n"
        "    for opt in opts:\n        opt.step()\n        opt.zero_grad()"
    ),
}


@pytest.mark.parametrize("program", RIGHT)
def test_right_program_raises_no_alarm(programs: Kernel, program: str) -> None:
    cells = [RIGHT[program]]
    if "{make}" in cells[0]:
        cells = [cells[0].format(make=make) for make in MAKES.values()]
    for cell in cells:
        reply = programs.ok(f"%%distributed --out watched\n{cell}")
        assert "all gradients and losses are finite." in reply.stdout
        assert programs.value("watched.numbers.finding is None")


@pytest.mark.slow
@pytest.mark.parametrize("program", MAKES)
def test_random_flipped_bits_are_found(programs: Kernel, program: str) -> None:
    drawn, missed, count = random.Random(18), [], {"ddp": 50, "hsdp": 30, "tensor": 20}[program]
    for _ in range(count):
        rank, step, index = drawn.randrange(4), drawn.randrange(5), drawn.choice(list(WITH_REPLICAS[program]))
        stage, element, bit = drawn.choice(["weight", "gradient"]), drawn.randrange(64), drawn.randrange(32)
        answer = train(programs, program, (stage, rank, step, index, element, bit))
        expected = ("differs", stage, NAMES[index], partners(program, rank), step)
        is_right = answer is not None and answer[:5] == expected
        print(f"| {program} | {stage} of {NAMES[index]}, rank {rank}, step {step}, bit {bit} | {answer} | {is_right} |")
        missed += [] if is_right else [(expected, element, bit, answer)]
    assert len(missed) <= 0.05 * count, missed


NANS = [
    *(("ddp", kind, rank) for kind in ("weight", "input", "forward", "loss", "gradient") for rank in (0, 2, 3)),
    *(("hsdp", kind, 1) for kind in ("weight", "loss", "gradient")),
    *(("tensor", kind, 3) for kind in ("weight", "gradient")),
]


@pytest.mark.slow
def test_numbers_that_are_not_finite_are_found(programs: Kernel) -> None:
    drawn, missed = random.Random(19), []
    for program, kind, rank in NANS:
        step, index = drawn.randrange(5), drawn.choice(list(WITH_REPLICAS[program]))
        answer = train(programs, program, (f"{kind} nan", rank, step, index, 0, 0))
        name = {"weight": NAMES[index], "gradient": NAMES[index], "forward": "2"}.get(kind, "")
        expected = ("not finite", kind, name, (rank,), step)
        print(f"| {program} | {kind}, rank {rank}, step {step} | {answer} |")
        missed += [] if answer is not None and answer[:5] == expected else [(program, expected, answer)]
    assert len(NANS) == 20
    assert not missed
