"""Recorded communication of a real step, counted as plans count it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from axon_nb.records.spans import Span

# torch's operation names, which differ between versions, and whether a span's bytes are those of one rank's shard.
OPERATIONS = {
    "_allgather_base": ("all_gather", False),
    "_reduce_scatter_base": ("reduce_scatter", True),
    "all_gather_single": ("all_gather", False),
    "all_gather_single_coalesced": ("all_gather", False),
    "all_to_all_single": ("all_to_all", False),
    "allgather": ("all_gather", False),
    "allgather_coalesced": ("all_gather", False),
    "allgather_into_tensor_coalesced": ("all_gather", False),
    "allreduce": ("all_reduce", False),
    "allreduce_coalesced": ("all_reduce", False),
    "alltoall": ("all_to_all", False),
    "alltoall_base": ("all_to_all", False),
    "barrier": ("barrier", False),
    "broadcast": ("broadcast", False),
    "recv": ("recv", False),
    "reduce_scatter": ("reduce_scatter", True),
    "reduce_scatter_single": ("reduce_scatter", True),
    "reduce_scatter_single_coalesced": ("reduce_scatter", True),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", True),
    "send": ("send", False),
}


def recorded_communication(spans: Iterable[Span], mesh: Any) -> dict[tuple[str, str], tuple[int, int]]:
    """Count calls and bytes by axis and operation, to compare with `CommunicationPlan.by_operation`.

        before = trace.ring.position
        step()
        recorded_communication(trace.ring.since(before)[0], mesh)

    `%%distributed` cells record every operation of every group.

    Args:
        spans: This rank's spans of one step.
        mesh: A mesh with named axes; spans of other groups are ignored.

    Returns:
        (calls, bytes) by axis and operation; bytes of whole tensors.
    """
    axes = {mesh.get_group(axis).group_name: (axis, mesh[axis].size()) for axis in mesh.mesh_dim_names or ()}
    return count_calls(((span.group, span.name, span.bytes) for span in spans if span.kind != "wait"), axes)


def count_calls(
    calls: Iterable[tuple[str, str, int]], axes: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], tuple[int, int]]:
    """Count the same from (group, torch's operation name, bytes of the first argument).

    Args:
        calls: The calls in any order; those that do not communicate are ignored.
        axes: Axis and size by group name.
    """
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for group, name, size in calls:
        if group not in axes or name not in OPERATIONS:
            continue
        axis, num_ranks = axes[group]
        operation, is_shard = OPERATIONS[name]
        before, total = totals.get((axis, operation), (0, 0))
        totals[axis, operation] = before + 1, total + size * (num_ranks if is_shard else 1)
    return totals
