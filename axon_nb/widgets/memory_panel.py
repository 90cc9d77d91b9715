"""The panel of `%memory`: a view of the ranks' memory that follows a cluster, and answers what if."""

from __future__ import annotations

from collections.abc import Sequence

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.memory import MemoryAnswers, ask_memory, ask_plan
from axon_nb.cluster.what_if import WhatIf
from axon_nb.records.what_if import WhatIfState
from axon_nb.widgets.following import FollowingPanel
from axon_nb.widgets.memory import MemoryView

__all__ = ["MemoryPanel"]

_EVERY_S = 3.0


class MemoryPanel(FollowingPanel):
    """Asks every third second.

    Args:
        cluster: Whose ranks are asked.
        names: Modules and optimizers of the ranks, by name; empty: all that their variables hold.

    Raises:
        UsageError: there is nothing of that name.
    """

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        super().__init__(cluster, every_s=_EVERY_S)
        self._names = list(names)
        answers = ask_memory(cluster.state, self._names)
        self._model = answers.model
        self.what_if = WhatIf(
            lambda asked, known: ask_plan(cluster.state, self._names, asked, known),
            self._answered,
            lambda: bool(cluster.busy),
        )
        # Of all variables together, or of several models, nothing can be planned.
        self.view: MemoryView = MemoryView(", ".join(names), self.what_if.ask if answers.model else None)
        self._take(answers)
        self.view.refresh(unseen=True)

    def _answered(self, state: WhatIfState) -> None:
        self.view.answer(state)

    def ask(self) -> float:
        """Ask the ranks, and show what they say."""
        answers = ask_memory(self._cluster.state, self._names, patient=False)
        self._take(answers)
        return answers.spent_s

    def cluster_is_gone(self) -> None:
        """What was asked last stays; nothing else can be."""
        self.what_if.close()

    def close(self) -> None:
        """Follow no more; what is shown stays."""
        self.what_if.close()
        super().close()

    def _take(self, answers: MemoryAnswers) -> None:
        if answers.model and answers.model != self._model:
            self._model = answers.model
            self.what_if.renew()
        self.view.take(answers)
