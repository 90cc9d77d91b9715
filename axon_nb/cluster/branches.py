"""`%%distributed --branch lr=1e-3,3e-4`: a cell runs once per value of a variable, each time from the same state."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from axon_nb.cluster.inspection.status import request_job
from axon_nb.cluster.launch.engines import ask
from axon_nb.cluster.snapshot import Trials
from axon_nb.errors import UsageError
from axon_nb.records.protocol.inspection import TakePeak
from axon_nb.records.training.job import JobReport, MetricRow

if TYPE_CHECKING:
    import pandas as pd

    from axon_nb.cluster.cells.driver import RunsCell
    from axon_nb.cluster.cells.result import CellResult
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.cluster.state import ClusterState

_NOT_RUN = "not run"
_CHOICES: Mapping[str, Callable[..., str]] = {"best": min, "lowest": min, "highest": max}


class BranchPlan(Struct, frozen=True):
    """What `--branch` and `--keep` say."""

    name: str
    """The variable."""
    values: tuple[str, ...]
    """Its values, as Python expressions."""
    keep: str = ""
    """A value, or ``best:loss``, ``lowest:loss``, ``highest:accuracy``; empty: none."""


class Branch(Struct, frozen=True):
    """One run of the cell."""

    value: str
    """The value of the variable, as an expression."""
    state: str
    """``ok``, ``failed``, ``timed_out``, or ``not run``."""
    error: str = ""
    """What failed first."""
    seconds: float = 0.0
    """On the slowest rank."""
    peak_bytes: int = 0
    """Most memory that a rank used meanwhile: of the GPU, else resident."""
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """By metric of `axon_nb.log`, the steps and values on the first rank that logged any."""

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric; None if it was not logged."""
        curve = self.curves.get(metric)
        return curve[-1][1] if curve else None


class Branches(Struct, frozen=True):
    """The runs of one cell."""

    name: str
    """The variable."""
    rows: Sequence[Branch]
    kept: str = ""
    """The value whose state the ranks have; empty: they have the state from before."""

    @property
    def metrics(self) -> list[str]:
        """The metrics that any of them logged, in order of appearance."""
        return list(dict.fromkeys(metric for row in self.rows for metric in row.curves))

    def to_frame(self) -> pd.DataFrame:
        """Return one row per run: the value, the state, the last value of each metric, seconds and peak memory."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    self.name: row.value,
                    "state": row.state,
                    **{metric: row.last(metric) for metric in self.metrics},
                    "seconds": row.seconds,
                    "peak_bytes": row.peak_bytes,
                    "error": row.error,
                }
                for row in self.rows
            ]
        )


def read_plan(branch: str, keep: str | None) -> BranchPlan:
    """Read the options.

    Args:
        branch: Such as ``lr=1e-3,3e-4``.
        keep: Such as ``best:loss``; None: nothing is kept.

    Raises:
        UsageError: they are invalid.
    """
    name, equals, text = branch.partition("=")
    name = name.strip()
    try:
        values = ast.parse(f"({text},)", mode="eval").body
    except SyntaxError:
        values = None
    if not (name.isidentifier() and equals and text.strip() and isinstance(values, ast.Tuple)):
        raise UsageError(f"--branch {branch}: name a variable and its values, such as --branch lr=1e-3,3e-4.")
    plan = BranchPlan(name, tuple(ast.unparse(value) for value in values.elts))
    if keep is None:
        return plan
    how, colon, metric = keep.partition(":")
    if colon and how in _CHOICES and metric:
        return replace(plan, keep=keep)
    value = keep.removeprefix(f"{name}=")
    try:
        value = ast.unparse(ast.parse(value, mode="eval"))
    except SyntaxError:
        value = ""
    if value not in plan.values:
        raise UsageError(
            f"--keep {keep}: must be one of the values {', '.join(plan.values)}, or best:loss (the lowest), "
            "or highest:accuracy, with a name that axon_nb.log reports."
        )
    return replace(plan, keep=value)


async def run_branches(
    cluster: Cluster, run: RunsCell, code: str, options: dict[str, Any], *, plan: BranchPlan
) -> Branches:
    """Run the cell for each value, restore the state after each, and run the one to keep again.

    A run that fails, times out or kills ranks is a row, and the others go on. Ranks that died are replaced, and get
    the state from before, if the cell runs on all ranks and a host agent has kept it; otherwise the others cannot run.

    Args:
        cluster: The cluster.
        run: Runs a cell on it.
        code: The cell; its first line is the comment that stands for the magic.
        options: The options of `Cluster.run`, with the ranks as a list.
        plan: The variable, its values, and what to keep.
    """
    state, ranks = cluster.state, options["ranks"]
    rows: list[Branch] = []
    trials = Trials(state, ranks, cluster.cells.settings.undo_memory, outlives=True)
    tried = {**options, "restores": trials, "check": False, "values": False, "show_value": False}
    try:
        for value in plan.values:
            if trials.lost:
                rows.append(Branch(value, _NOT_RUN, trials.lost))
                continue
            print(f"{plan.name} = {value}", flush=True)
            code_of_run = _with_value(code, plan.name, value)
            before = _drained(state)[0]
            ask(state.connection, dict.fromkeys(ranks, TakePeak()))
            rows.append(_row(state, value, await run(code_of_run, **tried), before, ranks))
    finally:
        trials.close()
    branches = Branches(plan.name, rows)
    chosen = None if trials.lost else _chosen(branches, plan.keep)
    if chosen is None:
        print(_outcome(plan.keep, trials.lost, trials.named))
        return branches
    before = _drained(state)[0]
    await run(_with_value(code, plan.name, chosen.value), **{**options, "quiet": True, "values": False})
    again = Branch(chosen.value, "ok", curves=_curves(_drained(state, before)[1], ranks))
    print(f"Kept {plan.name} = {chosen.value}: the cell ran with it once more.")
    if changed := [metric for metric in branches.metrics if again.last(metric) != chosen.last(metric)]:
        print(f"It is not deterministic: {changed[0]} was {again.last(changed[0])}, not {chosen.last(changed[0])}.")
    return replace(branches, kept=chosen.value)


def _row(
    state: ClusterState, value: str, result: CellResult, before: Mapping[int, JobReport], ranks: Sequence[int]
) -> Branch:
    living = [rank for rank in ranks if rank not in state.health.dead]
    peaks = ask(state.connection, dict.fromkeys(living, TakePeak()))
    return Branch(
        value,
        *_end(result.record or {}),
        max(result.seconds.values(), default=0.0),
        max(peaks.values(), default=0),
        _curves(_drained(state, before)[1], ranks),
    )


def _end(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return how a run ended, and what failed first, of its record for programs."""
    state, cause = str(record.get("state", "ok")), record.get("cause") or {}
    if state == "timed_out":  # all ranks were interrupted, in any order
        return state, str(record.get("verdict", ""))
    return state, ": ".join(filter(None, (cause.get("type", ""), cause.get("message", ""))))


def _with_value(code: str, name: str, value: str) -> str:
    """Assign the variable in the magic's line, so that the other lines keep their numbers."""
    head, newline, body = code.partition("\n")
    if not head.startswith("# %%"):
        raise UsageError("--branch does not work in a cell with a second %% line.")
    return f"{name} = {value}  {head}{newline}{body}"


def _drained(
    state: ClusterState, previous: Mapping[int, JobReport] | None = None
) -> tuple[dict[int, JobReport], dict[int, list[MetricRow]]]:
    """Read all metrics since the last reports; return the new reports, and the rows by rank."""
    reports, rows = dict(previous or {}), {rank: list[MetricRow]() for rank in state.ranks}
    while True:
        new = request_job(state, reports).reports
        for rank, report in new.items():
            rows[rank] += report.rows
        reports.update(new)
        if all(report.is_last for report in new.values()):
            return reports, rows


def _curves(rows: Mapping[int, Sequence[MetricRow]], ranks: Sequence[int]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for rank in ranks:
        for row in rows.get(rank, ()):
            for name, value in row.values.items():
                curves.setdefault(name, []).append((row.step, value))
        if curves:
            break
    return curves


def _chosen(branches: Branches, keep: str) -> Branch | None:
    """Return the run to keep; None if there is none, or nothing is to be kept."""
    finished = [row for row in branches.rows if row.state == "ok"]
    how, colon, metric = keep.partition(":")
    if not (colon and how in _CHOICES):
        return next((row for row in finished if row.value == keep), None)
    values = {row.value: last for row in finished if (last := row.last(metric)) is not None and not math.isnan(last)}
    if not values:
        return None
    best = _CHOICES[how](values, key=values.__getitem__)
    return next(row for row in finished if row.value == best)


def _outcome(keep: str, lost: str, named: Mapping[str, str]) -> str:
    """Say what state the ranks have when no run is kept, and which variables are as the runs left them."""
    state = (
        f"the state from before the cell{', but for ' * bool(named)}{', '.join(f'`{name}`' for name in sorted(named))}"
    )
    if lost:
        return f"{lost.capitalize()}: run `%distributed repair`. The other ranks have {state}."
    if keep:
        return f"No run that finished is {keep}: the ranks have {state}."
    return f"The ranks have {state}."
