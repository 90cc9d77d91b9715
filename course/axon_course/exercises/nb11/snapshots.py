"""Exercise 11.3: where all ranks can go on together after a failure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import difference, first_difference, shown
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial

_LENGTH = 5
_STEPS = 6
Held = list[list[int]]
"""The steps of which each rank has a snapshot."""


def _resume_on_rank(answer: Any, snapshots: list[dict[int, torch.Tensor]]) -> Any:
    return answer(snapshots[dist.get_rank()])


def _weights(trial: Trial, step: int) -> torch.Tensor:
    return torch.randint(-9, 10, (_LENGTH,), generator=trial.generator(f"step {step}")).double()


def _resume(trial: Trial, held: Held) -> list[Any]:
    snapshots = [{step: _weights(trial, step) for step in steps} for steps in held]
    return trial.run(_resume_on_rank, snapshots)


def _goes_on_at(trial: Trial, held: Held, step: int, case: str) -> str | None:
    for rank, found in enumerate(_resume(trial, held)):
        if not isinstance(found, tuple) or len(found) != 2:
            return f"{case}: rank {rank} returned {shown(found)}; it must return a step and its weights"
        if found[0] != step:
            return f"{case}: rank {rank} goes on at step {found[0]}; right is step {step}"
        if words := difference(found[1], _weights(trial, step)):
            return f"{case}: rank {rank} {words}"
    return None


def _all_but(trial: Trial, rank: int, steps: list[int], own: list[int]) -> Held:
    return [own if each == rank else steps for each in range(trial.ranks)]


def _same_steps(trial: Trial) -> str | None:
    return _goes_on_at(trial, [[0]] * trial.ranks, 0, "all have step 0") or _goes_on_at(
        trial, [[3, 4, 5]] * trial.ranks, 5, "all have steps 3, 4 and 5"
    )


def _one_ahead(trial: Trial) -> str | None:
    for rank in (trial.ranks - 1, 0):
        held = _all_but(trial, rank, [3, 4], [3, 4, 5])
        if sentence := _goes_on_at(trial, held, 4, f"rank {rank} has steps 3, 4 and 5; the others have 3 and 4"):
            return sentence
    return None


def _one_behind(trial: Trial) -> str | None:
    held = _all_but(trial, 1 % trial.ranks, [5, 6, 7], [4, 5, 6])
    return _goes_on_at(trial, held, 6, "rank 1 has steps 4, 5 and 6; the others have 5, 6 and 7")


def _newcomer(trial: Trial) -> str | None:
    for rank in (trial.ranks - 1, 0):
        held = _all_but(trial, rank, [3, 4], [])
        if sentence := _goes_on_at(trial, held, 4, f"rank {rank} is new and has none; the others have 3 and 4"):
            return sentence
    return None


def _train(weights: torch.Tensor, first: int, last: int, snapshots: dict[int, torch.Tensor]) -> torch.Tensor:
    """A few steps of all ranks; the same numbers travel as in a training with data parallelism."""
    for step in range(first, last):
        snapshots[step] = weights.clone()
        gradient = weights * (dist.get_rank() + 1) + step
        dist.all_reduce(gradient)
        weights = weights - gradient / 1024
    return weights


def _training_on_rank(answer: Any, ahead: int) -> tuple[torch.Tensor, torch.Tensor]:
    start = torch.arange(float(_LENGTH)).double()
    undisturbed = _train(start, 0, _STEPS, {})
    snapshots: dict[int, torch.Tensor] = {}
    _train(start, 0, 4, snapshots)
    if dist.get_rank() == ahead:
        snapshots[4] = torch.zeros(_LENGTH).double()  # of a step that the others have not finished
    step, weights = answer(snapshots)
    return _train(weights, step, _STEPS, {}), undisturbed


def _ends_alike(trial: Trial) -> str | None:
    found = trial.run(_training_on_rank, trial.ranks - 1)
    ends, undisturbed = zip(*found, strict=True)
    return first_difference(list(ends), list(undisturbed), "six steps with a failure after the fourth")


def _takes(trial: Trial, choose: Any) -> bool:
    """Whether the answer chooses the step like a known mistake, if a rank is ahead."""
    held = _all_but(trial, trial.ranks - 1, [3, 4], [3, 4, 5])
    return all(found[0] == choose(held, rank) for rank, found in enumerate(_resume(trial, held)))


SNAPSHOTS = Exercise(
    id="11.3",
    title="Go on together",
    answer="last_common",
    properties=(
        Property("all have the same snapshots", _same_steps),
        Property("one is a step ahead", _one_ahead),
        Property("one is a step behind", _one_behind),
        Property("one is new, and has none", _newcomer),
        Property("training ends as if nothing had happened", _ends_alike),
    ),
    mistakes=(
        Mistake(
            "Each rank goes on from its own newest snapshot, and so in different steps. They must agree on one.",
            lambda trial: _takes(trial, lambda held, rank: max(held[rank])),
        ),
        Mistake(
            "This is a step that all have, but not the newest: more work than needed is done again.",
            lambda trial: _takes(trial, lambda held, _: min(held[0])),
        ),
        Mistake(
            "Not every rank can follow there: this is the newest step that any rank has, or that one certain rank has.",
            lambda trial: "goes on at step 5" in (_one_ahead(trial) or ""),
        ),
        Mistake(
            "The new rank and the others do not make the same calls, so some of them wait for ever.",
            lambda trial: trial.hangs(
                _resume_on_rank,
                [{3: _weights(trial, 3)} if rank else {} for rank in range(trial.ranks)],
            ),
        ),
    ),
    hints=(
        "Before anybody chooses, all must know which steps everybody has. Which call tells all of them?",
        (
            "`dist.all_gather_object(everybody, sorted(snapshots))` fills a list with the steps of all ranks. Leave "
            "out the empty ones. The steps that the rest has in common are an intersection of sets; take the largest."
        ),
        (
            "The new rank needs the weights, too: the lowest rank that has snapshots sends them to all, with "
            "`dist.broadcast_object_list(box, src=…)`, where `box` is a list with one entry."
        ),
    ),
)
