"""An empty cell and a start cost no more than tests/budgets.toml allows, counted on a real kernel and two ranks."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest

from tests.budgets.measurement import Costs, environment, fewest, open_cluster
from tests.budgets.table import KINDS, PATH, Budgets

WINDOWS = (6, 8, 16)
"""More cells are measured only while a number is exceeded: on a busy machine, timers fall into more windows."""


class Measured(NamedTuple):
    """One measurement."""

    costs: Costs
    loaded: dict[str, list[str]]
    """The forbidden modules that are there, by process."""


BUDGETS = Budgets.read(PATH.read_text(encoding="utf-8"))
DIFFERENT = BUDGETS.other_versions(environment())
"""The counts depend on these versions, so the numbers are compared with no others."""


@functools.cache  # not a fixture: after a failure, it would measure again
def measure() -> Measured:
    with open_cluster() as cluster:
        loaded = cluster.loaded(name for names in BUDGETS.forbidden.values() for name in names)
        costs = cluster.start_costs()
        cluster.warm_up()
        counted: list[Costs] = []
        for windows in () if DIFFERENT else WINDOWS:
            counted.append((cluster.system_calls(windows) or {}) | cluster.cell_costs(windows) | cluster.held())
            costs |= {
                kind: fewest([costs.get(kind, counted[0][kind]), *(each[kind] for each in counted)])
                for kind in counted[0]
            }
            if not BUDGETS.exceeded(costs):
                break
        return Measured(costs, loaded)


def test_no_forbidden_module_is_imported_at_the_start() -> None:
    for process, names in measure().loaded.items():
        found = sorted({*names} & {*BUDGETS.forbidden[process.split()[0]]})
        assert not found, f"{process}: import these on first use, or in the agent once the ranks are up"


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_within_their_budgets(kind: str) -> None:
    if DIFFERENT:
        pytest.skip(f"the budgets hold for other versions: {DIFFERENT}")
    if kind not in measure().costs:
        pytest.skip("needs `perf`, and the right to trace system calls")
    too_large = BUDGETS.exceeded(measure().costs).get(kind)
    if too_large:
        pytest.fail("\n".join(too_large), pytrace=False)


def test_budgets_follow_what_got_cheaper() -> None:
    low = {} if DIFFERENT else BUDGETS.well_below(measure().costs)
    if "start.modules" in low:  # the one kind that no other process can change
        pytest.fail("\n".join(low["start.modules"]), pytrace=False)
    if low:
        pytest.xfail(" ".join(sentence for sentences in low.values() for sentence in sentences))


def test_exceeded_budget_is_one_sentence_with_the_fix() -> None:
    limits: Costs = {"cell.messages": {"rank 0 to agent": 2}, "cell.calls": {"rank 0": 100}}
    budgets = Budgets({}, {"cell.calls": 0.02}, {}, limits)
    assert not budgets.exceeded({"cell.messages": {"rank 0 to agent": 2}, "cell.calls": {"rank 0": 102}})
    found = budgets.exceeded({"cell.messages": {"rank 0 to agent": 3}, "cell.calls": {"rank 0": 103}})
    (sentence,) = found["cell.messages"]
    assert sentence == (
        "cell.messages, rank 0 to agent: 3, the budget is 2 (messages on a socket). "
        "Make it cheaper, or raise the number in tests/budgets.toml in a commit that says why."
    )
    assert "rank 0: 103, the budget is 100 and 2%" in found["cell.calls"][0]
    assert budgets.exceeded({"cell.messages": {"a new socket": 1}})


def test_update_only_lowers() -> None:
    before = Budgets(
        {"python": "3"},
        {"cell.calls": 0.02},
        {"rank": ["sympy"]},
        {
            "cell.calls": {"notebook": 100, "rank 0": 1000},
            "cell.messages": {"a": 2, "b": 1},
            "cell.system_calls": {"x": 1},
        },
    )
    now = before.lowered({"cell.calls": {"notebook": 99.5, "rank 0": 900}, "cell.messages": {"a": 3}}, {"python": "3"})
    assert now.limits == {
        "cell.calls": {"notebook": 100, "rank 0": 900},
        "cell.messages": {"a": 2},
        "cell.system_calls": {"x": 1},
    }
    again = Budgets.read(now.text())
    assert (again.environment, again.slack, again.forbidden) == (now.environment, now.slack, now.forbidden)
    assert {kind: limits for kind, limits in again.limits.items() if limits} == now.limits
