"""Exercise 7.2: attention whose keys go round a ring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.exercises.nb07.attention import attend, looks_back
from axon_course.memory import PeakBytes
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.records.units import format_bytes

_TOLERANCE = 1e-10
_MANY_RANKS = 8


class _Text(NamedTuple):
    """Queries, keys, values and positions of a text's tokens: one tensor per rank of each."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    positions: list[torch.Tensor]


class _Found(NamedTuple):
    """What a rank has seen."""

    result: Any
    sent: int
    sent_early: bool
    """Whether a message had left when the rank began to compute."""
    peak: int
    """The most bytes that it had at a time."""


def _on_rank(answer: Any, text: _Text) -> _Found:
    early: list[bool] = []
    with calls() as counted, PeakBytes() as peak:

        def counting(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            early.append(counted.of("send").calls > 0)
            return attend(*args)

        result = answer(counting, *(parts[dist.get_rank()] for parts in text))
    return _Found(result, counted.sent, bool(early) and early[0], peak.bytes)


def _text(trial: Trial, tokens: int, *, ranks: int | None = None, width: int = 4, scale: float = 1.0) -> _Text:
    """Return a text with `tokens` of each rank, in one piece."""
    n = ranks or trial.ranks
    generator = trial.generator(f"text {tokens} {n} {scale}")
    q, k, v = torch.randn(3, n, tokens, width, generator=generator, dtype=torch.float64)
    return _Text(list(q * scale), list(k), list(v), list(torch.arange(n * tokens).view(n, tokens)))


def _shuffled(trial: Trial) -> _Text:
    """Return a text whose tokens are dealt out in any order."""
    text = _text(trial, 3)
    order = torch.randperm(3 * trial.ranks, generator=trial.generator("order"))
    return text._replace(positions=list(order.view(trial.ranks, 3)))


def _by_rank(text: _Text, blocks: Callable[[int], list[int]], key_positions: Callable[[int, int], int]) -> Any:
    """Return, for each rank, attention to the blocks of some ranks, with the positions of other ranks' keys."""
    return [
        attend(
            text.q[rank],
            torch.cat([text.k[block] for block in blocks(rank)]),
            torch.cat([text.v[block] for block in blocks(rank)]),
            looks_back(
                text.positions[rank],
                torch.cat([text.positions[key_positions(rank, block)] for block in blocks(rank)]),
            ),
        )[0]
        for rank in range(len(text.q))
    ]


def _right(text: _Text) -> Any:
    return _by_rank(text, lambda rank: list(range(len(text.q))), lambda rank, block: block)


def _compare(trial: Trial, text: _Text, expected: Any, case: str, ranks: int | None = None) -> str | None:
    found = [seen.result for seen in trial.run(_on_rank, text, ranks=ranks)]
    return first_difference(found, expected, case, tolerance=_TOLERANCE)


def _one_token(trial: Trial) -> str | None:
    text = _text(trial, 1)
    return _compare(trial, text, _right(text), "one token per rank")


def _several_tokens(trial: Trial) -> str | None:
    text = _text(trial, 3)
    return _compare(trial, text, _right(text), "3 tokens per rank")


def _any_order(trial: Trial) -> str | None:
    text = _shuffled(trial)
    return _compare(trial, text, _right(text), f"rank 0 has tokens {text.positions[0].tolist()}")


def _large_scores(trial: Trial) -> str | None:
    text = _text(trial, 3, scale=5000.0)
    return _compare(trial, text, _right(text), "scores in the thousands")


def _other_sizes(trial: Trial) -> str | None:
    for ranks in (1, 2, 3):
        text = _text(trial, 2, ranks=ranks)
        if sentence := _compare(trial, text, _right(text), f"{ranks} ranks", ranks):
            return sentence
    return None


def _bytes_sent(trial: Trial) -> tuple[int, int]:
    """Return the most that a rank has sent, and the bytes of one rank's keys, values and positions."""
    text = _text(trial, 4)
    block = text.k[0].nbytes + text.v[0].nbytes + text.positions[0].nbytes
    return max(seen.sent for seen in trial.run(_on_rank, text)), block


def _passes(trial: Trial) -> str | None:
    sent, block = _bytes_sent(trial)
    if sent <= (trial.ranks - 1) * block:
        return None
    return (
        f"a rank sent {format_bytes(sent)}; {trial.ranks - 1} passes of keys, values and positions are "
        f"{format_bytes((trial.ranks - 1) * block)}"
    )


def _sends_early(trial: Trial) -> str | None:
    late = [rank for rank, seen in enumerate(trial.run(_on_rank, _text(trial, 3))) if not seen.sent_early]
    return f"rank {late[0]} had not begun to send when it began to compute" if late else None


def _peak(trial: Trial) -> float:
    """The most that a rank has had at a time, in blocks of keys and values."""
    text = _text(trial, 32, ranks=_MANY_RANKS, width=64)
    found = trial.run(_on_rank, text, ranks=_MANY_RANKS, synchronous_sends=True)  # else, messages wait on the rank
    peak = max(seen.peak for seen in found)
    return float(peak) / (text.k[0].nbytes + text.v[0].nbytes)


def _keeps_little(trial: Trial) -> str | None:
    peak = _peak(trial)
    if peak < _MANY_RANKS:
        return None
    return f"{_MANY_RANKS} ranks: a rank had {peak:.0f} blocks' worth of numbers at the worst moment; 7 are enough"


def _own_only(text: _Text) -> Any:
    return _by_rank(text, lambda rank: [rank], lambda rank, block: block)


def _plain_mean(text: _Text) -> Any:
    def of(other: int) -> Any:
        return _by_rank(text, lambda rank: [other], lambda rank, block: block)

    parts = [of(other) for other in range(len(text.q))]
    return [torch.stack(blocks).mean(dim=0) for blocks in zip(*parts, strict=True)]


def _positions_at_home(text: _Text) -> Any:
    return _by_rank(text, lambda rank: list(range(len(text.q))), lambda rank, block: rank)


def _makes(trial: Trial, wrong: Callable[[_Text], Any]) -> bool:
    text = _text(trial, 3)
    return _compare(trial, text, wrong(text), "") is None


def _one_pass_more(trial: Trial) -> bool:
    sent, block = _bytes_sent(trial)
    return bool(trial.ranks * block * 0.9 <= sent <= trial.ranks * block)


RING = Exercise(
    id="7.2",
    title="Keys go round",
    answer="ring_attention",
    properties=(
        Property("one token per rank", _one_token),
        Property("several tokens per rank", _several_tokens),
        Property("tokens in any order", _any_order),
        Property("scores in the thousands", _large_scores),
        Property("1, 2 and 3 ranks", _other_sizes, mock_only=True),
        Property("n - 1 passes", _passes),
        Property("sends while it computes", _sends_early),
        Property("no rank has all keys", _keeps_little, mock_only=True),
    ),
    mistakes=(
        Mistake("Each rank has looked at its own tokens only.", lambda trial: _makes(trial, _own_only)),
        Mistake(
            "The parts are joined by a plain mean. Each has a weight, which its `lse` knows: see 7.1.",
            lambda trial: _makes(trial, _plain_mean),
        ),
        Mistake(
            "The keys have travelled, and their positions have stayed at home: the mask belongs to other keys.",
            lambda trial: _makes(trial, _positions_at_home),
        ),
        Mistake(
            "One pass too many: what a rank gets in the last one are its own keys, which it has seen.", _one_pass_more
        ),
        Mistake(
            (
                "All keys are on every rank at the worst moment. Then a longer text does not fit, which is why we came "
                "here."
            ),
            lambda trial: not _several_tokens(trial) and _peak(trial) >= _MANY_RANKS,
        ),
        Mistake(
            "It computes first and sends then, so the others wait for what it could have sent long ago.",
            lambda trial: not _several_tokens(trial) and bool(_sends_early(trial)),
        ),
    ),
    hints=(
        (
            "In each of n steps, a rank attends to the block that it has, and joins the result to what it has so far. "
            "In between, the blocks move one place to the right. What belongs to a block besides keys and values?"
        ),
        (
            "Begin with your own block, which is never quite masked. In every step but the last: `isend` keys, values "
            "and positions to the right, `irecv` three empty tensors from the left, then attend, then wait for all six."
        ),
        (
            "`new, new_lse = attend(q, k, v, positions[:, None] >= key_positions)`. Joined: `share = torch.sigmoid("
            "new_lse - lse)[:, None]`, `out = out + share * (new - out)`, `lse = torch.logaddexp(lse, new_lse)`."
        ),
    ),
)
