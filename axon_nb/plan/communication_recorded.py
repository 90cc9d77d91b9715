"""What a real step has sent, counted in the way of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from axon_nb.records.span import Span

__all__ = ["OPERATIONS", "counted", "recorded_communication"]

# torch's names of operations, which differ between versions, and whether a span tells the bytes of one rank's part.
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
    """Calls and bytes by axis and operation, to be compared with `CommunicationPlan.by_operation`.

        before = trace.ring.position
        step()
        recorded_communication(trace.ring.since(before)[0], mesh)

    In `%%distributed` cells every operation of every group is recorded.

    Args:
        spans: Of this rank, of one step.
        mesh: Whose axes they went over, with names; others than those of its groups are left out.

    Returns:
        (calls, bytes) by axis and operation; bytes of whole tensors.
    """
    axes = {mesh.get_group(axis).group_name: (axis, mesh[axis].size()) for axis in mesh.mesh_dim_names or ()}
    return counted(((span.group, span.name, span.bytes) for span in spans if span.kind != "wait"), axes)


def counted(
    calls: Iterable[tuple[str, str, int]], axes: Mapping[str, tuple[str, int]]
) -> dict[tuple[str, str], tuple[int, int]]:
    """The same, from (group, torch's name, bytes of the first argument).

    Args:
        calls: In any order; those that are no communication are left out.
        axes: Axis and size by the group's name.
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for group, name, size in calls:
        if group not in axes or name not in OPERATIONS:
            continue
        axis, num_ranks = axes[group]
        operation, is_part = OPERATIONS[name]
        before, total = found.get((axis, operation), (0, 0))
        found[axis, operation] = before + 1, total + size * (num_ranks if is_part else 1)
    return found
