"""Ranks that are a step apart are named, and only those."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from axon_nb.cluster.cells.abort import cut_sequence_number, progressing_group
from axon_nb.cluster.recovery.repair import describe_diverged_steps
from axon_nb.cluster.transfer import plan_sync
from axon_nb.errors import UsageError
from axon_nb.records.protocol.recovery import OptimizerReport
from axon_nb.records.protocol.transfer import SyncRecord


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
