"""Exercise 11.2: a step that all ranks make, or none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import first_difference, shown
from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_calls
from axon_course.trials import Trial
from axon_nb.comm.calls import calls

_TOLERANCE = 1e-9
_WIDTH = 3
Steps = list[list[float]]
"""For each step what the loss of each rank is multiplied by: 1 if all is well, else nan or inf."""


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(_WIDTH, 1).double()
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            weight.fill_(0.5 + index)
    return model, torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)


def _steps_on_rank(answer: Any, samples: list[torch.Tensor], steps: Steps) -> Any:
    model, optimizer = _model()
    returned = []
    with calls() as counted:
        for factors in steps:
            loss = model(samples[dist.get_rank()]).square().mean() * factors[dist.get_rank()]
            returned.append(answer(loss, model, optimizer))
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return weights, returned, counted.num_calls


def _run(trial: Trial, steps: Steps) -> list[Any]:
    found: list[Any] = trial.run(_steps_on_rank, trial.tensors(2, _WIDTH, text="samples"), steps)
    return found


def _undisturbed(trial: Trial, count: int) -> torch.Tensor:
    """The weights after some good steps of one process."""
    model, optimizer = _model()
    samples = torch.cat(trial.tensors(2, _WIDTH, text="samples"))
    for _ in range(count):
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def _good(trial: Trial) -> list[float]:
    return [1.0] * trial.ranks


def _bad(trial: Trial, rank: int, value: float = float("nan")) -> list[float]:
    return [value if each == rank else 1.0 for each in range(trial.ranks)]


def _weights_equal(trial: Trial, steps: Steps, num_good: int, case: str) -> str | None:
    weights = [entry[0] for entry in _run(trial, steps)]
    return first_difference(weights, [_undisturbed(trial, num_good)] * trial.ranks, case, tolerance=_TOLERANCE)


def _good_steps(trial: Trial) -> str | None:
    return _weights_equal(trial, [_good(trial)], 1, "one good step") or _weights_equal(
        trial, [_good(trial)] * 3, 3, "three good steps"
    )


def _nobody_steps(trial: Trial) -> str | None:
    for rank in range(trial.ranks):
        if sentence := _weights_equal(trial, [_bad(trial, rank)], 0, f"rank {rank}'s loss is nan"):
            return sentence
    return None


def _infinite(trial: Trial) -> str | None:
    return _weights_equal(trial, [_bad(trial, trial.ranks - 1, float("inf"))], 0, "the last rank's loss is inf")


def _all_say_the_same(trial: Trial) -> str | None:
    for rank, (_, returned, _) in enumerate(_run(trial, [_good(trial), _bad(trial, 1 % trial.ranks)])):
        if returned != [True, False] or not all(isinstance(each, bool) for each in returned):
            return f"a good step, then a bad one: rank {rank} returned {shown(returned)}; right is [True, False]"
    return None


def _goes_on(trial: Trial) -> str | None:
    steps = [_good(trial), _bad(trial, 0), _good(trial)]
    return _weights_equal(trial, steps, 2, "a good step, a bad one, a good one")


def _calls_per_step(trial: Trial) -> float:
    return float(max(entry[2] for entry in _run(trial, [_good(trial)] * 4))) / 4


def _is_nan(trial: Trial) -> bool:
    return any(bool(entry[0].isnan().any()) for entry in _run(trial, [_bad(trial, 1 % trial.ranks)]))


def _drifts(trial: Trial) -> bool:
    weights = [entry[0] for entry in _run(trial, [_good(trial)])]
    return any(not torch.equal(each, weights[0]) for each in weights)


def _three_steps(trial: Trial) -> Replay:
    steps = [_good(trial), _bad(trial, 1 % trial.ranks), _good(trial)]
    samples = trial.tensors(2, _WIDTH, text="samples")
    title = f"The calls of three steps; in the second, the loss of rank {1 % trial.ranks} is nan"
    return replay_calls(trial, title, _steps_on_rank, samples, steps)


SAFE_STEP = Exercise(
    id="11.2",
    title="All step, or none",
    answer="safe_step",
    properties=(
        Property("good steps use the mean gradient", _good_steps),
        Property("if one loss is nan, nobody steps", _nobody_steps),
        Property("nor if it is infinite", _infinite),
        Property("True or False, the same on all ranks", _all_say_the_same),
        Property("the step after a bad one is a good one", _goes_on),
    ),
    mistakes=(
        Mistake(
            "The rank with the bad loss leaves alone, and the others wait for it. All ranks must decide together.",
            lambda trial: trial.hangs(
                _steps_on_rank, trial.tensors(2, _WIDTH, text="samples"), [_bad(trial, 1 % trial.ranks)]
            ),
        ),
        Mistake(
            "The nan has travelled: in a sum with it, everything becomes nan, and now all ranks have it.",
            _is_nan,
        ),
        Mistake(
            "Each rank steps by its own gradient, so the copies of the model drift apart.",
            _drifts,
        ),
        Mistake(
            "The gradients of the bad step are still there when the next backward adds to them.",
            lambda trial: not _nobody_steps(trial) and _goes_on(trial) is not None,
        ),
    ),
    hints=(
        "One rank sees the bad loss. What must all the others know before they decide, and how do they get it?",
        (
            "A sum with a nan is nan, and so is a sum with infinity minus infinity. After an `all_reduce`, all ranks "
            "see whether something was wrong, without a second call, if the loss travels with the gradients."
        ),
        (
            "Backward; `flat = torch.cat([*gradients, loss])`; `all_reduce(flat)`; if `flat` is all finite, divide, "
            "put the gradients back and step. In any case zero the gradients, and return whether you have stepped."
        ),
    ),
    score=Score("calls per step", 1, _calls_per_step, _three_steps),
)
