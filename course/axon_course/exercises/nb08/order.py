"""Exercise 8.1: the order of actions in 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.exercises.nb08.stages import run_order
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.records.training.steps import simulate_orders

Orders = list[list[tuple[str, int]]]
"""What each rank does: (F or B, microbatch)."""

_SIZES = ((2, 2), (2, 4), (4, 4), (4, 8))
_LARGE = (4, 8)
_FEW = ((2, 1), (4, 2), (4, 3))
_FORWARD, _BACKWARD = 1, 2
"""Units of time; backward takes about twice as long."""
_WIDTH = 4
_TOLERANCE = 1e-9


def _all_ranks(answer: Any, stages: int, microbatches: int) -> list[Any]:
    return [answer(rank, stages, microbatches) for rank in range(stages)]


def _orders(trial: Trial, stages: int, microbatches: int) -> Orders:
    found: Orders = trial.run(_all_ranks, stages, microbatches, ranks=1)[0]
    return found


def _case(stages: int, microbatches: int) -> str:
    return f"{stages} stages, {microbatches} microbatch{'es' * (microbatches > 1)}"


def _words(action: str, microbatch: int) -> str:
    return f'("{action}", {microbatch})'


# ---- What holds of a right order -------------------------------------------------------------------------------------


def _complete(trial: Trial, stages: int, microbatches: int) -> str | None:
    wanted = {(action, number) for action in "FB" for number in range(microbatches)}
    found: list[Any] = trial.run(_all_ranks, stages, microbatches, ranks=1)[0]
    for rank, order in enumerate(found):
        if not isinstance(order, list) or any(not isinstance(item, tuple) or len(item) != 2 for item in order):
            return f'rank {rank} returned {order!r}; it must return a list of pairs such as ("F", 0)'
        if unknown := next((item for item in order if item not in wanted), None):
            return f"rank {rank} does {unknown!r}; microbatches are numbered 0 to {microbatches - 1}, actions F or B"
        if twice := next((item for item in order if order.count(item) > 1), None):
            return f"rank {rank} does {_words(*twice)} {order.count(twice)} times"
        if missing := sorted(wanted - set(order), key=lambda item: (item[1], item[0] == "B")):
            return f"rank {rank} never does {_words(*missing[0])}"
    return None


def _needs(action: str, microbatch: int, rank: int, stages: int) -> list[tuple[str, int, int]]:
    """What must be done before an action: (action, microbatch, rank)."""
    if action == "F":
        return [("F", microbatch, rank - 1)] if rank else []
    return [("F", microbatch, rank), *([("B", microbatch, rank + 1)] if rank < stages - 1 else [])]


def _nobody_waits_for_ever(trial: Trial, stages: int, microbatches: int) -> str | None:
    orders = _orders(trial, stages, microbatches)
    done: set[tuple[str, int, int]] = set()
    places = [0] * stages
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and done.issuperset(_needs(*order[places[rank]], rank, stages)):
                done.add((*order[places[rank]], rank))
                places[rank] += 1
                moved = True
    for rank, order in enumerate(orders):
        if places[rank] < len(order):
            action, microbatch, other = next(
                need for need in _needs(*order[places[rank]], rank, stages) if need not in done
            )
            where = "which it does later itself" if other == rank else f"which rank {other} never gets to"
            return (
                f"rank {rank} stops at {_words(*order[places[rank]])}: it needs {_words(action, microbatch)}, {where}"
            )
    return None


def _units(orders: Orders) -> float:
    """How long a step takes with stages that are equally fast, and messages that take no time.

    Raises:
        ValueError: it never ends.
    """
    actions = [[(action, rank, number) for action, number in order] for rank, order in enumerate(orders)]
    lengths = {"F": [_FORWARD] * len(orders), "B": [_BACKWARD] * len(orders)}
    count = 1 + max(number for order in orders for _, number in order)
    times = simulate_orders(actions, lengths, num_stages=len(orders), num_microbatches=count)
    return max(rank[-1][1] for rank in times)


def _least_units(stages: int, microbatches: int) -> int:
    return (microbatches + stages - 1) * (_FORWARD + _BACKWARD)


def _shortest(trial: Trial, stages: int, microbatches: int) -> str | None:
    found, least = _units(_orders(trial, stages, microbatches)), _least_units(stages, microbatches)
    if found <= least:
        return None
    return f"with forwards of {_FORWARD} and backwards of {_BACKWARD} units, a step takes {found:g}; {least} are enough"


def _peaks(orders: Orders) -> list[int]:
    """The most microbatches that each rank has had forward but not yet backward."""
    peaks = []
    for order in orders:
        live = peak = 0
        for action, _ in order:
            live += 1 if action == "F" else -1
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def _few_live(trial: Trial, stages: int, microbatches: int) -> str | None:
    for rank, peak in enumerate(_peaks(_orders(trial, stages, microbatches))):
        enough = min(microbatches, stages - rank)
        if peak > enough:
            return f"rank {rank} keeps {peak} microbatches alive at its worst moment; {enough} would do"
    return None


_LOOKS = (_complete, _nobody_waits_for_ever, _shortest, _few_live)


def _for_sizes(look: Callable[[Trial, int, int], str | None]) -> Callable[[Trial], str | None]:
    def test(trial: Trial) -> str | None:
        for size in _SIZES:
            if sentence := look(trial, *size):
                return f"{_case(*size)}: {sentence}"
        return None

    return test


def _few_microbatches(trial: Trial) -> str | None:
    for size in _FEW:
        for look in _LOOKS:
            if sentence := look(trial, *size):
                return f"{_case(*size)}: {sentence}"
    return None


# ---- For real --------------------------------------------------------------------------------------------------------


def _stage(weight: torch.Tensor) -> nn.Sequential:
    linear = nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return nn.Sequential(linear, nn.Tanh())


def _run_on_rank(
    answer: Any, weights: list[torch.Tensor], batch: torch.Tensor, targets: torch.Tensor, microbatches: int
) -> tuple[torch.Tensor, int]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    stage = _stage(weights[rank])
    with calls() as counted:
        run_order(answer(rank, ranks, microbatches), stage, batch, targets)
    gradient = stage[0].weight.grad
    assert isinstance(gradient, torch.Tensor)
    return gradient, counted.of("send").calls


def _trains_like_one(trial: Trial) -> str | None:
    microbatches = 2 * trial.ranks
    generator = trial.generator("pipeline")
    weights = list(torch.rand(trial.ranks, _WIDTH, _WIDTH, generator=generator, dtype=torch.float64) - 0.5)
    batch, targets = torch.rand(2, 2 * microbatches, _WIDTH, generator=generator, dtype=torch.float64)
    whole = nn.Sequential(*map(_stage, weights))
    nn.functional.mse_loss(whole(batch), targets).backward()
    found = trial.run(_run_on_rank, weights, batch, targets, microbatches)
    case = f"{_case(trial.ranks, microbatches)}, gradient"
    expected = [weight.grad for weight in whole.parameters() if weight.grad is not None]
    if sentence := first_difference([gradient for gradient, _ in found], expected, case, tolerance=_TOLERANCE):
        return sentence
    for rank, (_, sent) in enumerate(found):
        wanted = microbatches * ((rank > 0) + (rank < trial.ranks - 1))
        if sent and sent != wanted:
            return f"rank {rank} sent {sent} messages; it must be {wanted}"
    return None


# ---- Known mistakes --------------------------------------------------------------------------------------------------


def _all_forwards_first(trial: Trial) -> bool:
    return all([action for action, _ in order] == ["F"] * 8 + ["B"] * 8 for order in _orders(trial, *_LARGE))


def _one_at_a_time(trial: Trial) -> bool:
    return all([action for action, _ in order] == ["F", "B"] * 8 for order in _orders(trial, *_LARGE))


def _same_on_every_rank(trial: Trial) -> bool:
    orders = _orders(trial, *_LARGE)
    return _complete(trial, *_LARGE) is None and all(order == orders[0] for order in orders)


def _other_way_round(trial: Trial) -> bool:
    return _units(_orders(trial, *_LARGE)[::-1]) == _least_units(*_LARGE)


def _backwards_missing(trial: Trial) -> bool:
    actions = [[action for action, _ in order] for order in _orders(trial, *_LARGE)]
    return any(order.count("B") < order.count("F") for order in actions)


def _backward_first(trial: Trial) -> bool:
    return any(order[0][0] == "B" for order in _orders(trial, *_LARGE))


def _one_too_many(trial: Trial) -> bool:
    stages, _ = _LARGE
    return _peaks(_orders(trial, *_LARGE)) == [stages - rank + 1 for rank in range(stages)]


ORDER = Exercise(
    id="8.1",
    title="The order of 1F1B",
    answer="one_f_one_b",
    properties=(
        Property("each microbatch goes forward once, and back once", _for_sizes(_complete), mock_only=True),
        Property("nobody waits for ever", _for_sizes(_nobody_waits_for_ever), mock_only=True),
        Property("no step is shorter", _for_sizes(_shortest), mock_only=True),
        Property("as few live microbatches as possible", _for_sizes(_few_live), mock_only=True),
        Property("fewer microbatches than stages", _few_microbatches, mock_only=True),
        Property("run for real, it trains like one process", _trains_like_one),
    ),
    mistakes=(
        Mistake(
            "This is GPipe: all forwards, then all backwards. So every microbatch stays alive until the last has come.",
            _all_forwards_first,
        ),
        Mistake(
            "A microbatch travels all the way there and back before the next one leaves: three of four ranks wait.",
            _one_at_a_time,
        ),
        Mistake(
            "All ranks do the same. But the last rank can turn a microbatch round at once, and the first cannot.",
            _same_on_every_rank,
        ),
        Mistake(
            "This is the wrong way round: it is the first rank that waits longest for its first gradient.",
            _other_way_round,
        ),
        Mistake("Some microbatches never come back: when no forward is left, there are backwards.", _backwards_missing),
        Mistake("A rank begins with a backward, and has nothing yet to go back through.", _backward_first),
        Mistake(
            "Every rank is one forward further ahead than it needs. How many microbatches must the last rank hold?",
            _one_too_many,
        ),
    ),
    hints=(
        (
            "Take four coins and play it on paper. When does the last rank do its first backward? Until that "
            "gradient is back, how many forwards can rank 0 do usefully?"
        ),
        (
            "Each order has three parts: a warm-up of forwards only, then one backward and one forward in turn, and "
            "at the end backwards only. Only the length of the warm-up differs between ranks."
        ),
        (
            "The warm-up has `min(microbatches, stages - rank)` forwards. Then, for each microbatch in order: its "
            "backward, and after it the next forward, if there is one left."
        ),
    ),
)
