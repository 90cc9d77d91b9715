"""Exercise 8.2: a schedule with a short bubble and few live microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from axon_course.comparisons import difference
from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_schedule
from axon_course.trials import Trial
from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline import Pipeline, PipelineMemoryStats, PipelineSchedule, bubble_fraction, ideal_timeline
from axon_nb.parallel.pipeline.schedule import stages_of_rank

_NAMES = ("schedule", "num_stages", "num_microbatches")
_MOST_BUBBLE, _MOST_LIVE = 0.12, 6
_RANKS = 4
_WIDTH = 4
_TOLERANCE = 1e-9


def _itself(answer: Any) -> Any:
    return answer


def _answer(trial: Trial) -> Any:
    return trial.run(_itself, ranks=1)[0]


def _well_formed(trial: Trial) -> str | None:
    answer = _answer(trial)
    if not isinstance(answer, Mapping) or set(answer) != set(_NAMES):
        return f"it must be a dictionary with the names {', '.join(_NAMES)}"
    for name in _NAMES[1:]:
        if type(answer[name]) is not int or answer[name] < 1:
            return f"{name} is {answer[name]!r}; it must be a whole number, at least 1"
    try:
        PipelineMemoryStats.of(num_ranks=_RANKS, **answer)
    except UsageError as error:
        return str(error)
    return None


def _bubble(trial: Trial) -> float:
    return bubble_fraction(ideal_timeline(num_ranks=_RANKS, **_answer(trial)))


def _live(trial: Trial) -> float:
    """The most live microbatches of a rank, in units of a rank's whole share of the model."""
    stats = PipelineMemoryStats.of(num_ranks=_RANKS, **_answer(trial))
    return stats.peak_activations * _RANKS / stats.num_stages


def _short_bubble(trial: Trial) -> str | None:
    bubble = _bubble(trial)
    return None if bubble < _MOST_BUBBLE else f"the bubble is {bubble:.1%}; it must be below {_MOST_BUBBLE:.0%}"


def _little_memory(trial: Trial) -> str | None:
    live = _live(trial)
    return None if live <= _MOST_LIVE else f"a rank keeps {live:g} microbatches alive; at most {_MOST_LIVE} fit"


def _messages(trial: Trial) -> float:
    """The messages that all ranks send in a step."""
    answer = _answer(trial)
    kind, stages = PipelineSchedule.of(answer["schedule"]), answer["num_stages"]
    held = [stages_of_rank(kind, rank, num_ranks=_RANKS, num_stages=stages) for rank in range(_RANKS)]
    owner = {stage: rank for rank, indices in enumerate(held) for stage in indices}
    between = sum(owner[before] != owner[after] for before, after in itertools.pairwise(range(stages)))
    return float(2 * answer["num_microbatches"] * between)


def _stage(weight: torch.Tensor) -> nn.Sequential:
    linear = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return nn.Sequential(linear, nn.Tanh())


def _pipeline_on_rank(
    answer: Any, weights: list[torch.Tensor], batch: torch.Tensor, targets: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    pipe = Pipeline.from_modules(
        [_stage(weight) for weight in weights],
        schedule=answer["schedule"],
        num_microbatches=answer["num_microbatches"],
        loss=nn.functional.mse_loss,
    )
    pipe.step(batch, targets)
    return {name: weight.grad for name, weight in pipe.named_parameters()}


def _trains_like_one(trial: Trial) -> str | None:
    answer = _answer(trial)
    if trial.ranks != _RANKS:
        return f"this is a choice for {_RANKS} ranks, and {trial.ranks} are running: `%distributed resize {_RANKS}`"
    generator = trial.generator("pipeline")
    weights = list(torch.rand(answer["num_stages"], _WIDTH, _WIDTH, generator=generator, dtype=torch.float64) - 0.5)
    batch, targets = torch.rand(2, answer["num_microbatches"], _WIDTH, generator=generator, dtype=torch.float64)
    whole = nn.Sequential(*map(_stage, weights))
    nn.functional.mse_loss(whole(batch), targets).backward()
    right = {name: weight.grad for name, weight in whole.named_parameters()}
    for rank, gradients in enumerate(trial.run(_pipeline_on_rank, weights, batch, targets)):
        for name, gradient in gradients.items():
            expected = right[name]
            assert expected is not None
            if words := difference(gradient, expected, tolerance=_TOLERANCE):
                return f"rank {rank}, gradient of {name}, {words}"
    return None


def _step(trial: Trial) -> Replay:
    return replay_schedule("A step of your choice", ideal_timeline(num_ranks=_RANKS, **_answer(trial)))


def _is(trial: Trial, *schedules: PipelineSchedule) -> bool:
    return PipelineSchedule.of(_answer(trial)["schedule"]) in schedules


CHOICE = Exercise(
    id="8.2",
    title="A short bubble in little memory",
    answer="choice",
    properties=(
        Property("a schedule that can run on four ranks", _well_formed, mock_only=True),
        Property(f"a bubble below {_MOST_BUBBLE:.0%}", _short_bubble, mock_only=True),
        Property(f"at most {_MOST_LIVE} live microbatches", _little_memory, mock_only=True),
        Property("it trains like one process", _trains_like_one),
    ),
    mistakes=(
        Mistake(
            "GPipe keeps every microbatch alive until the last forward is done, so more of them need more memory.",
            lambda trial: _is(trial, PipelineSchedule.GPIPE) and not _short_bubble(trial),
        ),
        Mistake(
            "LoopedBFS sends all microbatches through one stage before the next, and keeps them all, as GPipe does.",
            lambda trial: _is(trial, PipelineSchedule.LOOPED_BFS) and not _short_bubble(trial),
        ),
        Mistake(
            "Few microbatches: filling and emptying the pipeline takes a large part of the step.",
            lambda trial: _short_bubble(trial) is not None,
        ),
    ),
    hints=(
        "Put the numbers of 1F1B into (P - 1) / (M + P - 1). From which M on is it below 12 %, and what does it keep?",
        (
            "That is one answer. Others need fewer messages: a schedule with two stages per rank has half the bubble "
            "for the same M, and some fill it with the gradients of weights."
        ),
        (
            'Try `plan.schedule("InterleavedZeroBubble", 8, M, num_ranks=4)` for small M, and then with 4 stages: its '
            "backward in two halves works without interleaving, too."
        ),
    ),
    score=Score("messages per step", 48, _messages, _step),
)
