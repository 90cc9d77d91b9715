"""Exercise 8.3: where to cut a model whose layers take unequally long."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_schedule
from axon_course.trials import Trial
from axon_nb.parallel.pipeline import PipelineSchedule
from axon_nb.parallel.pipeline.schedule import actions
from axon_nb.records.spans import Span
from axon_nb.records.training.steps import simulate_orders, spans_from_times

_RANKS = 4
_LAYER_MS = (1, *[2] * 24, 11)
"""Milliseconds that a microbatch takes in each layer's forward: an embedding, 24 blocks, the output layer."""
_EVEN = (7, 6, 6, 7)
_MICROBATCHES = 16
_SHARE = 0.5
"""How much of the bubble may be left."""


def _stage_ms(layers: tuple[int, ...]) -> list[float]:
    ends = list(itertools.accumulate(layers))
    return [float(sum(_LAYER_MS[end - count : end])) for end, count in zip(ends, layers, strict=True)]


def _step_ms(layers: tuple[int, ...]) -> float:
    """How long a step of 1F1B takes, if messages take no time."""
    return max(span.end_ns for span in _spans(layers)) / 1e6


def _spans(layers: tuple[int, ...]) -> list[Span]:
    times = [time / 1e3 for time in _stage_ms(layers)]
    orders = actions(PipelineSchedule.ONE_F_ONE_B, num_ranks=_RANKS, num_stages=_RANKS, num_microbatches=_MICROBATCHES)
    lengths = {"F": times, "B": [2 * time for time in times]}
    moments = simulate_orders(orders, lengths, num_stages=_RANKS, num_microbatches=_MICROBATCHES)
    return spans_from_times(orders, moments)


def _idle(layers: tuple[int, ...]) -> float:
    return 1 - 3 * sum(_LAYER_MS) * _MICROBATCHES / (_RANKS * _step_ms(layers))


def _layers(trial: Trial) -> tuple[int, ...]:
    return tuple(trial.answer)


def _covers_the_model(trial: Trial) -> str | None:
    answer = trial.answer
    if not isinstance(answer, list | tuple) or len(answer) != _RANKS:
        return f"it must be a list of {_RANKS} numbers, one per stage; got {answer!r}"
    if any(type(count) is not int or count < 1 for count in answer):
        return f"every stage needs a whole number of layers, at least 1; got {answer!r}"
    if sum(answer) != len(_LAYER_MS):
        return f"the stages have {sum(answer)} layers; the model has {len(_LAYER_MS)}"
    return None


def _halved(trial: Trial) -> str | None:
    idle, before = _idle(_layers(trial)), _idle(_EVEN)
    if idle <= _SHARE * before:
        return None
    times = ", ".join(f"{time:g}" for time in _stage_ms(_layers(trial)))
    return f"stages of {times} ms: the bubble is {idle:.1%}, and was {before:.1%}; {_SHARE * before:.1%} is half of it"


def _slowest(index: int) -> Callable[[Trial], bool]:
    def fits(trial: Trial) -> bool:
        times = _stage_ms(_layers(trial))
        return _covers_the_model(trial) is None and times[index] == max(times)

    return fits


def _step(trial: Trial) -> Replay:
    return replay_schedule("A step with your stages", _spans(_layers(trial)))


RESPLIT = Exercise(
    id="8.3",
    title="One stage is slow",
    answer="layers_per_stage",
    properties=(
        Property("four stages, all layers", _covers_the_model, mock_only=True),
        Property("half the bubble", _halved, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "This is the split you began with: equally many blocks for each rank, but one rank has more to do.",
            lambda trial: _layers(trial) == _EVEN,
        ),
        Mistake(
            "The last stage is still the slowest: the output layer takes as long as five blocks.",
            _slowest(-1),
        ),
        Mistake(
            "The embedding is a small layer, and yet the first stage is the slowest now: it got too many blocks.",
            _slowest(0),
        ),
        Mistake(
            "Another stage is the slowest now. The others wait for it as they waited for the last one.",
            lambda trial: _slowest(1)(trial) or _slowest(2)(trial),
        ),
    ),
    hints=(
        "The slowest stage sets the pace for all. What would each stage take, if the work could be cut anywhere?",
        "60 ms in all, so 15 per stage. How many blocks fit beside the output layer, which takes 11?",
        "The last stage takes two blocks and the output layer. Share out the embedding and 22 blocks among three.",
    ),
    score=Score("milliseconds per step", 891, lambda trial: _step_ms(_layers(trial)), _step),
)
