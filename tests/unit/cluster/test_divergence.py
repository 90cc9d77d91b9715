"""What is concluded from the digests of ranks: which replica is the odd one, and what came first."""

from __future__ import annotations

from axon_nb.cluster.divergence import (
    NumbersVerdict,
    find_difference,
    find_non_finite,
    is_before,
)
from axon_nb.records.training.digests import LAST, NonFinite, StepNumbers

NAMES = ("0.weight", "0.bias", "1.weight")
ALL = ((0, 1, 2, 3), (0, 1, 2))


def step(*weights: int, gradients: tuple[int, ...] = (7, 8, 9), number: int = 4, sets: object = (ALL,)) -> StepNumbers:
    return StepNumbers(0, number, "line 5", "line 4", NAMES, sets, weights, gradients)  # type: ignore[arg-type]


def test_minority_is_named_and_weights_come_before_gradients() -> None:
    right = step(1, 2, 3)
    wrong = step(1, 5, 3, gradients=(0, 8, 9))
    found = find_difference({0: right, 1: right, 2: wrong, 3: right})
    assert found is not None
    assert (found.stage, found.name, found.ranks, found.others, found.step) == ("weight", "0.bias", (2,), (0, 1, 3), 4)
    assert found.claim == "The weight of 0.bias on rank 2 differs from that on ranks 0-1,3 after step 4 (line 4)."


def test_undo_is_offered_only_where_it_brings_the_replicas_back() -> None:
    wrong = {
        number: {0: step(1, 2, 3, number=number), 1: step(1, 5, 3, number=number)} for number in (0, 4)
    }  # fmt: skip
    undo, copy = "take the cell back with `%distributed undo`.", "optimizers from rank 0, or load a checkpoint."
    for can_undo, number, end in ((True, 4, undo), (False, 4, copy), (True, 0, copy)):
        found = find_difference(wrong[number], can_undo=can_undo)
        assert found is not None
        assert found.advice.endswith(end), (can_undo, number)


def test_last_gradient_is_named_as_a_backward_computes_it_first() -> None:
    right, wrong = step(1, 2, 3), step(1, 2, 3, gradients=(0, 0, 9))
    found = find_difference({0: wrong, 1: right, 2: right, 3: right})
    assert found is not None
    assert (found.name, found.more) == ("0.bias", ("0.weight",))
    assert found.claim.endswith("in step 5 (line 5). 1 other parameter differs, too.")


def test_of_two_replicas_both_are_named() -> None:
    pairs = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    details = {rank: step(rank % 2, 2, 3, sets=((pair, (0, 1, 2)),)) for rank, pair in pairs.items()}
    assert find_difference(details) is None
    details[3] = step(1, 2, 30, sets=((pairs[3], (0, 1, 2)),))
    found = find_difference(details)
    assert found is not None
    assert (found.name, found.ranks, found.others) == ("1.weight", (1, 3), ())
    assert found.claim == "The weight of 1.weight differs between ranks 1,3 after step 4 (line 4)."


def test_sets_that_overlap_are_joined() -> None:
    sets = {0: ((0, 1), (0, 2)), 1: ((0, 1), (1, 3)), 2: ((2, 3), (0, 2)), 3: ((2, 3), (1, 3))}
    details = {
        rank: step(1 + (rank == 1), 2, 3, sets=tuple((pair, (0, 1, 2)) for pair in pairs))
        for rank, pairs in sets.items()
    }
    found = find_difference(details)
    assert found is not None
    assert (found.ranks, found.others) == ((1,), (0, 2, 3))


def test_first_stage_of_the_first_step_wins() -> None:
    found = find_non_finite(
        {
            0: NonFinite("gradient", "1.weight", where="line 5", optimizer=0, step=3),
            1: NonFinite("forward", "1", "Sqrt", "sqrt", "line 2", order=2, optimizer=0, step=3),
            4: NonFinite("forward", "2", "Linear", "linear", "line 2", order=3, optimizer=0, step=3),
            2: NonFinite("loss", "", where="line 5", optimizer=0, step=3),
            3: NonFinite("weight", "0.weight", where="line 5", optimizer=0, step=4),
        }
    )
    assert (found.ranks, found.stage) == ((1,), "forward")
    assert found.claim == (
        "The output of 1 (Sqrt) is the first number that is not finite, on rank 1, in step 4 (line 2), "
        "computed by sqrt."
    )
    verdict = NumbersVerdict(found, 4, (0, 1, 2, 3), 3)
    assert str(verdict) == f"{found.claim}\n{found.advice}"


def test_different_weights_explain_what_follows_in_the_step_but_no_other_number_does() -> None:
    right, wrong = step(1, 2, 3), step(1, 5, 3)
    weights = find_difference({0: right, 1: right, 2: wrong})
    gradients = find_difference({0: right, 1: right, 2: step(1, 2, 3, gradients=(0, 8, 9))})
    at_end = find_difference({0: step(1, 2, 3, number=LAST), 1: step(1, 2, 4, number=LAST)})
    assert weights is not None
    assert gradients is not None
    assert at_end is not None
    loss = find_non_finite({2: NonFinite("loss", "", optimizer=0, step=4)})
    weight = find_non_finite({2: NonFinite("weight", "0.bias", optimizer=0, step=4)})
    assert is_before(weights, loss)
    assert not is_before(weights, weight)
    assert not is_before(gradients, loss)
    assert not is_before(at_end, loss)
    assert at_end.when == "after the last step (line 4)"


def test_right_cell_gets_one_sentence() -> None:
    verdict = NumbersVerdict(None, 1, (0, 1), 2)
    assert (
        str(verdict) == "Numbers of 1 step on ranks 0-1: replicas are equal, and all gradients and losses are finite."
    )
