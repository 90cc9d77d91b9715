"""Exercise 9.3, a puzzle: a loss that keeps all experts busy."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from axon_course.data import digits
from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_schedule
from axon_course.trials import Trial
from axon_nb.records.spans import Span

_PER_RANK = 2
_STEPS, _BATCH, _LR = 60, 64, 0.02
_MOST_WAITING = 0.15
_LEAST_CORRECT = 0.88


class _Trained(NamedTuple):
    """What a rank has seen after training."""

    visits: list[int]
    """Of its digits, by expert."""
    correct: float


class _Layer:
    """Two of several linear experts for each digit; all ranks have all experts, as they are tiny.

    Args:
        experts: Number of experts.
    """

    def __init__(self, experts: int) -> None:
        generator = torch.Generator().manual_seed(0)  # the same for all learners, who compare their scores
        self.router = (0.2 * torch.randn(experts, 64, generator=generator)).requires_grad_()
        self.experts = (0.1 * torch.randn(experts, 64, 10, generator=generator)).requires_grad_()

    def __call__(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, the router's scores and the two experts that each image visits."""
        scores = (images @ self.router.T).softmax(dim=1)
        top, choice = scores.topk(2)
        everywhere = torch.einsum("bi,eio->beo", images, self.experts)
        visited = everywhere.gather(1, choice[..., None].expand(-1, -1, 10))
        return (top[..., None] * visited).sum(dim=1), scores, choice


def _train_on_rank(answer: Any) -> _Trained:
    rank, n = dist.get_rank(), dist.get_world_size()
    images, labels = (torch.from_numpy(array) for array in digits())
    x, y = images.flatten(1)[rank::n], labels[rank::n]
    layer = _Layer(_PER_RANK * n)
    weights = [layer.router, layer.experts]
    optimizer = torch.optim.Adam(weights, lr=_LR)
    for step in range(_STEPS):
        first = step * _BATCH % (len(x) - _BATCH)
        logits, scores, choice = layer(x[first : first + _BATCH])
        loss = F.cross_entropy(logits, y[first : first + _BATCH]) + answer(scores, choice)
        flat = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, weights)])
        dist.all_reduce(flat)
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight) / n
        optimizer.step()
    with torch.no_grad():
        logits, _, choice = layer(x)
    visits = torch.bincount(choice.flatten(), minlength=_PER_RANK * n).tolist()
    return _Trained(visits, (logits.argmax(dim=1) == y).float().mean().item())


def _visits(trained: list[_Trained]) -> torch.Tensor:
    """The visits of all digits, by rank and its experts."""
    return torch.tensor([rank.visits for rank in trained]).sum(dim=0).view(-1, _PER_RANK)


def _waiting(trained: list[_Trained]) -> float:
    """The share of the time that ranks wait for the busiest one, if each visit takes equally long."""
    visits = _visits(trained).sum(dim=1)
    return 1 - (visits.float().mean() / visits.max()).item()


def _train(trial: Trial) -> list[_Trained]:
    found: list[_Trained] = trial.run(_train_on_rank)
    return found


def _call_on_rank(answer: Any, scores: torch.Tensor) -> tuple[Any, torch.Tensor | None]:
    scores.requires_grad_()
    loss = answer(scores, scores.topk(2).indices)
    if not isinstance(loss, torch.Tensor) or loss.dim():
        return loss, None
    if loss.requires_grad:
        loss.backward()
    return loss.item(), scores.grad


def _scores(trial: Trial, favourite: float) -> torch.Tensor:
    """Scores of 16 tokens per expert; `favourite` is added to the first expert's."""
    experts = _PER_RANK * trial.ranks
    wishes = 3 * torch.eye(experts).repeat(16, 1) + 2 * torch.eye(experts).roll(1, dims=1).repeat(16, 1)
    noise = 0.1 * torch.randn(wishes.shape, generator=trial.generator("scores"))
    wishes = wishes + noise
    wishes[:, 0] += favourite
    return wishes.softmax(dim=1)


def _is_loss(trial: Trial) -> str | None:
    loss, gradient = trial.run(_call_on_rank, _scores(trial, 3.0))[0]
    if gradient is None and not isinstance(loss, float):
        return f"it returned {type(loss).__name__}; it must return a tensor with one number and no dimension"
    if gradient is None or not bool(gradient.any()):
        return "the router gets no gradient from it, so it learns nothing"
    return None


def _prefers_even(trial: Trial) -> str | None:
    even, uneven = (trial.run(_call_on_rank, _scores(trial, favourite))[0][0] for favourite in (0.0, 3.0))
    if even < uneven:
        return None
    return f"with a favourite expert it is {uneven:.4g}, with all equally popular {even:.4g}: not less"


def _still_learns(trial: Trial) -> str | None:
    correct = sum(rank.correct for rank in _train(trial)) / trial.ranks
    return None if correct >= _LEAST_CORRECT else f"only {correct:.0%} of the digits are read right"


def _waits_little(trial: Trial) -> str | None:
    waiting = _waiting(_train(trial))
    return None if waiting <= _MOST_WAITING else f"after training, the ranks wait {waiting:.0%} of the time"


def _is_weak(trial: Trial) -> bool:
    """Whether the loss has the right direction, and training hardly notices it."""
    return not _is_loss(trial) and not _prefers_even(trial) and not _still_learns(trial) and bool(_waits_little(trial))


def _queues(trial: Trial) -> Replay:
    spans = []
    for rank, queues in enumerate(_visits(_train(trial)).tolist()):
        ends = list(itertools.accumulate(queues, initial=0))
        spans += [
            Span(rank, "forward", "F", start, end, microbatch=_PER_RANK * rank + index)
            for index, (start, end) in enumerate(itertools.pairwise(ends))
            if end > start
        ]
    return replay_schedule("What your experts had to do after training", spans, box="the visits of an expert")


BALANCE = Exercise(
    id="9.3",
    title="Keep them all busy",
    answer="balance_loss",
    properties=(
        Property("a loss from which the router learns", _is_loss),
        Property("less if all are equally popular", _prefers_even),
        Property(f"{_LEAST_CORRECT:.0%} of the digits are still read", _still_learns),
        Property(f"ranks wait at most {_MOST_WAITING:.0%}", _waits_little),
    ),
    mistakes=(
        Mistake(
            (
                "It only counts visits, and a count has no gradient: a choice is made or not, nothing in between. The "
                "scores have one."
            ),
            lambda trial: trial.run(_call_on_rank, _scores(trial, 3.0))[0][1] is None,
        ),
        Mistake(
            "It rewards favourites: it grows as the visits become more even.",
            lambda trial: not _is_loss(trial) and bool(_prefers_even(trial)),
        ),
        Mistake(
            "It is so strong that the layer learns to be fair, and not to read.",
            lambda trial: not _is_loss(trial) and not _prefers_even(trial) and bool(_still_learns(trial)),
        ),
        Mistake("The direction is right, but it is too weak: training hardly notices it.", _is_weak),
    ),
    hints=(
        (
            "For each expert you know two numbers: the share of visits that it got, and its mean score. The first has "
            "no gradient. Which combination is large if popular experts also have high scores?"
        ),
        (
            "Multiply the two numbers of each expert, and add up over experts. If all have 1/n of both, that is 1/n; "
            "with favourites it is more. The gradient lowers the scores of those with many visits."
        ),
        (
            "`visits = F.one_hot(choice, num_experts).float().mean(dim=(0, 1))`, and then `strength * num_experts * "
            "(visits * scores.mean(dim=0)).sum()`. Try strengths from 0.1 to 10."
        ),
    ),
    score=Score(
        "share of time in which ranks wait, in %", 1.6, lambda trial: round(100 * _waiting(_train(trial)), 1), _queues
    ),
)
