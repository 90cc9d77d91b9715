"""Exercise 9.2: which visits an expert has room for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm.calls import calls

_EXPERTS = 4


def _on_rank(answer: Any, choices: list[torch.Tensor], experts: int, factor: float) -> tuple[Any, int]:
    with calls() as counted:
        kept = answer(choices[dist.get_rank()], experts, factor)
    return kept, counted.num_calls


def _kept(choice: torch.Tensor, experts: int, capacity: int) -> torch.Tensor:
    """Which visits are kept: the first `capacity` of each expert."""
    seen = [0] * experts
    kept = []
    for expert in choice.tolist():
        seen[expert] += 1
        kept.append(seen[expert] <= capacity)
    return torch.tensor(kept, dtype=torch.bool)


def _right(choice: torch.Tensor, factor: float, experts: int = _EXPERTS) -> torch.Tensor:
    return _kept(choice, experts, math.ceil(factor * len(choice) / experts))


def _compare(
    trial: Trial,
    choices: list[torch.Tensor],
    factor: float,
    expected: Callable[[torch.Tensor, float], torch.Tensor] = _right,
) -> str | None:
    found = [kept for kept, _ in trial.run(_on_rank, choices, _EXPERTS, factor)]
    case = f"visits to {choices[0].tolist()}, {_EXPERTS} experts, factor {factor:g}"
    return first_difference(found, [expected(choice, factor) for choice in choices], case)


def _everywhere(trial: Trial, *choice: int) -> list[torch.Tensor]:
    return [torch.tensor(choice)] * trial.ranks


def _random(trial: Trial) -> list[torch.Tensor]:
    """Different visits on each rank, with a favourite."""
    generator = trial.generator("visits")
    draws = [torch.randint(0, 2 * _EXPERTS, (6 * _EXPERTS,), generator=generator) for _ in range(trial.ranks)]
    return [torch.where(draw < _EXPERTS, draw, 1) for draw in draws]


def _even(trial: Trial) -> str | None:
    return _compare(trial, _everywhere(trial, 3, 1, 0, 2), 1.0)


def _first_come(trial: Trial) -> str | None:
    return _compare(trial, _everywhere(trial, 0, 0, 3, 0), 1.0) or _compare(trial, _random(trial), 1.0)


def _rounded_up(trial: Trial) -> str | None:
    return _compare(trial, _everywhere(trial, 2, 2, 2, 2, 2), 1.0)


def _factors(trial: Trial) -> str | None:
    return next(filter(None, (_compare(trial, _random(trial), factor) for factor in (0.5, 1.25, 2.0))), None)


def _alone(trial: Trial) -> str | None:
    counts = [number for _, number in trial.run(_on_rank, _random(trial), _EXPERTS, 1.0)]
    rank = next((rank for rank, number in enumerate(counts) if number), None)
    return None if rank is None else f"rank {rank} made {counts[rank]} calls; its own visits are enough to decide"


def _makes(trial: Trial, expected: Callable[[torch.Tensor, float], torch.Tensor]) -> bool:
    """Whether the answer is everywhere as a wrong rule says, and this differs from what is right."""
    cases = [
        (_everywhere(trial, 2, 2, 2, 2, 2), 1.0),
        *((_random(trial), factor) for factor in (0.5, 1.0, 1.25, 2.0)),
    ]
    return all(_compare(trial, choices, factor, expected) is None for choices, factor in cases)


def _down(choice: torch.Tensor, factor: float) -> torch.Tensor:
    return _kept(choice, _EXPERTS, int(factor * len(choice) / _EXPERTS))


def _last(choice: torch.Tensor, factor: float) -> torch.Tensor:
    return _right(choice.flip(0), factor).flip(0)


def _all_or_none(choice: torch.Tensor, factor: float) -> torch.Tensor:
    fits = torch.bincount(choice, minlength=_EXPERTS) <= math.ceil(factor * len(choice) / _EXPERTS)
    return fits[choice]


def _no_factor(choice: torch.Tensor, factor: float) -> torch.Tensor:
    return _right(choice, 1.0)


CAPACITY = Exercise(
    id="9.2",
    title="A limit of seats",
    answer="within_capacity",
    properties=(
        Property("an even queue loses nobody", _even),
        Property("first come, first kept", _first_come),
        Property("the number of seats is rounded up", _rounded_up),
        Property("other factors", _factors),
        Property("each rank decides alone", _alone),
    ),
    mistakes=(
        Mistake(
            "The number of seats is rounded down: a few tokens are sent away although there was room.",
            lambda trial: _makes(trial, _down),
        ),
        Mistake("Those who came last were kept. It is first come, first kept.", lambda trial: _makes(trial, _last)),
        Mistake(
            "An expert with too many visits lost all of them. It keeps as many as it has seats.",
            lambda trial: _makes(trial, _all_or_none),
        ),
        Mistake("The factor makes no difference.", lambda trial: _makes(trial, _no_factor)),
    ),
    hints=(
        "How many seats has each expert? And for each visit: how many came to the same expert before it?",
        (
            "`F.one_hot(choice, num_experts)` is a table with a row per visit and a column per expert. What does "
            "`.cumsum(dim=0)` say in each column?"
        ),
        (
            "`seats = math.ceil(factor * len(choice) / num_experts)`. With `table = F.one_hot(choice, num_experts)`, a"
            " visit's place in its queue is `(table.cumsum(0) * table).sum(1)`, from 1 on."
        ),
    ),
)
