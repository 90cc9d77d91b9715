"""The last step of each pipeline, out of a table of very many spans."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from axon_nb.cluster.inspection.span_table import SpanTable
from axon_nb.records.training.pipeline import PipelineStep
from axon_nb.records.training.pipeline_steps import last_steps

_LIMITS = (512, 8192)
"""Number of last spans per rank and pipeline that are read: few at first, more if they hold no complete step."""


def pipeline_steps(table: SpanTable) -> list[PipelineStep]:
    """Return the last step of each pipeline, the newest first; omit pipelines without a step finished on all ranks."""
    names = sorted({group for _, _, group in table.labels})
    index = {name: number for number, name in enumerate(names)}
    group_of = np.array([index[group] for _, _, group in table.labels], dtype=np.int64)
    rows = np.flatnonzero(table.of_kind("forward", "backward") & (table.columns["stage"] >= 0))
    steps: dict[str, PipelineStep] = {}
    for limit in _LIMITS:
        groups = group_of[table.columns["label"][rows]] if len(rows) else rows
        last = rows[_last_of_each(groups * (1 << 32) + table.columns["rank"][rows], limit)]
        selected = np.zeros(len(table), dtype=bool)
        selected[last] = True
        for step in last_steps(table.pick(selected).spans(), members=table.groups):
            steps[step.group] = step
        # Read more only of pipelines whose step was not found among the first spans.
        rest = np.isin(groups, [index[name] for name in names if name not in steps])
        if len(last) == len(rows) or not rest.any():
            break
        rows = rows[rest]
    return sorted(steps.values(), key=lambda step: max(span.end_ns for span in step.measured), reverse=True)


def _last_of_each(keys: npt.NDArray[np.int64], limit: int) -> npt.NDArray[np.bool_]:
    """Return which positions are among the last `limit` with their key."""
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    ends = np.append(edges, len(keys))
    sizes = np.diff(np.concatenate(([0], ends)))
    after = np.repeat(ends, sizes) - 1 - np.arange(len(keys))
    is_last = np.zeros(len(keys), dtype=bool)
    is_last[order] = after < limit
    return is_last
