"""Exercise 11.4: whose weights differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_course.comparisons import shown
from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_calls
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.records.units import format_bytes

_MOST_SENT = 64
_LENGTH = 1000


def _ask_on_rank(answer: Any, tensors: list[torch.Tensor]) -> Any:
    return answer(tensors[dist.get_rank()])


def _alike(trial: Trial, length: int) -> torch.Tensor:
    return torch.randn(length, generator=trial.generator(f"alike {length}"))


def _changed(weights: torch.Tensor, changes: dict[int, float]) -> torch.Tensor:
    changed = weights.clone()
    for index, value in changes.items():
        changed[index] = value
    return changed


def _finds(trial: Trial, weights: torch.Tensor, wrong: dict[int, torch.Tensor], case: str) -> str | None:
    found = trial.run(_ask_on_rank, [wrong.get(rank, weights) for rank in range(trial.ranks)])
    for rank, got in enumerate(found):
        if got != sorted(wrong):
            return f"{case}: rank {rank} returned {shown(got)}; right is {sorted(wrong)}"
    return None


def _none(trial: Trial) -> str | None:
    return _finds(trial, _alike(trial, 4), {}, "four numbers, the same on all ranks")


def _one(trial: Trial) -> str | None:
    weights = _alike(trial, 4)
    for rank in (trial.ranks - 1, 0)[: trial.ranks - 1]:  # of two ranks, nobody knows which one is right
        if sentence := _finds(trial, weights, {rank: weights + 1}, f"rank {rank} has other numbers"):
            return sentence
    return None


def _last_bit(trial: Trial) -> str | None:
    weights = _alike(trial, _LENGTH)
    nearly = _changed(weights, {7: torch.nextafter(weights[7], torch.tensor(9.0)).item()})
    return _finds(trial, weights, {1: nearly}, "one number of rank 1 differs in its last bit")


def _swapped(trial: Trial) -> str | None:
    weights = _alike(trial, 8)
    turned = _changed(weights, {2: weights[5].item(), 5: weights[2].item()})
    return _finds(trial, weights, {1: turned}, "two numbers of rank 1 have changed places")


def _nan(trial: Trial) -> str | None:
    weights = _changed(_alike(trial, 8), {3: float("nan")})
    return _finds(trial, weights, {}, "the same numbers on all ranks, one of them nan") or _finds(
        trial, weights, {1: weights.nan_to_num(1.0)}, "a nan on all ranks but rank 1"
    )


def _many_on_rank(answer: Any, weights: torch.Tensor, count: int) -> int:
    """How many of some small differences the answer overlooks."""
    overlooked = 0
    for index in range(count):
        own = weights.clone()
        own[index % len(own)] += (index + 1) * (dist.get_rank() == 1)
        overlooked += answer(own) != [1]
    return overlooked


def _overlooks_nothing(trial: Trial) -> str | None:
    count = 300
    overlooked = max(trial.run(_many_on_rank, _alike(trial, 16), count))
    return f"{overlooked} of {count} differences were overlooked" if overlooked else None


def _sent_on_rank(answer: Any, weights: torch.Tensor) -> int:
    with calls() as counted:
        answer(weights)
    return counted.sent


def _sent(trial: Trial) -> float:
    return float(max(trial.run(_sent_on_rank, _alike(trial, _LENGTH))))


def _sends_little(trial: Trial) -> str | None:
    sent = round(_sent(trial))
    if sent <= _MOST_SENT:
        return None
    return f"{_LENGTH:,} numbers: a rank sends {format_bytes(sent)}; {_MOST_SENT} bytes are always enough"


def _is_refused_only_for_bytes(trial: Trial) -> bool:
    return not (_one(trial) or _last_bit(trial) or _swapped(trial)) and _sends_little(trial) is not None


def _calls(trial: Trial) -> Replay:
    weights = _alike(trial, _LENGTH)
    return replay_calls(trial, f"The calls for {_LENGTH:,} numbers", _ask_on_rank, [weights] * trial.ranks)


WHO_DIFFERS = Exercise(
    id="11.4",
    title="Who differs?",
    answer="who_differs",
    properties=(
        Property("nobody, if all are equal", _none),
        Property("one with other numbers", _one),
        Property("one number, in its last bit", _last_bit, mock_only=True),
        Property("two numbers that changed places", _swapped, mock_only=True),
        Property("nan is equal to nan", _nan, mock_only=True),
        Property("no difference is overlooked", _overlooks_nothing, mock_only=True),
        Property("few bytes travel", _sends_little, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "A sum can be the same for different numbers. Look for something that every bit changes.",
            lambda trial: not _one(trial) and _swapped(trial) is not None,
        ),
        Mistake(
            "Rank 0 may be the one that is wrong: compare with what most ranks have.",
            lambda trial: "rank 0 has other" in (_one(trial) or ""),
        ),
        Mistake(
            "`nan == nan` is False in Python: compare the bytes of the numbers, not their values.",
            lambda trial: not _one(trial) and "the same numbers" in (_nan(trial) or ""),
        ),
        Mistake(
            "All weights of all ranks travel. Of a real model, that is gigabytes, to learn one bit.",
            _is_refused_only_for_bytes,
        ),
    ),
    hints=(
        "To see whether two long texts are equal, over the telephone, would you read them out? What would you compare?",
        (
            "A **hash** makes a short number of many bytes, another one if a single bit differs: "
            "`zlib.crc32(weights.cpu().numpy().tobytes())`. Gather these numbers, and see which most ranks have."
        ),
        (
            "Put the hash into a tensor of one int64 (on `weights.device`), `dist.all_gather` it, take the most "
            "common one (`collections.Counter`), and return the ranks that have another."
        ),
    ),
    score=Score("bytes that a rank sends", 12, _sent, _calls),
)
