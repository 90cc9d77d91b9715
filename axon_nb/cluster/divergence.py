"""`config watch_numbers`: where replicas first differ, and where the first number that is not finite arose.

While a cell runs, the digests of its ranks are compared, to decide whether it must stop.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from axon_nb.cluster.rpc import Answer, RankClient, request_each
from axon_nb.records.protocol.cells import CellEnd
from axon_nb.records.protocol.inspection import NumbersReply, NumbersRequest
from axon_nb.records.ranks import name_ranks, unpack_ranks
from axon_nb.records.training.digests import LAST, NonFinite, StepNumbers
from axon_nb.records.units import count_of

_POLL_INTERVAL_S = 0.2
_SOON_S = 0.02
"""The interval once something is wrong, until all ranks have said what they see."""
_REPLY_TIMEOUT_S = 2.0
_OTHERS_TIMEOUT_S = 1.0
"""How long to wait for the other ranks to reach a step in which something is wrong."""
_REPEAT_TIMEOUT_S = 15.0
"""How long the ranks may take to repeat a forward."""
_MAX_PENDING = 20_000
"""Digests that wait for those of other ranks; the oldest are dropped."""
Key = tuple[int, int, tuple[int, ...]]
"""The step, the optimizer, and the ranks that hold the same."""
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


def sampler_hint(reports: Mapping[int, CellEnd]) -> str:
    """Return a hint if ranks shuffle samples differently before each takes its share; empty if they do not.

    Args:
        reports: What each rank reported at the end of the cell.
    """
    found = {rank: end.draws.sampler for rank, end in sorted(reports.items()) if end.draws and end.draws.sampler}
    first = next(iter(found), 0)
    other = next((rank for rank, text in found.items() if text != found[first]), None)
    if other is None:
        return ""
    return (
        f"Hint: ranks repeat samples and skip others, as each takes its share of another order: {found[first]} on rank "
        f"{first}; {found[other]} on rank {other}. Give the DistributedSampler the same seed and epoch on all ranks."
    )


class DivergenceWatch:
    """Compares the ranks of one cell.

    Args:
        client: The cluster's client.
        run: Id of the cell's run.
        ranks: The ranks that run it.
        stops: Whether the cell ends where something is wrong.
        quiet: Whether nothing is shown while it runs.
    """

    def __init__(self, client: RankClient, run: str, ranks: Sequence[int], *, stops: bool, quiet: bool = False) -> None:
        self._client = client
        self.can_undo = False
        """Whether the cell can be taken back."""
        self._run, self._ranks = run, tuple(ranks)
        self.stops, self._quiet = stops, quiet
        self._next_poll = 0.0
        self._requests: dict[int, Answer[NumbersReply]] = {}
        self._requested_at = 0.0
        self._read: dict[int, int] = dict.fromkeys(ranks, 0)
        """By rank, the number of the next row."""
        self._pending: dict[Key, dict[int, tuple[int, int]]] = {}
        self._steps: dict[int, int] = dict.fromkeys(ranks, 0)
        self._reached: dict[int, tuple[float, int]] = {}
        """By rank, the last step and optimizer that it has made."""
        self._compared = self._lost = 0
        self._wrong: Key | None = None
        """The first step with different digests."""
        self._non_finite: dict[int, NonFinite] = {}
        self._suspected_at: float | None = None
        self._waiting: dict[int, str] = {}
        """By rank, as in `NumbersReply`."""
        self._repeated_at: float | None = None
        """When the ranks were asked to repeat a forward together; None: they were not."""
        self._finding: NumbersFinding | None = None

    def step(self, now: float) -> str:
        """Do what is due; return why the cell must stop, if it must, else an empty text.

        Args:
            now: The time.
        """
        if self._requests:
            if all(answer.done() for answer in self._requests.values()) or now - self._requested_at > _REPLY_TIMEOUT_S:
                replies = {rank: answer.reply() for rank, answer in self._requests.items()}
                self._requests = {}
                self._take({rank: reply for rank, reply in replies.items() if reply is not None})
        elif now >= self._next_poll:
            suspects = self._suspected_at is not None and self._finding is None
            self._next_poll, self._requested_at = now + (_SOON_S if suspects else _POLL_INTERVAL_S), now
            for rank in self._ranks:
                with contextlib.suppress(KeyError):  # it has just died
                    request = NumbersRequest(self._run, self._read[rank], repeat=self._repeated_at is not None)
                    self._requests[rank] = self._client.request(rank, request)
        if self._finding is None and self._is_wrong:
            if self._suspected_at is None:
                self._suspected_at = self._next_poll = now
            if self._is_settled(now, self._suspected_at):
                self._finding = self._find()
                if self._finding is not None and not self.stops and not self._quiet:
                    print(self._finding.claim, file=sys.stderr)
        return str(self._finding) if self.stops and self._finding is not None else ""

    def _is_settled(self, now: float, since: float) -> bool:
        """Whether the ranks have said all that they can; has them repeat a forward if all wait for that."""
        if self._repeated_at is not None:
            is_over = set(self._waiting.values()) == {"repeated"}
            return is_over or now - self._repeated_at > _REPEAT_TIMEOUT_S
        if now - since > _OTHERS_TIMEOUT_S:
            return True
        states = [self._waiting.get(rank, "") for rank in self._ranks]
        if self.stops and all(state == "ready" for state in states):
            self._repeated_at = now
            return False
        return self._have_all_reached() and not (self.stops and "ready" in states)

    @property
    def _is_wrong(self) -> bool:
        return self._wrong is not None or bool(self._non_finite)

    def finish(self) -> NumbersVerdict:
        """Return the verdict when the cell is over; asks the ranks for the rest."""
        self._requests = {}
        requests = {rank: NumbersRequest(self._run, since) for rank, since in self._read.items()}
        self._take(request_each(self._client, requests, timeout_s=_REPLY_TIMEOUT_S))
        if self._finding is None and self._is_wrong:
            self._finding = self._find()
        return NumbersVerdict(self._finding, max(self._steps.values()), self._ranks, self._compared, self._lost)

    def _take(self, replies: dict[int, NumbersReply]) -> None:
        for rank, reply in replies.items():
            sets = {
                int(optimizer): [unpack_ranks(tuple(map(tuple, runs))) for runs in sets]
                for optimizer, sets in reply.sets.items()
            }
            self._read[rank] = reply.next
            self._lost += reply.lost
            self._waiting[rank] = reply.waiting
            if reply.non_finite is not None:
                self._non_finite[rank] = reply.non_finite
            for row in reply.rows:
                self._take_row(rank, row, sets[row[0]])

    def _take_row(self, rank: int, row: Sequence[Any], sets: Sequence[tuple[int, ...]]) -> None:
        optimizer, step, *digests = row
        order = _order(step)
        self._steps[rank] += step != LAST
        self._reached[rank] = order, optimizer
        for index, members in enumerate(sets):
            expected = [member for member in members if member in self._ranks]
            if len(expected) < 2:
                continue
            key = step, optimizer, members
            seen = self._pending.setdefault(key, {})
            seen[rank] = digests[2 * index], digests[2 * index + 1]
            if len(set(seen.values())) > 1:
                if self._wrong is None or (order, optimizer) < (_order(self._wrong[0]), self._wrong[1]):
                    self._wrong = key
            elif len(seen) == len(expected):
                self._compared += 1
                del self._pending[key]
        while len(self._pending) > _MAX_PENDING:
            self._pending.pop(next(iter(self._pending)))

    def _have_all_reached(self) -> bool:
        """Whether no rank can report anything of an earlier step any more."""
        at = [(_order(one.step), one.optimizer) for one in self._non_finite.values()]
        if self._wrong is not None:
            at.append((_order(self._wrong[0]), self._wrong[1]))
        return all(self._reached.get(rank, (-1, 0)) >= min(at) for rank in self._ranks)

    def _find(self) -> NumbersFinding | None:
        non_finite = find_non_finite(self._non_finite) if self._non_finite else None
        difference = None
        if self._wrong is not None:
            step, optimizer, _ = self._wrong
            at = optimizer, step
            requests = {rank: NumbersRequest(self._run, since, at) for rank, since in self._read.items()}
            replies = request_each(self._client, requests, timeout_s=_REPLY_TIMEOUT_S)
            details = {rank: reply.details for rank, reply in replies.items() if reply.details is not None}
            difference = find_difference(details, can_undo=self.can_undo) if details else None
            if difference is None:  # a rank had dropped it, or is gone
                self._wrong, self._lost = None, self._lost + 1
        if difference is None or non_finite is None:
            return difference or non_finite
        return difference if is_before(difference, non_finite) else non_finite


def _order(step: int) -> float:
    return float("inf") if step == LAST else step


class NumbersFinding(NonFinite, frozen=True, kw_only=True):
    """The first thing that is wrong, and where; its step may be `LAST`: the end of the cell."""

    problem: str
    """``differs`` or ``not finite``."""
    ranks: tuple[int, ...]
    others: tuple[int, ...] = ()
    """The replicas that agree with each other; empty: which ranks are right cannot be seen, or none is compared."""
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


class NumbersVerdict(Struct, frozen=True):
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
        steps = count_of(self.steps, "step")
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
                stage,
                name,
                where=where,
                optimizer=step.optimizer,
                step=step.step,
                problem="differs",
                ranks=wrong,
                others=right,
                more=more,
                can_undo=can_undo,
            )
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
    return NumbersFinding(**asdict(first), problem="not finite", ranks=ranks)


def is_before(difference: NumbersFinding, non_finite: NumbersFinding) -> bool:
    """Whether replicas differed before a number ceased to be finite, rather than because of it."""
    last = float("inf")
    when, other = (
        (last if one.step == LAST else one.step, one.optimizer, one.stage not in ("weight",))
        for one in (difference, non_finite)
    )
    return when < other
