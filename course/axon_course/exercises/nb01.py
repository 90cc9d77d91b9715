"""The exercises of notebook 01: one program, four processes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from axon_course.comparisons import shown
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.records.ranks import name_ranks

_TOLERANCE = 1e-6


# ---- 1.1 -------------------------------------------------------------------------------------------------------------


def _losses(trial: Trial, counts: list[int], text: str) -> list[torch.Tensor]:
    generator = trial.generator(text)
    return [torch.rand(count, generator=generator) + rank for rank, count in enumerate(counts)]


def _mean_on_rank(answer: Any, losses: list[torch.Tensor]) -> Any:
    mean = answer(losses[dist.get_rank()])
    return mean.item() if isinstance(mean, torch.Tensor) and mean.numel() == 1 else mean


def _means(trial: Trial, counts: list[int]) -> tuple[list[Any], list[torch.Tensor]]:
    losses = _losses(trial, counts, str(counts))
    return trial.run(_mean_on_rank, losses), losses


def _is_mean(trial: Trial, counts: list[int]) -> str | None:
    means, losses = _means(trial, counts)
    right = torch.cat(losses).mean().item()
    for rank, mean in enumerate(means):
        if not isinstance(mean, float) or abs(mean - right) > _TOLERANCE:
            return (
                f"ranks with {', '.join(map(str, counts))} samples: rank {rank} got {shown(mean)}; right is {right:.4g}"
            )
    return None


def _equal_counts(trial: Trial) -> str | None:
    return _is_mean(trial, [1] * trial.ranks) or _is_mean(trial, [4] * trial.ranks)


def _unequal_counts(trial: Trial) -> str | None:
    return _is_mean(trial, [3, 5] * (trial.ranks // 2) or [3])


def _empty_rank(trial: Trial) -> str | None:
    return _is_mean(trial, [0, *range(2, trial.ranks + 1)])


def _losses_untouched(trial: Trial) -> str | None:
    def compare(answer: Any, losses: list[torch.Tensor]) -> bool:
        mine = losses[dist.get_rank()]
        before = mine.clone()
        answer(mine)
        return torch.equal(before, mine)

    kept = trial.run(compare, _losses(trial, [2] * trial.ranks, "kept"))
    return None if all(kept) else f"rank {kept.index(False)}: the call changed the losses that it was given"


def _each_rank(value: Any) -> Any:
    """Return a function that gives every rank the same value of all losses."""
    return lambda losses: [value(losses)] * len(losses)


def _fits_means(trial: Trial, wrong: Any) -> bool:
    means, losses = _means(trial, [3, 5] * (trial.ranks // 2))
    expected = wrong(losses)
    return all(
        isinstance(mean, float) and abs(mean - value) < 1e-5 for mean, value in zip(means, expected, strict=True)
    )


def _returns_nothing(trial: Trial) -> bool:
    means, _ = _means(trial, [4] * trial.ranks)
    return all(mean is None for mean in means)


_MEAN_LOSS = Exercise(
    id="1.1",
    title="The loss of all ranks",
    answer="mean_loss",
    properties=(
        Property("ranks with equally many samples", _equal_counts),
        Property("ranks with 3 and 5 samples", _unequal_counts),
        Property("a rank without samples", _empty_rank),
        Property("the losses stay as they are", _losses_untouched),
    ),
    mistakes=(
        Mistake(
            "It returns None. `dist.all_reduce` returns nothing: it puts the sum into the tensor that it was given.",
            _returns_nothing,
        ),
        Mistake(
            "The rank without samples does not come to the meeting. It has nothing to add, but the others wait for it.",
            lambda trial: trial.hangs(_mean_on_rank, _losses(trial, [0, *range(2, trial.ranks + 1)], "empty")),
        ),
        Mistake(
            "This is the mean of the ranks' means: a sample on a rank with few samples counts more than the others.",
            lambda trial: _fits_means(
                trial, lambda all_: [sum(part.mean().item() for part in all_) / len(all_)] * len(all_)
            ),
        ),
        Mistake(
            "This is each rank's own mean: nothing has travelled between the ranks.",
            lambda trial: _fits_means(trial, lambda all_: [part.mean().item() for part in all_]),
        ),
        Mistake(
            "This is the sum of all losses, not yet divided by the number of samples.",
            lambda trial: _fits_means(trial, _each_rank(lambda all_: torch.cat(all_).sum().item())),
        ),
        Mistake(
            "This divides by the number of ranks; the loss is per sample.",
            lambda trial: _fits_means(trial, _each_rank(lambda all_: torch.cat(all_).sum().item() / len(all_))),
        ),
    ),
    hints=(
        "A mean is a sum divided by a count. Which of the two does one rank know about the others?",
        "Two numbers have to travel: the sum of the losses, and how many there are. Divide the sums.",
        "Put both into one tensor, call `dist.all_reduce` on it, and return the first number divided by the second.",
    ),
)


# ---- 1.2 -------------------------------------------------------------------------------------------------------------


def _total_on_rank(answer: Any, values: list[torch.Tensor]) -> Any:
    return answer(values[dist.get_rank()])


def _values(trial: Trial) -> list[torch.Tensor]:
    return [tensor.squeeze() for tensor in trial.tensors(1, text="report")]


def _reports(trial: Trial) -> tuple[list[Any], list[torch.Tensor]]:
    values = _values(trial)
    return trial.run(_total_on_rank, values), values


def _nobody_waits(trial: Trial) -> str | None:
    _reports(trial)
    return None


def _rank_0_reports(trial: Trial) -> str | None:
    found, values = _reports(trial)
    right = f"the total is {sum(value.item() for value in values):g}"
    return None if found[0] == right else f"rank 0 returned {shown(found[0])}; right is {right!r}"


def _others_are_silent(trial: Trial) -> str | None:
    found, _ = _reports(trial)
    loud = next((rank for rank in range(1, trial.ranks) if found[rank] is not None), None)
    return (
        None
        if loud is None
        else f"rank {loud} returned {shown(found[loud])}; only rank 0 reports, the others return None"
    )


def _reports_own_value(trial: Trial) -> bool:
    found, values = _reports(trial)
    return bool(found[0] == f"the total is {values[0].item():g}")


_REPORT = Exercise(
    id="1.2",
    title="One reports, all take part",
    answer="report_total",
    properties=(
        Property("no rank waits for ever", _nobody_waits),
        Property("rank 0 reports the total", _rank_0_reports),
        Property("the others return None", _others_are_silent),
    ),
    mistakes=(
        Mistake(
            "Only some ranks call the collective. Those that do wait for the others, which have gone on.",
            lambda trial: trial.hangs(_total_on_rank, _values(trial)),
        ),
        Mistake("This is rank 0's own value: nothing has travelled between the ranks.", _reports_own_value),
    ),
    hints=(
        "Which ranks run the line with `all_reduce`? Which ranks does it need?",
        "A collective is a meeting: every rank of the group must come. What follows can differ by rank.",
        "Call `dist.all_reduce` first, without a condition. Put only the `return` with the text under `if`.",
    ),
)


# ---- 1.3 -------------------------------------------------------------------------------------------------------------


def _sum_on_rank(answer: Any, values: list[torch.Tensor], members: list[int]) -> Any:
    found = answer(values[dist.get_rank()], members)
    return found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found


def _sums(trial: Trial, members: list[int]) -> tuple[list[Any], list[float]]:
    values = _values(trial)
    return trial.run(_sum_on_rank, values, members), [value.item() for value in values]


def _members_get_their_sum(trial: Trial) -> str | None:
    for members in ([1, trial.ranks - 1], [0], list(range(trial.ranks))):
        found, values = _sums(trial, members)
        right = sum(values[rank] for rank in members)
        wrong = next((rank for rank in members if found[rank] != right), None)
        if wrong is not None:
            return f"members {members}: rank {wrong} got {shown(found[wrong])}; right is {right:g}"
    return None


def _others_get_none(trial: Trial) -> str | None:
    members = [1, trial.ranks - 1]
    found, _ = _sums(trial, members)
    wrong = next((rank for rank in range(trial.ranks) if rank not in members and found[rank] is not None), None)
    return None if wrong is None else f"members {members}: rank {wrong} got {shown(found[wrong])}; it is not a member"


def _all_create_the_group(trial: Trial) -> str | None:
    callers = set()
    original = dist.new_group

    def noted(*args: Any, **options: Any) -> Any:
        callers.add(dist.get_rank())
        return original(*args, **options)

    with patch.object(dist, "new_group", noted):
        _sums(trial, [1, trial.ranks - 1])
    if not callers or len(callers) == trial.ranks:
        return None
    return f"only {name_ranks(sorted(callers))} called `new_group`; on real ranks they would wait for the others"


def _sums_all(trial: Trial) -> bool:
    members = [1, trial.ranks - 1]
    found, values = _sums(trial, members)
    return all(found[rank] == sum(values) for rank in members)


def _non_members_answer(trial: Trial) -> bool:
    return "not a member" in (_others_get_none(trial) or "")


_SOME = Exercise(
    id="1.3",
    title="A sum among some ranks",
    answer="sum_among",
    properties=(
        Property("members get their sum", _members_get_their_sum),
        Property("the others get None", _others_get_none),
        Property("all ranks create the group", _all_create_the_group, mock_only=True),
    ),
    mistakes=(
        Mistake("This is the sum over all ranks: the collective does not know about the group.", _sums_all),
        Mistake(
            "A rank that is not a member returns a number. It has nothing to say: let it return None.",
            _non_members_answer,
        ),
        Mistake(
            "Some ranks wait for others that never come. All ranks create a group together; only members use it.",
            lambda trial: trial.hangs(_sum_on_rank, _values(trial), [1, trial.ranks - 1]),
        ),
    ),
    hints=(
        "Which ranks have to call `dist.new_group`? Which have to call `dist.all_reduce` with that group?",
        "Every rank calls `dist.new_group(members)`, also those that are not in it. Only members use the group.",
        "After `new_group`, non-members return None. Members call `dist.all_reduce(value, group=group)` first.",
    ),
)

EXERCISES = (_MEAN_LOSS, _REPORT, _SOME)
