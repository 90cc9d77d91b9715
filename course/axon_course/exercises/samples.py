"""Exercise 4.3: who reads which sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial


def _share_on_rank(answer: Any, length: int, epoch: int) -> list[int]:
    torch.manual_seed(dist.get_rank() + 100 * epoch)  # as in a real run, each rank is at its own place
    return [int(index) for index in answer(length, epoch)]


def _shares(trial: Trial, length: int, epoch: int = 0) -> list[list[int]]:
    found: list[list[int]] = trial.run(_share_on_rank, length, epoch)
    return found


def _each_once(trial: Trial) -> str | None:
    for length in (trial.ranks, 5 * trial.ranks):
        indices = [index for share in _shares(trial, length) for index in share]
        twice = sorted({index for index in indices if indices.count(index) > 1})
        missing = sorted(set(range(length)) - set(indices))
        if twice or missing:
            words = f"sample {twice[0]} is seen twice" if twice else f"nobody sees sample {missing[0]}"
            return f"{length} samples on {trial.ranks} ranks: {words}"
    return None


def _equally_many(trial: Trial) -> str | None:
    length = 5 * trial.ranks + 1
    shares = _shares(trial, length)
    counts = [len(share) for share in shares]
    if len(set(counts)) > 1:
        return f"{length} samples: the ranks have {', '.join(map(str, counts))}; one waits for ever"
    missing = sorted(set(range(length)) - {index for share in shares for index in share})
    return f"{length} samples: nobody sees sample {missing[0]}" if missing else None


def _other_order(trial: Trial) -> str | None:
    length = 8 * trial.ranks
    epochs = [_shares(trial, length, epoch) for epoch in range(3)]
    if epochs[0] == epochs[1] == epochs[2]:
        return "epochs 0, 1 and 2 have the same order"
    return None


def _same_again(trial: Trial) -> str | None:
    length = 8 * trial.ranks
    return None if _shares(trial, length, 2) == _shares(trial, length, 2) else "epoch 2 differs when it is asked again"


def _own_shuffle(trial: Trial) -> bool:
    return "twice" in (_each_once(trial) or "")


SHARE = Exercise(
    id="4.3",
    title="Who reads which sample",
    answer="my_share",
    properties=(
        Property("every sample once", _each_once),
        Property("equally many on each rank", _equally_many),
        Property("another order in each epoch", _other_order),
        Property("the same when asked again", _same_again),
    ),
    mistakes=(
        Mistake(
            "The ranks shuffle differently, so their shares overlap. All must shuffle alike, and then take turns.",
            _own_shuffle,
        ),
        Mistake(
            "The order does not depend on the epoch: every rank sees the same samples, in the same order, for ever.",
            lambda trial: _other_order(trial) is not None,
        ),
    ),
    hints=(
        "All ranks need the same shuffled list. How do two ranks get the same random order?",
        "`torch.randperm(length, generator=torch.Generator().manual_seed(epoch))` is the same list on every rank.",
        "Append a few from its beginning until the ranks divide it; then take `order[rank::world_size]`.",
    ),
)
