"""An empty cell and a start cost no more than tests/budgets.toml allows, counted on a real kernel and two ranks."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def budgets() -> Budgets:
    return Budgets.read(PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def measured(budgets: Budgets) -> Measured:
    with open_cluster() as cluster:
        loaded = cluster.loaded(name for names in budgets.forbidden.values() for name in names)
        costs = cluster.start_costs()
        cluster.warm_up()
        counted: list[Costs] = []
        for windows in () if budgets.other_versions(environment()) else WINDOWS:
            counted.append((cluster.system_calls(windows) or {}) | cluster.cell_costs(windows))
            costs |= {kind: fewest(each[kind] for each in counted) for kind in counted[0]}
            if not any(kind.startswith("cell.") for kind in budgets.exceeded(costs)):
                break
        return Measured(costs, loaded)


def test_no_forbidden_module_is_imported_at_the_start(measured: Measured, budgets: Budgets) -> None:
    found = {
        process: sorted({*names} & {*budgets.forbidden[process.split()[0]]})
        for process, names in measured.loaded.items()
    }
    assert not any(found.values()), f"import these on first use, or in the agent once the ranks are up: {found}"


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_within_their_budget(kind: str, measured: Measured, budgets: Budgets) -> None:
    if other := budgets.other_versions(environment()):
        pytest.skip(f"the budgets hold for other versions: {other}")
    if kind not in measured.costs:
        pytest.skip("needs `perf`, and the right to trace system calls")
    too_large = budgets.exceeded(measured.costs).get(kind, [])
    assert not too_large, "\n".join(too_large)


def test_budgets_follow_what_got_cheaper(measured: Measured, budgets: Budgets) -> None:
    if not budgets.other_versions(environment()) and (low := budgets.well_below(measured.costs)):
        pytest.xfail(f"run `python -m tests.budgets --update`, these are far below their budgets: {'; '.join(low)}")


def test_exceeded_budget_is_one_sentence_with_the_fix(budgets: Budgets) -> None:
    limits = {"cell.messages": {"rank 0 to agent": 2}, "cell.calls": {"rank 0": 100}}
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
