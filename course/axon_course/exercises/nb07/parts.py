"""Exercise 7.1: attention to two parts of a text makes attention to both."""

from __future__ import annotations

import math
from typing import Any

import torch

from axon_course.comparisons import difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.exercises.nb07.attention import attend
from axon_course.trials import Trial

_TOLERANCE = 1e-10
_Part = tuple[torch.Tensor, torch.Tensor]


def _on_rank(answer: Any, first: _Part, second: _Part) -> Any:
    return answer(*first, *second)


def _parts(trial: Trial, counts: tuple[int, int], scale: float = 1.0) -> tuple[_Part, _Part, _Part]:
    """Return attention of three queries to so many keys, to the others, and to all."""
    generator = trial.generator(f"parts {counts} {scale}")
    q, k, v = (torch.randn(rows, 4, generator=generator, dtype=torch.float64) for rows in (3, sum(counts), sum(counts)))
    q *= scale
    cut = counts[0]
    return attend(q, k[:cut], v[:cut]), attend(q, k[cut:], v[cut:]), attend(q, k, v)


def _merged(trial: Trial, first: _Part, second: _Part) -> Any:
    return trial.run(_on_rank, first, second, ranks=1)[0]


def _compare(trial: Trial, first: _Part, second: _Part, whole: _Part, case: str) -> str | None:
    found = _merged(trial, first, second)
    if not isinstance(found, tuple | list) or len(found) != 2:
        return "it must return two tensors: the result, and its lse"
    for name, got, right in zip(("the result", "lse"), found, whole, strict=True):
        if words := difference(got, right, tolerance=_TOLERANCE * max(1.0, right.abs().max().item())):
            return f"{case}: {name} {words}"
    return None


def _halves(trial: Trial) -> str | None:
    cases = ((1, "one key each"), (4, "4 keys each"))
    return next(filter(None, (_compare(trial, *_parts(trial, (keys, keys)), case) for keys, case in cases)), None)


def _uneven(trial: Trial) -> str | None:
    first, second, whole = _parts(trial, (1, 6))
    sentence = _compare(trial, first, second, whole, "1 and 6 keys")
    return sentence or _compare(trial, second, first, whole, "6 and 1 keys")


def _large_scores(trial: Trial) -> str | None:
    return _compare(trial, *_parts(trial, (3, 3), scale=5000.0), "scores in the thousands")


def _nothing(trial: Trial) -> str | None:
    part, _, _ = _parts(trial, (2, 2))
    empty = torch.zeros_like(part[0]), torch.full_like(part[1], -math.inf)
    case = "a part without keys, whose lse is -inf"
    return _compare(trial, part, empty, part, case) or _compare(trial, empty, part, part, case)


def _result_is(trial: Trial, wrong: Any) -> bool:
    first, second, _ = _parts(trial, (1, 6))
    found = _merged(trial, first, second)
    result = found[0] if isinstance(found, tuple | list) else found
    return difference(result, wrong(*first, *second), tolerance=_TOLERANCE) is None


def _result_right_lse_wrong(trial: Trial) -> bool:
    first, second, whole = _parts(trial, (1, 6))
    result, lse = _merged(trial, first, second)
    right = difference(result, whole[0], tolerance=_TOLERANCE) is None
    return right and difference(lse, whole[1], tolerance=_TOLERANCE) is not None


MERGE = Exercise(
    id="7.1",
    title="Two parts make a whole",
    answer="merge",
    properties=(
        Property("equally many keys", _halves, mock_only=True),
        Property("1 and 6 keys", _uneven, mock_only=True),
        Property("scores in the thousands", _large_scores, mock_only=True),
        Property("a part without keys", _nothing, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "This is the plain mean of the two. But a part with better keys counts more.",
            lambda trial: _result_is(trial, lambda out, lse, out2, lse2: (out + out2) / 2),
        ),
        Mistake(
            "The parts are weighted by `lse` itself. It is the *logarithm* of their weight.",
            lambda trial: _result_is(
                trial,
                lambda out, lse, out2, lse2: (lse[:, None] * out + lse2[:, None] * out2) / (lse + lse2)[:, None],
            ),
        ),
        Mistake(
            "The result is right, and its `lse` is not: the next merge would give it a wrong weight.",
            _result_right_lse_wrong,
        ),
        Mistake(
            (
                "Right for small scores. For large ones exp() is more than a computer can hold; but only the "
                "difference of the two counts."
            ),
            lambda trial: not _uneven(trial) and bool(_large_scores(trial)),
        ),
    ),
    hints=(
        "Each part is a mean, and exp(lse) is its total weight. How do you join two means whose weights you know?",
        (
            "The second part's share is exp(lse2) / (exp(lse) + exp(lse2)). Divide by exp(lse) above and below: then "
            "only the difference lse2 - lse is left. Which function is 1 / (1 + exp(-x))?"
        ),
        (
            "`share = torch.sigmoid(lse2 - lse)[:, None]`, the result is `out + share * (out2 - out)`, and its lse is "
            "`torch.logaddexp(lse, lse2)`."
        ),
    ),
)
