"""Asking ranks about the job that they run: what they have logged, how fast they are, what they wait for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from axon_nb.cluster.inspection.status import describe_state
from axon_nb.cluster.rpc.requests import ask_each
from axon_nb.records.protocol.inspection import JobRequest
from axon_nb.records.training.job import JobReport
from axon_nb.records.waits import missing_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

__all__ = ["JobAnswers", "ask_job", "running_cell"]

_LIMIT_S = 1.0
_WAITED_S = 0.25


@dataclass(frozen=True, slots=True)
class JobAnswers:
    """All ranks at one moment."""

    reports: Mapping[int, JobReport]
    """Of the ranks that have answered."""
    words: Mapping[int, str]
    """What each rank does, in words; all ranks, those that are dead or silent too."""
    cell: int | None
    """Number of the cell that runs; None: none does; 0: one without a number, or whose ranks have not answered."""
    spent_s: float = 0.0
    """What the answer has cost the rank for which it was most."""


def ask_job(state: ClusterState, before: Mapping[int, JobReport]) -> JobAnswers:
    """Ask every living rank; those that do not answer within a second are told as such.

    Args:
        state: The cluster.
        before: The last report of each rank, from which reading goes on; empty: from the beginning.
    """
    living = state.living
    asked = {rank: _mark(before.get(rank)) for rank in living}
    busy = set(living).intersection(state.busy)
    answers = ask_each(state.connection.client, asked, limit_s=_LIMIT_S)
    reports = {rank: answer.report for rank, answer in answers.items()}
    late = missing_ranks({rank: answer.waits for rank, answer in answers.items()}, _WAITED_S)
    words = {}
    for rank in state.ranks:
        seen = reports[rank].state if rank in reports else None
        words[rank] = state.health.dead.get(rank) or describe_state(seen, late.get(rank, ()))
    spent_s = max((answer.spent_s for answer in answers.values()), default=0.0)
    return JobAnswers(reports, words, running_cell(reports, busy), spent_s)


def running_cell(reports: Mapping[int, JobReport], busy: Collection[int]) -> int | None:
    """Number of the cell that runs, as in `JobAnswers`.

    Args:
        reports: Of the ranks that have answered.
        busy: The ranks that have been sent a cell and have not ended it: one of them that is silent still runs it.
    """
    cells = [report.state.cell for report in reports.values() if report.state.cell is not None]
    silent = any(rank not in reports for rank in busy)
    return max(cells, default=0 if silent else None)


def _mark(report: JobReport | None) -> JobRequest:
    if report is None:
        return JobRequest()
    return JobRequest(report.pid, report.position, report.span_position, report.state.time_ns)
