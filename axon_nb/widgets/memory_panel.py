"""The panel of `%memory`: a view of the ranks' memory that follows a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.memory import ask_memory
from axon_nb.widgets.following import FollowingPanel
from axon_nb.widgets.memory import MemoryView

__all__ = ["MemoryPanel"]

_EVERY_S = 1.0


class MemoryPanel(FollowingPanel):
    """Asks once a second.

    Args:
        cluster: Whose ranks are asked.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: there is nothing of that name.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        super().__init__(cluster, every_s=_EVERY_S)
        self._names = list(names)
        self.view: MemoryView = MemoryView(", ".join(names))
        self.view.take(ask_memory(cluster, self._names))
        self.view.refresh(unseen=True)

    def ask(self) -> None:
        """Ask the ranks, and show what they say."""
        self.view.take(ask_memory(self._cluster, self._names, patient=False))
