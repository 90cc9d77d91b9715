"""Exercise 6.4: the loss of logits of which each rank has some words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.replays import Replay, replay_calls
from axon_course.trials import Trial
from axon_nb.comm.calls import calls

_TOLERANCE = 1e-9
_TOKENS, _WORDS = 6, 32
"""Tokens, and words of a rank."""
_NUMBERS_PER_TOKEN = 4
"""What each rank may send to another for a token."""


@dataclass(frozen=True)
class _Computed:
    """What a rank has computed."""

    loss: Any
    gradient: torch.Tensor | None
    """Of its logits."""
    num_calls: int
    """Of forward."""
    sent: int
    """Bytes of forward."""
    backward_sent: int


def _on_rank(answer: Any, logits: torch.Tensor, targets: torch.Tensor, backward: bool) -> _Computed:
    mine = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    with calls() as forward_calls:
        loss = answer(mine, targets)
    with calls() as backward_calls:
        if backward:
            loss.backward()
    value = loss.detach() if isinstance(loss, torch.Tensor) else loss
    return _Computed(value, mine.grad, forward_calls.num_calls, forward_calls.sent, backward_calls.sent)


def _case(trial: Trial, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of all words, and targets on the first, the last and other ranks."""
    generator = trial.generator(f"logits {scale}")
    words = _WORDS * trial.ranks
    logits = scale * torch.randn(_TOKENS, words, generator=generator, dtype=torch.float64)
    targets = torch.randint(words, (_TOKENS,), generator=generator)
    targets[:2] = torch.tensor([0, words - 1])
    return logits, targets


def _forward(trial: Trial, scale: float = 3.0) -> list[Any]:
    return [rank.loss for rank in trial.run(_on_rank, *_case(trial, scale), False)]


def _step(trial: Trial) -> list[_Computed]:
    found: list[_Computed] = trial.run(_on_rank, *_case(trial), True)
    return found


def _loss_differs(trial: Trial, scale: float, case: str) -> str | None:
    expected = [functional.cross_entropy(*_case(trial, scale))] * trial.ranks
    return first_difference(_forward(trial, scale), expected, case, tolerance=_TOLERANCE * scale)


def _loss_equals(trial: Trial) -> str | None:
    return _loss_differs(trial, 3.0, f"{_TOKENS} tokens, {_WORDS * trial.ranks} words")


def _large_logits(trial: Trial) -> str | None:
    return _loss_differs(trial, 1e4, "logits of many thousands")


def _gradients(trial: Trial) -> list[torch.Tensor]:
    logits, targets = _case(trial)
    logits.requires_grad_()
    functional.cross_entropy(logits, targets).backward()
    assert logits.grad is not None
    return list(logits.grad.chunk(trial.ranks, dim=1))


def _gradients_differ(trial: Trial, factor: float = 1.0) -> str | None:
    expected = [factor * part for part in _gradients(trial)]
    return first_difference(
        [rank.gradient for rank in _step(trial)], expected, "gradient of its logits", tolerance=_TOLERANCE
    )


def _sends_little(trial: Trial) -> str | None:
    allowed = _NUMBERS_PER_TOKEN * trial.ranks
    for rank, computed in enumerate(_step(trial)):
        numbers = computed.sent // 8 // _TOKENS
        if numbers > allowed:
            return f"rank {rank} sent {numbers} numbers per token; {allowed} are enough, however many words there are"
        if computed.backward_sent:
            return f"rank {rank} sent {computed.backward_sent:,} bytes in backward; nothing is missing there"
    return None


def _computes(trial: Trial, wrong: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> bool:
    """Whether each rank has what a wrong rule says; it gets all logits, all targets and the rank."""
    logits, targets = _case(trial)
    expected = [wrong(logits, targets, rank) for rank in range(trial.ranks)]
    return first_difference(_forward(trial), expected, "", tolerance=_TOLERANCE) is None


def _parts(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return logits.chunk(logits.shape[1] // _WORDS, dim=1)


def _own_maximum(logits: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the loss if each rank subtracts its own maximum."""
    parts = _parts(logits)
    right = logits.gather(1, targets[:, None])[:, 0]
    total = torch.stack([(part - part.amax(1, keepdim=True)).exp().sum(1) for part in parts]).sum(0)
    return (total.log() + parts[rank].amax(1) - right).mean()


def _word_everywhere(logits: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the loss if each rank takes the word at the target's place among its own."""
    index = targets[:, None] % _WORDS
    taken = torch.stack([part.gather(1, index)[:, 0] for part in _parts(logits)]).sum(0)
    return (logits.logsumexp(1) - taken).mean()


def _own_words(logits: torch.Tensor, targets: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the loss if the sum is over the rank's words, and the right word that of all ranks."""
    right = logits.gather(1, targets[:, None])[:, 0]
    return (_parts(logits)[rank].logsumexp(1) - right).mean()


def _calls(trial: Trial) -> Replay:
    return replay_calls(trial, "The calls of your loss", _on_rank, *_case(trial), True)


LOSS = Exercise(
    id="6.4",
    title="A loss without all logits",
    answer="split_loss",
    properties=(
        Property("the loss, on every rank", _loss_equals),
        Property("large logits do not overflow", _large_logits),
        Property("gradients of the rank's logits", _gradients_differ),
        Property("a few numbers per token travel", _sends_little),
    ),
    mistakes=(
        Mistake(
            "The exponential of a large number is infinite. Subtract a number first, for each token the same on all "
            "ranks.",
            lambda trial: not _loss_equals(trial) and any(not loss.isfinite() for loss in _forward(trial, 1e4)),
        ),
        Mistake(
            "Each rank has subtracted its own maximum, so the sums that were added have different scales.",
            lambda trial: _computes(trial, _own_maximum),
        ),
        Mistake(
            "Each rank has added a logit, but the right word of a token is on one rank; the others have another word "
            "at that place.",
            lambda trial: _computes(trial, _word_everywhere),
        ),
        Mistake(
            "The sum goes over this rank's words only, so each rank has another loss.",
            lambda trial: _computes(trial, _own_words),
        ),
        Mistake(
            "The gradient is as many times too large as there are ranks: all have the same loss, and backward has "
            "added their gradients up.",
            lambda trial: _gradients_differ(trial, trial.ranks) is None,
        ),
        Mistake(
            "All logits came to all ranks. That works, and needs the memory that cutting was meant to save.",
            lambda trial: _loss_equals(trial) is None and "numbers per token" in (_sends_little(trial) or ""),
        ),
    ),
    hints=(
        (
            "Write the loss of one token as a difference of two numbers. For each of the two: what can a rank "
            "contribute that sees only its own words?"
        ),
        (
            "A rank's part of the first number is `torch.logsumexp(logits, 1)`, and `logsumexp` of these parts is that "
            "of all words, without any overflow. Its part of the second is the target's logit, or 0 if another rank "
            "has the word."
        ),
        (
            "Stack both parts and `all_gather` them, detached. Then put your own, not detached, back into the list: "
            "through it the gradient finds its way. The loss is `logsumexp` over ranks of the first parts, less the "
            "sum of the second, and the mean over tokens."
        ),
    ),
    score=Score("calls in forward", 1, lambda trial: float(max(rank.num_calls for rank in _step(trial))), _calls),
)
