"""What `config watch_numbers` has found in a cell: where replicas first differ, or a number ceased to be finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from axon_nb.records.ranks import name_ranks
from axon_nb.records.training.numbers import LAST, NonFinite, StepNumbers

_STAGES = ("weight", "input", "forward", "loss", "backward", "gradient")
"""In the order in which a step computes."""
_WHAT = {
    "weight": "the weight",
    "input": "the input of the model",
    "forward": "the output",
    "loss": "the loss",
    "backward": "the gradient of the input",
    "gradient": "the gradient",
}
_CORRECT = "The optimizer of this step has not used the gradients: correct the cell, and run it again from this step."


@dataclass(frozen=True, slots=True)
class NumbersFinding:
    """The first thing that is wrong."""

    problem: str
    """``differs`` or ``not finite``."""
    stage: str
    """``weight``, ``gradient`` and so on, as in `records.training.numbers.NonFinite`."""
    name: str
    """Path of the parameter or module; may be empty."""
    module: str
    """Class of the module; may be empty."""
    operation: str
    """The function that computed the number; empty: unknown."""
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    """The replicas that agree with each other; empty: which ranks are right cannot be seen, or none is compared."""
    optimizer: int
    step: int
    """The step before whose optimizer it was seen, counted from 0 in this cell; `LAST`: the end of the cell."""
    where: str
    """The line of the cell, such as ``line 7``."""
    more: tuple[str, ...] = ()
    """Other parameters that differ in the same step."""
    can_undo: bool = False
    """Whether `config undo_memory` was on when the cell began."""

    def __str__(self) -> str:
        return f"{self.claim} {self.advice}"

    @property
    def what(self) -> str:
        """What it is, such as ``the gradient of 0.weight``."""
        kind = f" ({self.module})" if self.module else ""
        return f"{_WHAT[self.stage]}{f' of {self.name}{kind}' if self.name else ''}"

    @property
    def when(self) -> str:
        """The step and the line, such as ``in step 7 (line 4)``."""
        place = f" ({self.where})" if self.where else ""
        if self.stage == "weight":
            if self.step == LAST:
                return f"after the last step{place}"
            return f"after step {self.step}{place}" if self.step else f"before the first step{place}"
        return f"in step {self.step + 1}{place}"

    @property
    def claim(self) -> str:
        """What was found, in one sentence."""
        what, ranks = f"{self.what[0].upper()}{self.what[1:]}", name_ranks(self.ranks)
        if self.problem == "not finite":
            by = f", computed by {self.operation}" if self.operation else ""
            return f"{what} is the first number that is not finite, on {ranks}, {self.when}{by}."
        count = len(self.more)
        more = "1 other parameter differs" if count == 1 else f"{count} other parameters differ"
        rest = f" {more}, too." if count else ""
        if not self.others:
            return f"{what} differs between {ranks} {self.when}.{rest}"
        return f"{what} on {ranks} differs from that on {name_ranks(self.others)} {self.when}.{rest}"

    @property
    def advice(self) -> str:
        """What to do next."""
        if self.problem != "differs":
            return _CORRECT
        source = self.others[0] if self.others and 0 in self.ranks else 0
        option = f" --from {source}" if source else ""
        copy = f"Run `%distributed sync{option}` to copy models and optimizers from rank {source}"
        # What differs before the first step may have been so before the cell.
        if self.can_undo and (self.stage, self.step) != ("weight", 0):
            return f"{copy}, load a checkpoint, or take the cell back with `%distributed undo`."
        return f"{copy}, or load a checkpoint."


@dataclass(frozen=True, slots=True)
class NumbersVerdict:
    """What was seen of a cell."""

    finding: NumbersFinding | None
    """None: all replicas are equal and all numbers finite."""
    steps: int
    """Optimizer steps, on the rank that has made most."""
    ranks: tuple[int, ...]
    compared: int
    """Steps and ends of the cell in which replicas were compared."""
    lost: int = 0
    """Steps that a rank had dropped before the notebook asked for them."""

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.finding is not None:
            return self.finding.claim
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        equal = "replicas are equal, and " if self.compared else "no parameter has replicas; "
        return f"Numbers of {steps} on {name_ranks(self.ranks)}: {equal}all gradients and losses are finite."

    @property
    def notes(self) -> list[str]:
        """What else a reader should know."""
        lost = f"{self.lost} steps were not compared: the notebook was busy for too long." if self.lost else ""
        advice = self.finding.advice if self.finding is not None else ""
        return list(filter(None, [advice, lost]))

    def __str__(self) -> str:
        return "\n".join([self.sentence, *self.notes])


def find_difference(details: Mapping[int, StepNumbers], *, can_undo: bool = False) -> NumbersFinding | None:
    """Return the first parameter of a step whose replicas differ; weights come before gradients.

    Args:
        details: The digests of one step by rank.
        can_undo: As in `NumbersFinding`.
    """
    step = next(iter(details.values()))
    for stage in ("weight", "gradient"):
        found = [
            (name, values)
            for index, name in enumerate(step.names)
            for values in _of_replicas(details, index, stage)
            if len(set(values.values())) > 1
        ]
        if found:
            # A backward reaches the last parameters first.
            name, values = found[0] if stage == "weight" else found[-1]
            wrong, right = _odd_ones(values)
            where = step.where if stage == "gradient" or not step.before else step.before
            more = tuple(dict.fromkeys(other for other, _ in found if other != name))
            return NumbersFinding(
                "differs", stage, name, "", "", wrong, right, step.optimizer, step.step, where, more, can_undo
            )  # fmt: skip
    return None


def _of_replicas(details: Mapping[int, StepNumbers], index: int, stage: str) -> list[dict[int, int]]:
    """Return the checksums of one parameter, by rank, for each group of ranks that are connected by what they share."""
    groups: list[set[int]] = []
    for step in details.values():
        for ranks, members in step.sets:
            if index in members:
                joined = set(ranks) & details.keys()
                apart = [group for group in groups if not group & joined]
                joined.update(*(group for group in groups if group & joined))
                groups = [*apart, joined]
    values = []
    for group in groups:
        held = {rank: details[rank].weights if stage == "weight" else details[rank].gradients for rank in sorted(group)}
        values.append({rank: numbers[index] for rank, numbers in held.items() if index < len(numbers)})
    return values


def _odd_ones(values: Mapping[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that are wrong, and those that agree; without a majority all of them, and none."""
    (common, count), *_ = Counter(values.values()).most_common(1)
    if 2 * count <= len(values):
        return tuple(values), ()
    wrong = tuple(rank for rank, value in values.items() if value != common)
    return wrong, tuple(rank for rank in values if rank not in wrong)


def find_non_finite(found: Mapping[int, NonFinite]) -> NumbersFinding:
    """Return the first number that is not finite, and the ranks that have it.

    Args:
        found: What each rank found first, by rank; not empty.
    """

    def order(one: NonFinite) -> tuple[int, int, int, int]:
        return one.step, one.optimizer, _STAGES.index(one.stage), one.order

    first = min(found.values(), key=order)
    ranks = tuple(rank for rank, one in sorted(found.items()) if (order(one), one.name) == (order(first), first.name))
    return NumbersFinding(
        "not finite", first.stage, first.name, first.module, first.operation, ranks, (), first.optimizer, first.step,
        first.where,
    )  # fmt: skip


def is_before(difference: NumbersFinding, non_finite: NumbersFinding) -> bool:
    """Whether replicas differed before a number ceased to be finite, rather than because of it."""
    last = float("inf")
    when, other = (
        (last if one.step == LAST else one.step, one.optimizer, one.stage not in ("weight",))
        for one in (difference, non_finite)
    )
    return when < other
