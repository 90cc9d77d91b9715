"""Exercise 12.3: a loop that goes on where it was cut off."""

from __future__ import annotations

import functools
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm import CollectiveMismatchError, DeadlockError
from axon_nb.parallel.checkpoint.folder import CheckpointWarning

_STEPS, _CUT = 4, 2
_SAMPLES = 12
_TOLERANCE = 1e-9

Run = tuple[list[int], Any, torch.Tensor]
"""The steps that a rank has done, what the answer returned (None: it was cut off), and the weights in a row."""


class _PowerCutError(Exception):
    """Cuts a run off."""


def _train_on_rank(answer: Any, folder: str, cut: int | None, steps: int = _STEPS) -> Run:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    done = []

    def one_step(step: int) -> float:
        if step == cut:
            raise _PowerCutError
        x = torch.rand(_SAMPLES, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        loss = (model(mine) - mine.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        done.append(step)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean / dist.get_world_size())

    try:
        losses = (answer or _undisturbed)(model, optimizer, one_step, folder, steps)
    except _PowerCutError:
        losses = None
    return done, losses, torch.cat([weight.detach().flatten() for weight in model.parameters()])


def _undisturbed(_: Any, __: Any, one_step: Any, ___: str, steps: int) -> list[float]:
    return [one_step(step) for step in range(steps)]


def _right_on_rank(_: Any) -> Run:
    return _train_on_rank(None, "", None)


@functools.lru_cache(maxsize=1)
def _right(trial: Trial) -> Run:
    found: Run = trial.run(_right_on_rank)[0]
    return found


@functools.lru_cache(maxsize=2)
def _after_a_cut(trial: Trial, ranks: int | None = None) -> list[Run]:
    """The second run in the same folder, on as many ranks as the first or on fewer."""
    with tempfile.TemporaryDirectory() as folder:
        trial.run(_train_on_rank, folder, _CUT)
        return trial.run(_train_on_rank, folder, None, ranks=ranks)


def _difference(found: list[Run], right: Run, case: str, tolerance: float = 0.0) -> str | None:
    for rank, (_, losses, weights) in enumerate(found):
        if not isinstance(losses, list) or len(losses) != _STEPS:
            count = f"{len(losses)} losses" if isinstance(losses, list) else repr(losses)
            return f"{case}: rank {rank} returned {count}; it must be a list of {_STEPS}"
        for step, (loss, expected) in enumerate(zip(losses, right[1], strict=True)):
            if abs(loss - expected) > tolerance:
                return f"{case}: the loss of step {step} is {loss:.6f}; right is {expected:.6f}"
        if bool(((weights - right[2]).abs() > tolerance).any()):
            return f"{case}: the losses are right, and the last weights of rank {rank} are not"
    return None


@functools.lru_cache(maxsize=1)
def _two_whole_runs(trial: Trial) -> tuple[list[Run], list[Run]]:
    with tempfile.TemporaryDirectory() as folder:
        return trial.run(_train_on_rank, folder, None), trial.run(_train_on_rank, folder, None)


def _without_a_cut(trial: Trial) -> str | None:
    return _difference(_two_whole_runs(trial)[0], _right(trial), "undisturbed")


def _goes_on(trial: Trial) -> str | None:
    for rank, (done, *_) in enumerate(_after_a_cut(trial)):
        if done != list(range(_CUT, _STEPS)):
            words = ", ".join(map(str, done)) or "no steps"
            return f"cut off in step {_CUT}: the second run of rank {rank} did {words}; it must begin with {_CUT}"
    return None


def _same_to_the_last_bit(trial: Trial) -> str | None:
    return _difference(_after_a_cut(trial), _right(trial), f"cut off in step {_CUT}")


def _twice(trial: Trial) -> str | None:
    _, again = _two_whole_runs(trial)
    if again[0][0]:
        return f"all steps are done, and a second run did {again[0][0]} once more"
    return _difference(again, _right(trial), "asked again")


def _on_fewer_ranks(trial: Trial) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)  # random states are new, and nothing here is random
        found = _after_a_cut(trial, trial.ranks // 2)
    return _difference(found, _right(trial), f"{trial.ranks} ranks, then {trial.ranks // 2}", _TOLERANCE)


def _not_all_take_part(trial: Trial) -> bool:
    try:
        _two_whole_runs(trial)
    except (CollectiveMismatchError, DeadlockError):
        return True
    return False


def _second_run(trial: Trial) -> Run:
    return _after_a_cut(trial)[0]


def _only_moments_missing(trial: Trial) -> bool:
    done, losses, _ = _second_run(trial)
    return done == [2, 3] and len(losses) == _STEPS and losses[:3] == _right(trial)[1][:3]


RESUME = Exercise(
    id="12.3",
    title="Go on where it was cut off",
    answer="train",
    properties=(
        Property("undisturbed, all steps in order", _without_a_cut),
        Property("cut off, it goes on with the right step", _goes_on),
        Property("… and ends as if nothing had happened, to the last bit", _same_to_the_last_bit),
        Property("when all is done, nothing is done again", _twice),
        Property("goes on with half the ranks", _on_fewer_ranks, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "Not all ranks take part. Saving and loading are meetings: each rank brings its own pieces.",
            _not_all_take_part,
        ),
        Mistake(
            "The second run starts from scratch: nobody has looked whether there is a checkpoint.",
            lambda trial: _second_run(trial)[0] == list(range(_STEPS)),
        ),
        Mistake(
            "A step is done twice: the checkpoint was saved *after* its step, so the next one comes now.",
            lambda trial: _second_run(trial)[0] == [1, 2, 3],
        ),
        Mistake(
            "A step is skipped: it was saved as done before it was done.",
            lambda trial: _second_run(trial)[0] == [3],
        ),
        Mistake(
            "The losses from before the cut are gone. They must be in the checkpoint, too: `extra` takes them.",
            lambda trial: len(_second_run(trial)[1]) == _STEPS - 2,
        ),
        Mistake(
            "The weights came back, but Adam's moments did not: it begins to learn how long its steps should be again.",
            _only_moments_missing,
        ),
    ),
    hints=(
        "What must a checkpoint hold, so that a new process can go on like the old one? There are four things.",
        (
            "`checkpoints.load_latest(model=…, optimizer=…)` returns None if there is nothing yet, otherwise an object "
            "with `step`, the last that was done, and `extra`, what you gave to `save`."
        ),
        (
            "Keep the list of losses in `extra`: its length is the number of steps done. Loop from there; after each "
            "step, `checkpoints.save(step, model=model, optimizer=optimizer, extra=losses)`."
        ),
    ),
)
