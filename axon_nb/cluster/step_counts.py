"""Whether an interrupt or a failure has left ranks a step apart, and what to tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axon_nb.records.ranks import format_ranks

__all__ = ["steps_apart"]


def steps_apart(reports: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[str]:
    """A line for each optimizer of which some ranks have made a step more than others in the last cell.

    Nothing is told where ranks may differ on purpose: other optimizers, other models, other steps before the cell, no
    communication in it, or more than one step between them.

    Args:
        reports: By rank what each says of its optimizers, which are numbered in the order of their first steps; those
            that have made none (-1) are found by their variable's name.
    """
    numbers = sorted({one["number"] for report in reports.values() for one in report} - {-1})
    told = [_tell(found) for number in numbers if len(found := _everywhere(number, reports)) == len(reports)]
    return [line for line in told if line]


def _everywhere(number: int, reports: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[int, Mapping[str, Any]]:
    found = {rank: one for rank, report in reports.items() for one in report if one["number"] == number}
    names = {one["name"] for one in found.values()}
    for rank in reports.keys() - found.keys():
        found.update((rank, one) for one in reports[rank] if one["number"] == -1 and one["name"] in names)
    return dict(sorted(found.items()))


def _tell(optimizers: Mapping[int, Mapping[str, Any]]) -> str:
    first = next(iter(optimizers.values()))
    alike = all(one["shapes"] == first["shapes"] and one["before"] == first["before"] for one in optimizers.values())
    steps = {rank: int(one["steps"]) for rank, one in optimizers.items()}
    apart = max(steps.values()) - min(steps.values())
    if not alike or apart != 1 or not all(one["communicated"] for one in optimizers.values()):
        return ""
    name = f"`{first['name']}`" if first["name"] else "their optimizer"
    ahead, behind = (
        [rank for rank in steps if steps[rank] == step] for step in (max(steps.values()), min(steps.values()))
    )
    verb = "is" if len(ahead) == 1 else "are"
    where = (
        f"{_who(ahead).capitalize()} {verb} at step {steps[ahead[0]]} of {name}, {_who(behind)} at {steps[behind[0]]}"
    )
    reasons = {str(one["apart"]) for one in optimizers.values() if one["apart"]}
    if reasons:
        return f"{where}. Its model {reasons.pop()}: load a checkpoint on all ranks, or build both anew."
    return f"{where}: `%distributed sync` copies models and optimizers of rank 0 to all."


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)}"
