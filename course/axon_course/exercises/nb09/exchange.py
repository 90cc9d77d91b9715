"""Exercise 9.1: tokens travel to their experts, and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from axon_course.comparisons import difference, first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.records.units import format_bytes

_WIDTH = 32
_EXTRA_BYTES = 24
"""What may travel with each token, there and back: which expert it wants."""


class _Case(NamedTuple):
    """Tokens and the experts that they want, by rank."""

    name: str
    tokens: list[torch.Tensor]
    choices: list[torch.Tensor]
    per_rank: int
    """Experts per rank."""

    @property
    def results(self) -> list[torch.Tensor]:
        """What each rank must return: expert e multiplies by e + 1."""
        return [rows * (choice + 1.0)[:, None] for rows, choice in zip(self.tokens, self.choices, strict=True)]


class _Found(NamedTuple):
    """What a rank has seen."""

    result: Any
    gradient: torch.Tensor | None
    """Of the tokens."""
    weight_gradients: list[float | None]
    """Of the rank's experts."""
    sent: int


class _Expert(nn.Module):
    """Multiplies by its number + 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(number + 1.0, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.weight


def _on_rank(answer: Any, case: _Case, backward: bool = False) -> _Found:
    rank = dist.get_rank()
    tokens = case.tokens[rank].requires_grad_(backward)
    experts = [_Expert(rank * case.per_rank + number) for number in range(case.per_rank)]
    with calls() as counted:
        result = answer(tokens, case.choices[rank], experts)
    sent = counted.sent
    if backward and isinstance(result, torch.Tensor) and result.requires_grad:
        (result * (rank + 1)).sum().backward()
    weights = [None if expert.weight.grad is None else expert.weight.grad.item() for expert in experts]
    return _Found(result.detach() if isinstance(result, torch.Tensor) else result, tokens.grad, weights, sent)


def _case(trial: Trial, name: str, counts: list[int], per_rank: int, experts: int | None = None) -> _Case:
    """Return a case with random choices among the first `experts` of all."""
    generator = trial.generator(name)
    high = experts or per_rank * trial.ranks
    return _Case(
        name,
        [torch.randint(-9, 10, (count, _WIDTH), generator=generator).double() for count in counts],
        [torch.randint(0, high, (count,), generator=generator) for count in counts],
        per_rank,
    )


def _neighbours(trial: Trial) -> _Case:
    """One token per rank, for the expert on the right."""
    case = _case(trial, "one token and one expert per rank", [1] * trial.ranks, 1)
    return case._replace(choices=[torch.tensor([(rank + 1) % trial.ranks]) for rank in range(trial.ranks)])


def _one_each(trial: Trial, per_rank: int = 1) -> _Case:
    """Every rank has a token for every expert, in another order."""
    experts = per_rank * trial.ranks
    words = "one expert" if per_rank == 1 else f"{per_rank} experts"
    case = _case(trial, f"{words} per rank", [experts] * trial.ranks, per_rank)
    generator = trial.generator("orders")
    orders = [torch.randperm(experts, generator=generator) for _ in range(trial.ranks)]
    orders[0] = torch.arange(experts).flip(0)
    return case._replace(choices=orders)


def _uneven(trial: Trial) -> _Case:
    return _case(trial, "as many tokens as the rank's number, twice", [2 * rank for rank in range(trial.ranks)], 2)


def _crowded(trial: Trial) -> _Case:
    return _case(trial, "all tokens want expert 0", [3] * trial.ranks, 2, experts=1)


def _compare(trial: Trial, case: _Case) -> str | None:
    found = [rank.result for rank in trial.run(_on_rank, case)]
    return first_difference(found, case.results, case.name)


def _one_expert_per_rank(trial: Trial) -> str | None:
    return _compare(trial, _neighbours(trial)) or _compare(trial, _one_each(trial))


def _two_experts_per_rank(trial: Trial) -> str | None:
    return _compare(trial, _one_each(trial, 2))


def _empty_parts(trial: Trial) -> str | None:
    return _compare(trial, _uneven(trial)) or _compare(trial, _crowded(trial))


def _gradients(trial: Trial) -> str | None:
    for case in (_one_each(trial, 2), _uneven(trial), _crowded(trial)):
        found = trial.run(_on_rank, case, True)
        for rank, seen in enumerate(found):
            if seen.gradient is None:
                return f"{case.name}: rank {rank}'s tokens got no gradient"
            right = ((case.choices[rank] + 1.0).double() * (rank + 1))[:, None].expand(-1, _WIDTH)
            if words := difference(seen.gradient, right):
                return f"{case.name}, gradient of the tokens: rank {rank} {words}"
        for expert in range(case.per_rank * trial.ranks):
            got = found[expert // case.per_rank].weight_gradients[expert % case.per_rank] or 0.0
            pairs = zip(case.tokens, case.choices, strict=True)
            sums = [(rank + 1) * rows[choice == expert].sum().item() for rank, (rows, choice) in enumerate(pairs)]
            if got != sum(sums):
                return f"{case.name}: expert {expert}'s gradient is {got:g}; right is {sum(sums):g}"
    return None


def _travels_once(trial: Trial) -> str | None:
    case = _one_each(trial, 2)
    sent = sum(rank.sent for rank in trial.run(_on_rank, case))
    there_and_back = 2 * sum(rows.nbytes for rows in case.tokens)
    if sent <= there_and_back + _EXTRA_BYTES * sum(map(len, case.tokens)) + 64 * trial.ranks**2:
        return None
    return f"the ranks sent {format_bytes(sent)}; all tokens, there and back, are {format_bytes(there_and_back)}"


def _results_equal(trial: Trial, case: _Case, wrong: list[torch.Tensor]) -> bool:
    return first_difference([rank.result for rank in trial.run(_on_rank, case)], wrong, "") is None


def _sorted_by_expert(trial: Trial) -> bool:
    case = _one_each(trial)
    pairs = zip(case.results, case.choices, strict=True)
    return _results_equal(trial, case, [rows[choice.argsort(stable=True)] for rows, choice in pairs])


def _stays_home(trial: Trial) -> bool:
    case = _one_each(trial, 2)
    pairs = enumerate(zip(case.tokens, case.choices, strict=True))
    return _results_equal(
        trial, case, [rows * (2 * rank + choice % 2 + 1.0)[:, None] for rank, (rows, choice) in pairs]
    )


EXCHANGE = Exercise(
    id="9.1",
    title="There and back",
    answer="through_experts",
    properties=(
        Property("one expert per rank", _one_expert_per_rank),
        Property("two experts per rank", _two_experts_per_rank),
        Property("ranks and experts with nothing to do", _empty_parts),
        Property("gradients of tokens and experts", _gradients),
        Property("tokens travel to their expert only", _travels_once),
    ),
    mistakes=(
        Mistake(
            "The results are right, but in the order in which they travelled. Each belongs to a token: put it there.",
            _sorted_by_expert,
        ),
        Mistake(
            "The tokens stayed at home: each rank asked its own experts, which are other ones on each rank.",
            _stays_home,
        ),
        Mistake(
            (
                "It is right with one expert per rank. With two, an arriving token must say which of them it wants: "
                "what arrives is in the order of the senders."
            ),
            lambda trial: not _one_expert_per_rank(trial) and bool(_two_experts_per_rank(trial)),
        ),
        Mistake(
            (
                "An expert that nobody visits was left out, and so its rank stayed away from a meeting in backward. "
                "Let it compute with no rows: its empty result has a gradient, too."
            ),
            lambda trial: not _empty_parts(trial) and trial.hangs(_on_rank, _crowded(trial), True),
        ),
        Mistake(
            "The values are right, but gradients stop where tokens travel. `dist` moves numbers; who moves gradients?",
            lambda trial: all(rank.gradient is None for rank in trial.run(_on_rank, _one_each(trial, 2), True)),
        ),
        Mistake(
            "It works, but all tokens go to all ranks. Then nothing is gained by spreading the experts.",
            lambda trial: not _empty_parts(trial) and bool(_travels_once(trial)),
        ),
    ),
    hints=(
        (
            "Three parts. Dispatch: sort the rows by expert, count how many go to each rank, and exchange them. "
            "Compute. Combine: the same exchange, the other way round. Begin with one expert per rank."
        ),
        (
            "`order = choice.argsort(stable=True)` sorts, and `torch.bincount(choice, minlength=…)` counts. Send "
            "`choice[order]` in a second exchange: then the receiver knows which of its experts each row wants. "
            "`result[order.argsort()]` undoes the sorting."
        ),
        (
            "`received = all_to_all(torch.tensor(send_sizes))` says how many rows come from each rank, and these are "
            "the `send_sizes` of the way back. In between, for each of your experts: `rows = (wanted == its number)"
            ".nonzero().flatten()`, and compute `expert(arrived[rows])`, even if there are none."
        ),
    ),
)
