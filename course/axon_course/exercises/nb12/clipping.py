"""Exercise 12.2: the gradient of a model that is cut in part, clipped to a length."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import first_difference, shown
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm.calls import calls

_TOLERANCE = 1e-6
"""Of lengths, relative: float32 is exact enough for them."""
_MOST_SENT = 64
"""Bytes that a rank may send."""
_FAR = 1e6
"""A limit that no gradient of the cases reaches."""
Gradients = tuple[list[list[torch.Tensor]], list[torch.Tensor]]
"""What each rank alone has, and what all ranks have."""


def _on_rank(answer: Any, cut: list[list[torch.Tensor]], whole: list[torch.Tensor], limit: float) -> Any:
    mine = cut[dist.get_rank()]
    with calls() as counted:
        length = answer(mine, whole, limit)
    return length, torch.cat([torch.empty(0).double(), *(each.flatten() for each in (*mine, *whole))]), counted.sent


def _cut_only(trial: Trial) -> Gradients:
    """Two slices per rank, of different lengths, and on the last rank much larger numbers."""
    rows, numbers = trial.tensors(2, 3, text="cut"), trial.tensors(5, text="cut, too")
    cut = [[row + 1, number] for row, number in zip(rows, numbers, strict=True)]
    cut[-1] = [10 * each + 1 for each in cut[-1]]
    return cut, []


def _both(trial: Trial) -> Gradients:
    return _cut_only(trial)[0], [20 + each for each in trial.tensors(4, text="whole")[:2]]


def _last_has_none(trial: Trial) -> Gradients:
    cut, whole = _both(trial)
    return [*cut[:-1], []], whole


def _length(cut: list[list[torch.Tensor]], whole: list[torch.Tensor], *, whole_times: float = 1) -> float:
    squares = sum(float(each.square().sum()) for parts in cut for each in parts)
    return math.sqrt(squares + whole_times * sum(float(each.square().sum()) for each in whole))


def _lengths(trial: Trial, gradients: Gradients) -> list[Any]:
    return [length for length, *_ in trial.run(_on_rank, *gradients, _FAR)]


def _length_differs(trial: Trial, gradients: Gradients, case: str) -> str | None:
    right = _length(*gradients)
    for rank, length in enumerate(_lengths(trial, gradients)):
        if not isinstance(length, float):
            return f"{case}: rank {rank} returned {shown(length)}; it must return a float"
        if not math.isclose(length, right, rel_tol=_TOLERANCE):
            return f"{case}: rank {rank} returned {length:.6g}; right is {right:.6g}"
    return None


def _cut_length(trial: Trial) -> str | None:
    return _length_differs(trial, _cut_only(trial), "cut parameters only")


def _whole_once(trial: Trial) -> str | None:
    return _length_differs(trial, _both(trial), "cut and whole parameters")


def _no_part(trial: Trial) -> str | None:
    return _length_differs(trial, _last_has_none(trial), "the last rank has no cut parameters")


def _gradients_differ(trial: Trial, limit: float, factor: float, case: str, tolerance: float) -> str | None:
    cut, whole = _both(trial)
    expected = [factor * torch.cat([each.flatten() for each in (*mine, *whole)]) for mine in cut]
    found = [gradients for _, gradients, _ in trial.run(_on_rank, cut, whole, limit)]
    return first_difference(found, expected, case, tolerance=tolerance)


def _is_scaled(trial: Trial) -> str | None:
    length = _length(*_both(trial))
    return _gradients_differ(trial, length / 8, 1 / 8, f"limit {length / 8:.4g}, length {length:.4g}", 1e-4)


def _is_left(trial: Trial) -> str | None:
    return _gradients_differ(trial, _FAR, 1.0, f"limit {_FAR:,.0f}", 0.0)


def _sends_little(trial: Trial) -> str | None:
    sent = max(sent for *_, sent in trial.run(_on_rank, *_both(trial), _FAR))
    return f"a rank sent {sent} bytes; {_MOST_SENT} are always enough" if sent > _MOST_SENT else None


def _returns(trial: Trial, gradients: Gradients, wrong: list[float]) -> bool:
    found = _lengths(trial, gradients)
    return all(math.isclose(length, value, rel_tol=_TOLERANCE) for length, value in zip(found, wrong, strict=True))


def _is_alone(trial: Trial) -> bool:
    cut, whole = _both(trial)
    return _returns(trial, (cut, whole), [_length([mine], whole) for mine in cut])


def _adds_lengths(trial: Trial) -> bool:
    cut, whole = _cut_only(trial)
    return _returns(trial, (cut, whole), [sum(_length([mine], []) for mine in cut)] * trial.ranks)


def _counts_copies(trial: Trial) -> bool:
    gradients = _both(trial)
    return _returns(trial, gradients, [_length(*gradients, whole_times=trial.ranks)] * trial.ranks)


CLIP = Exercise(
    id="12.2",
    title="As long as allowed",
    answer="clip",
    properties=(
        Property("the length of what is cut", _cut_length),
        Property("what all ranks have counts once", _whole_once),
        Property("a rank may have nothing of what is cut", _no_part),
        Property("too long: scaled to the limit", _is_scaled),
        Property("short enough: left as it is", _is_left),
        Property("few bytes travel", _sends_little),
    ),
    mistakes=(
        Mistake(
            "Each rank has measured only what it holds itself, and so each scales by another number: the parts no "
            "longer fit together.",
            _is_alone,
        ),
        Mistake(
            "Lengths do not add up: of 3 to the east and 4 to the north, the length is 5. What does add up?",
            _adds_lengths,
        ),
        Mistake(
            "What is whole on every rank was counted once for each rank.",
            _counts_copies,
        ),
        Mistake(
            "The rank that has nothing of what is cut did not come, and the others wait for it.",
            lambda trial: trial.hangs(_on_rank, *_last_has_none(trial), _FAR),
        ),
        Mistake(
            "A gradient that was short enough has been stretched to the limit. Clipping only ever makes shorter.",
            lambda trial: not _whole_once(trial) and not _is_scaled(trial) and _is_left(trial) is not None,
        ),
    ),
    hints=(
        "The length is the root of a sum over all numbers of the model. Which part of the sum does each rank know?",
        (
            "Squares add up, lengths do not. Let `all_reduce` add the squares of what is cut. The squares of what is "
            "whole are the same on all ranks already: when must they be added?"
        ),
        (
            "One float64 number: `sum(g.square().sum() for g in cut)`, 0 if there are none. `all_reduce` it, add the "
            "squares of `whole`, take the root. If it is above the limit, `g.mul_(limit / length)` for all gradients."
        ),
    ),
)
