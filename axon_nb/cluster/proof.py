"""`%timeline --advise --prove`: repeats a cell with and without causal delays, to measure what a change would gain."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from axon_nb.errors import UsageError
from axon_nb.records.performance.delays import StepDelays, common_order, step_delays
from axon_nb.records.performance.steps import record_steps

if TYPE_CHECKING:
    from axon_nb.cluster.cluster import Cluster
    from axon_nb.records.performance.advice import Advice
    from axon_nb.records.performance.replay import Recording

__all__ = ["PAIRS", "Proof", "prove", "why_unprovable"]

PAIRS = 4
"""How often the cell runs with delays, and how often without."""
_WATCH_S = 120.0


@dataclass(frozen=True, slots=True)
class Proof:
    """What a change would gain, as it was said and as it was measured."""

    said: float
    gains: tuple[float, ...]
    """Share of a step that is saved, in each pair of runs."""

    @property
    def gain(self) -> float:
        """The mean."""
        return statistics.fmean(self.gains)

    @property
    def margin(self) -> float:
        """Twice the standard error of the mean; NaN if there is one pair."""
        return 2 * statistics.stdev(self.gains) / math.sqrt(len(self.gains)) if len(self.gains) > 1 else math.nan

    def __str__(self) -> str:
        return f"said {self.said:.0%}, proven {self.gain:.0%} ± {self.margin * 100:.0f}"


def why_unprovable(recording: Recording, advice: Advice) -> str:
    """Return why causal delays cannot prove an advice, as a sentence; empty if they can."""
    if advice.changed is None:
        return f"It cannot be proven by delays: {advice.cause} is about a schedule, and no part of it gets faster."
    if step_delays(recording, advice.changed) is not None:
        return ""
    if not common_order(recording):
        return "It cannot be proven by delays: they need steps that make the same collectives, on all ranks."
    return "It cannot be proven by delays: all ranks do this at the same time, so nothing else is left to slow."


def prove(cluster: Cluster, code: str, *, recording: Recording, advice: Advice, pairs: int = PAIRS) -> Proof:
    """Repeat a cell with and without delays, in turn; the state from before is restored after each run.

    Args:
        cluster: The cluster.
        code: The cell, without the line of its magic.
        recording: Its steps.
        advice: What to prove; `why_unprovable` returns an empty text for it.
        pairs: How often each of the two runs.

    Raises:
        CellError: a run failed.
        UsageError: a run made fewer than two steps.
    """
    assert advice.changed is not None
    delays = step_delays(recording, advice.changed)
    assert delays is not None
    gains = []
    for number in range(pairs):
        lengths = {}
        for one in (StepDelays(), delays) if number % 2 == 0 else (delays, StepDelays()):
            lengths[bool(one)] = _step_s(cluster, code, one)
        gains.append(1 - (lengths[True] - delays.added_s) / lengths[False])
    return Proof(advice.gain, tuple(gains))


def _step_s(cluster: Cluster, code: str, delays: StepDelays) -> float:
    """Run the cell, and return the length of a step in seconds."""
    cluster.spans.collect(watch_s=_WATCH_S)
    begin = cluster.spans.store.end
    cluster.run(f"# %%distributed\n{code}", quiet=True, values=False, restores=True, delays=delays)
    cluster.spans.collect()
    table = cluster.spans.store.table(begin)
    found = record_steps(table.spans(), table.groups)
    if found is None:
        raise UsageError("--prove: repeated, the cell makes fewer than two training steps on all ranks.")
    return found.measured_s
