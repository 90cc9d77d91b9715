"""Requests the state of a running job from the ranks: training metrics, throughput, and what each rank waits for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from axon_nb.cluster.inspection.status import describe_state
from axon_nb.cluster.rpc.requests import request_each
from axon_nb.records.protocol.inspection import JobRequest
from axon_nb.records.training.job import JobReport
from axon_nb.records.waits.calls import missing_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.state import ClusterState

_TIMEOUT_S = 1.0
_MIN_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The job on all ranks at one moment."""

    reports: Mapping[int, JobReport]
    """The reports of the ranks that replied."""
    descriptions: Mapping[int, str]
    """What each rank is doing, in words; includes ranks that are dead or did not reply."""
    cell: int | None
    """Number of the running cell; None: none is running; 0: it has no number, or its ranks did not reply."""
    cost_s: float = 0.0
    """CPU seconds that the reply cost a rank, at most."""
    slowed: str = ""
    """What is slowed on purpose, such as ``rank 2 × 2``; empty: nothing."""


def request_job(state: ClusterState, previous: Mapping[int, JobReport]) -> JobSnapshot:
    """Request a report from every live rank; ranks that do not reply within a second are described as such.

    Args:
        state: The cluster.
        previous: The last report of each rank, after which the new one starts; empty: from the beginning.
    """
    living = state.live_ranks
    requests = {rank: _position(previous.get(rank)) for rank in living}
    busy = set(living).intersection(state.busy)
    replies = request_each(state.connection.client, requests, timeout_s=_TIMEOUT_S)
    reports = {rank: reply.report for rank, reply in replies.items()}
    late = missing_ranks({rank: reply.waits for rank, reply in replies.items()}, _MIN_WAIT_S)
    descriptions = {}
    for rank in state.ranks:
        current = reports[rank].state if rank in reports else None
        descriptions[rank] = state.health.dead.get(rank) or describe_state(current, late.get(rank, ()))
    cost_s = max((reply.spent_s for reply in replies.values()), default=0.0)
    return JobSnapshot(reports, descriptions, running_cell(reports, busy), cost_s, str(state.slowness))


def running_cell(reports: Mapping[int, JobReport], busy: Collection[int]) -> int | None:
    """Return the number of the running cell, as in `JobSnapshot.cell`.

    Args:
        reports: The reports of the ranks that replied.
        busy: The ranks that were sent a cell and have not finished it; one that did not reply is still running it.
    """
    cells = [report.state.cell for report in reports.values() if report.state.cell is not None]
    is_silent = any(rank not in reports for rank in busy)
    return max(cells, default=0 if is_silent else None)


def _position(report: JobReport | None) -> JobRequest:
    if report is None:
        return JobRequest()
    return JobRequest(report.pid, report.position, report.span_position, report.state.time_ns)
