"""Which ranks are not where the others are: replicas whose digests differ, and ranks that are a step apart."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from axon_nb.cluster.cells.abort import cut_sequence_number, progressing_group
from axon_nb.cluster.divergence import (
    NumbersVerdict,
    find_difference,
    find_non_finite,
    is_before,
)
from axon_nb.cluster.recovery.repair import describe_diverged_steps
from axon_nb.cluster.transfer import plan_sync
from axon_nb.errors import UsageError
from axon_nb.records.protocol.recovery import OptimizerReport
from axon_nb.records.protocol.transfer import SyncRecord
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


def optimizer(steps: int, **other: Any) -> OptimizerReport:
    reported = {"number": 0, "name": "adam", "before": 5, "shapes": "s", "not_replicated": "", "communicated": True}
    return OptimizerReport(**{**reported, "steps": steps, **other})


def test_ranks_a_step_apart_are_reported_with_fix() -> None:
    reports = {rank: [optimizer(12 if rank < 2 else 11)] for rank in range(4)}
    assert describe_diverged_steps(reports) == [
        (
            "Ranks 0-1 are at step 12 of `adam`, ranks 2-3 at 11. "
            "Run `%distributed sync` to copy models and optimizers of rank 0 to all ranks."
        )
    ]


def test_single_rank_and_split_model_are_worded_correctly() -> None:
    reports = {
        rank: [optimizer(7 if rank == 3 else 6, name="", not_replicated="is sharded over ranks")] for rank in range(4)
    }
    assert describe_diverged_steps(reports) == [
        (
            "Rank 3 is at step 7 of the optimizer, ranks 0-2 at 6. Its model is sharded over ranks: "
            "load a checkpoint on all ranks, or recreate model and optimizer."
        )
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"steps": 12},
        {"steps": 14},
        {"steps": 11, "before": 4},
        {"steps": 11, "shapes": "another model"},
        {"steps": 11, "communicated": False},
        {"steps": 11, "number": 1},
    ],
)
def test_legitimately_differing_ranks_are_not_reported(other: dict[str, Any]) -> None:
    assert describe_diverged_steps({0: [optimizer(12)], 1: [optimizer(**other)]}) == []


def test_first_step_is_compared_with_the_variable_of_that_name() -> None:
    first, none = optimizer(1, before=0), optimizer(0, before=0, number=-1)
    (line,) = describe_diverged_steps({0: [none, optimizer(0, before=0, number=-1, name="other")], 1: [first]})
    assert line.startswith("Rank 1 is at step 1 of `adam`, rank 0 at 0")
    assert describe_diverged_steps({0: [replace(none, name="other")], 1: [first]}) == []
    assert describe_diverged_steps({0: [none], 1: [none]}) == []


def test_rank_training_alone_is_ignored() -> None:
    assert describe_diverged_steps({0: [optimizer(12)], 1: []}) == []


@pytest.mark.parametrize(
    ("first", "last", "group"),
    [
        ({"0": 3, "": 3}, {"0": 9, "": 9}, "0"),
        ({"0": 3, "1": 5, "": 8}, {"0": 3, "1": 9, "": 12}, "1"),
        ({"0": 3, "": 3}, {"0": 3, "": 3}, None),
    ],
)
def test_cut_is_in_a_group_that_moves_on_all_ranks(
    first: dict[str, int], last: dict[str, int], group: str | None
) -> None:
    assert progressing_group({0: first, 1: first}, {0: last, 1: last}) == group


def test_cut_spans_all_groups_if_none_has_all_ranks() -> None:
    first = {0: {"0": 1, "a": 3, "": 4}, 1: {"0": 1, "b": 3, "": 4}}
    last = {0: {"0": 1, "a": 7, "": 8}, 1: {"0": 1, "b": 7, "": 8}}
    assert progressing_group(first, last) == ""
    assert progressing_group(first, {**last, 1: first[1]}) is None


def test_cut_may_be_in_a_group_created_meanwhile() -> None:
    first, last = {"0": 3, "": 3}, {"0": 3, "new": 1, "": 4}
    assert progressing_group({0: first, 1: first}, {0: last, 1: last}) == "new"
    assert cut_sequence_number("new", {0: first, 1: first}, {0: last, 1: last}, seconds=0.015) == 1 + 2
    fast = {**last, "0": 103}
    assert cut_sequence_number("0", {0: first, 1: first}, {0: fast, 1: fast}, seconds=0.1) == 103 + 40


def has(kind: str = "module", **other: Any) -> SyncRecord:
    return SyncRecord(kind, **{"digest": "d", "bytes": 8, **other})


def test_sync_copies_unsharded_variables_of_all_ranks() -> None:
    reported = {
        0: {
            "ddp": has(),
            "net": has(contained_in="ddp"),
            "sharded": has(obstacle="is sharded over ranks"),
            "mine": has(),
        },
        1: {"ddp": has(), "net": has(contained_in="ddp"), "sharded": has(obstacle="is sharded over ranks")},
    }
    chosen, skipped = plan_sync(reported, 0, ())
    assert chosen == ["ddp"]
    assert skipped == {"sharded": "is sharded over ranks", "mine": "does not exist on rank 1"}


def test_sync_copies_submodule_that_is_whole_elsewhere() -> None:
    reported = {0: {"ddp": has(), "net": has(contained_in="ddp")}, 1: {"ddp": has(), "net": has()}}
    assert plan_sync(reported, 0, ())[0] == ["ddp", "net"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sharded", r"`sharded` is sharded over ranks: load a checkpoint on all ranks"),
        ("nothing", r"`nothing` does not exist on ranks 0-1"),
        ("odd", r"`odd` has different types or shapes on rank 1"),
    ],
)
def test_sync_rejects_named_uncopyable_variables(name: str, says: str) -> None:
    reported = {
        rank: {"sharded": has(obstacle="is sharded over ranks"), "odd": has(digest=str(rank))} for rank in range(2)
    }
    with pytest.raises(UsageError, match=says):
        plan_sync(reported, 0, [name])
