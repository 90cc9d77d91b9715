"""The panel of `%watch`: a view of the job that follows a cluster."""

from __future__ import annotations

import time

from axon_nb.cluster.cluster import Cluster
from axon_nb.cluster.job import JobAnswers, ask_job
from axon_nb.widgets.following import FollowingPanel
from axon_nb.widgets.watch import WatchView

__all__ = ["WatchPanel", "ask_all"]

_EVERY_S = 2.0
_MAX_ROUNDS = 8


class WatchPanel(FollowingPanel):
    """Asks every other second.

    Args:
        cluster: Whose job is shown.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster, every_s=_EVERY_S)
        self.view: WatchView = WatchView(cluster.cancel)
        self.ask()
        self.view.refresh(unseen=True)

    def ask(self) -> float:
        """Ask until everything is read that was logged so far."""
        answers = ask_all(self._cluster, self.view)
        self.view.take(answers, time.monotonic())
        return sum(answer.spent_s for answer in answers)

    def cluster_is_gone(self) -> None:
        """No cell runs any more, whatever was told last."""
        self.view.take([JobAnswers({}, dict.fromkeys(self._cluster.ranks, "gone"), None)], time.monotonic())


def ask_all(cluster: Cluster, view: WatchView) -> list[JobAnswers]:
    """What the ranks have logged since the view was fed last, in as many questions as it takes."""
    known, answers = dict(view.store.reports), []
    for _ in range(_MAX_ROUNDS):
        answers.append(ask_job(cluster.state, known))
        known.update(answers[-1].reports)
        if all(report.is_last for report in answers[-1].reports.values()):
            break
    return answers
