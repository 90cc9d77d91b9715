"""Exercise 7.3, a puzzle: which tokens each rank has, so that all work equally much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.exercises.nb07.attention import looks_back
from axon_course.replays import Replay, replay_schedule
from axon_course.trials import Trial
from axon_nb.records.spans import Span

_MOST = 1.1
"""The busiest rank's work, in fair shares."""
_QUITE_EQUAL = 1.4


def _on_rank(answer: Any, length: int) -> list[int]:
    return [int(position) for position in answer(length)]


def _tokens(trial: Trial, length: int, ranks: int | None = None) -> list[list[int]]:
    found: list[list[int]] = trial.run(_on_rank, length, ranks=ranks)
    return found


def _lengths(trial: Trial) -> tuple[int, int]:
    return 2 * trial.ranks, 16 * trial.ranks


def _each_once(trial: Trial) -> str | None:
    for length in _lengths(trial):
        positions = [position for mine in _tokens(trial, length) for position in mine]
        twice = sorted({position for position in positions if positions.count(position) > 1})
        missing = sorted(set(range(length)) - set(positions))
        outside = sorted(set(positions) - set(range(length)))
        if twice or missing or outside:
            words = (
                f"token {twice[0]} is taken twice"
                if twice
                else f"there is no token {outside[0]}"
                if outside
                else f"nobody has token {missing[0]}"
            )
            return f"{length} tokens on {trial.ranks} ranks: {words}"
    return None


def _equally_many(trial: Trial) -> str | None:
    for length in _lengths(trial):
        counts = [len(mine) for mine in _tokens(trial, length)]
        if len(set(counts)) > 1:
            return f"{length} tokens: the ranks have {', '.join(map(str, counts))}; blocks must have one size"
    return None


def _work(trial: Trial, length: int, ranks: int | None = None) -> torch.Tensor:
    """Pairs of a token and one that it looks at, by the rank of the first and the rank of the second."""
    tokens = [torch.tensor(mine) for mine in _tokens(trial, length, ranks)]
    return torch.tensor([[looks_back(mine, other).sum().item() for other in tokens] for mine in tokens])


def _busiest(work: torch.Tensor) -> float:
    by_rank = work.sum(dim=1).float()
    return (by_rank.max() / by_rank.mean()).item()


def _equal_work(trial: Trial) -> str | None:
    _, length = _lengths(trial)
    work = _work(trial, length)
    if _busiest(work) <= _MOST:
        return None
    return f"{length} tokens: the ranks look at {', '.join(map(str, work.sum(dim=1).tolist()))} tokens"


def _other_sizes(trial: Trial) -> str | None:
    for ranks in (2, 3, 6):
        work = _work(trial, 16 * ranks, ranks)
        if _busiest(work) > _MOST:
            return f"{ranks} ranks: they look at {', '.join(map(str, work.sum(dim=1).tolist()))} tokens"
    return None


def _ring_time(trial: Trial) -> float:
    """The time of a ring, in fair shares: in each step all ranks wait for the one that has most to do."""
    work = _work(trial, _lengths(trial)[1]).float()
    n = len(work)
    steps = [max(work[rank, (rank - step) % n].item() for rank in range(n)) for step in range(n)]
    return round(sum(steps) / (work.sum().item() / n), 3)


def _is(trial: Trial, pieces: Callable[[int, int], list[int]], count: int) -> bool:
    """Whether each rank has these of `count` equal pieces of the text."""
    _, length = _lengths(trial)
    size = length // count
    expected = [
        [position for piece in pieces(rank, trial.ranks) for position in range(piece * size, (piece + 1) * size)]
        for rank in range(trial.ranks)
    ]
    return [sorted(mine) for mine in _tokens(trial, length)] == [sorted(mine) for mine in expected]


def _unequal_but_fair(trial: Trial) -> bool:
    if not _equally_many(trial) or _each_once(trial):
        return False
    return _busiest(_work(trial, _lengths(trial)[1])) < _QUITE_EQUAL


def _ring(trial: Trial) -> Replay:
    work = _work(trial, _lengths(trial)[1]).tolist()
    spans, n, start = [], len(work), 0
    for step in range(n):
        lengths = [work[rank][(rank - step) % n] for rank in range(n)]
        spans += [
            Span(rank, "forward", "F", start, start + length, microbatch=step)
            for rank, length in enumerate(lengths)
            if length
        ]
        start += max(lengths)
    return replay_schedule("A ring with your pieces", spans, box="a step of the ring")


SPLIT = Exercise(
    id="7.3",
    title="Fair pieces",
    answer="my_tokens",
    properties=(
        Property("every token on one rank", _each_once),
        Property("equally many on each rank", _equally_many),
        Property("equal work, within 10 %", _equal_work),
        Property("2, 3 and 6 ranks", _other_sizes, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "Each rank has one piece of the text. The last one looks at everything, the first at almost nothing.",
            lambda trial: _is(trial, lambda rank, n: [rank], trial.ranks),
        ),
        Mistake(
            "Two pieces each is a good idea. But rank 0 has the earlier ones of both kinds, the last rank the later.",
            lambda trial: _is(trial, lambda rank, n: [rank, n + rank], 2 * trial.ranks),
        ),
        Mistake(
            (
                "The work is quite equal, but the numbers of tokens are not. In a ring, the blocks take turns in one "
                "place: they need one size."
            ),
            _unequal_but_fair,
        ),
    ),
    hints=(
        "The work of a token grows with its position. Which pairs of tokens all have the same work together?",
        "The first with the last, the second with the last but one. Now take pieces of the text in place of tokens.",
        "With `pieces = torch.arange(length).chunk(2 * n)`, rank r takes pieces r and 2 n - 1 - r.",
    ),
    score=Score("time of the ring in fair shares, if each step waits for its slowest rank", 1.0, _ring_time, _ring),
)
