"""What other programs can ask for, by name, and which of it needs the notebook's permission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from axon_nb.cluster.endpoint import observations
from axon_nb.cluster.endpoint.cells import SharedCells
from axon_nb.cluster.endpoint.folding import described, folded
from axon_nb.records.ranks import format_ranks

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Operation:
    """The conditions of one request."""

    changes: bool = False
    """Whether it can change something on the ranks, and so is refused unless the notebook has set ``share=on``."""
    needs_idle: bool = False
    """Whether it is refused while a cell runs."""


OPERATIONS: Mapping[str, Operation] = {
    "status": Operation(),
    "stacks": Operation(),
    "explain": Operation(),
    "variables": Operation(),
    "difference": Operation(needs_idle=True),
    "timeline": Operation(),
    "logs": Operation(),
    "interrupt": Operation(),
    "run": Operation(changes=True, needs_idle=True),
    "poll": Operation(changes=True),
    "cancel": Operation(changes=True),
    "repair": Operation(changes=True, needs_idle=True),
    "push": Operation(changes=True, needs_idle=True),
    "pull": Operation(changes=True, needs_idle=True),
}


class Operations:
    """Performs requests; each method is one, and returns plain JSON values.

    Args:
        cluster: The cluster.
        is_shared: Whether requests that change something are allowed.
    """

    def __init__(self, cluster: Cluster, is_shared: Callable[[], bool]) -> None:
        self._cluster = cluster
        self._is_shared = is_shared
        self._cells = SharedCells(cluster)
        self.run = self._cells.start
        self.poll = self._cells.poll
        self.cancel = self._cells.cancel

    def status(self) -> dict[str, Any]:
        """Return the state of each rank, which cell runs, and the result of the last one."""
        return {**observations.status(self._cluster), "share": self._is_shared()}

    def stacks(self, ranks: str | None = None) -> dict[str, Any]:
        """Return where each rank is."""
        return observations.stacks(self._cluster, ranks)

    def explain(self) -> dict[str, Any]:
        """Return which rank the others wait for, and why."""
        return observations.explain(self._cluster)

    def variables(self) -> dict[str, Any]:
        """Return all variables and whether ranks agree; while a cell runs, names and types."""
        return observations.variables(self._cluster)

    def difference(self, name: str, from_rank: int = 0) -> dict[str, Any]:
        """Return where a variable differs between ranks."""
        return observations.difference(self._cluster, name, from_rank)

    def timeline(self, limit: int = 20) -> dict[str, Any]:
        """Return where the recorded time went, by call."""
        return observations.timeline(self._cluster, limit)

    def logs(self, run: str | None = None, since: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return what the ranks printed in their last cell, or in cell `run` after the messages `since`."""
        return observations.logs(self._cluster, run, since or {})

    def interrupt(self) -> dict[str, Any]:
        """Interrupt all running cells, as the notebook's stop button does."""
        ranks = format_ranks(self._cluster.cancel())
        text = f"Interrupted the cell on ranks {ranks}." if ranks else "No cell is running."
        return {"ranks": ranks, "text": text}

    def repair(self, ranks: str | None = None, from_rank: int | None = None) -> dict[str, Any]:
        """Replace dead ranks, and live ones that are named."""
        return {"text": str(self._cluster.repair(ranks, from_rank=from_rank))}

    def push(self, values: Mapping[str, Any], ranks: str | None = None) -> dict[str, Any]:
        """Set variables on ranks."""
        self._cluster.push(dict(values), ranks=ranks)
        return {"names": list(values), "text": f"Sent {', '.join(values)}."}

    def pull(self, expression: str, ranks: str | None = None) -> dict[str, Any]:
        """Evaluate a name or an expression on ranks; large values are described."""
        values = self._cluster.pull(expression, ranks=ranks, numpy=True)
        groups = folded({rank: described(value) for rank, value in values.items()}, "value")
        return {"groups": groups, "text": "\n".join(f"[ranks {each['ranks']}] {each['value']}" for each in groups)}
