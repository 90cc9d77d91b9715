"""The record of a predicted training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axon_nb.plan.figures import paint_of, plotly_figure
from axon_nb.plan.pipeline.plan import SchedulePlan
from axon_nb.plan.tables import format_flops, format_ms, html_table, text_table
from axon_nb.plan.timing.uncertainty import Uncertainty
from axon_nb.plan.traffic.plan import CommunicationPlan

if TYPE_CHECKING:
    import pandas as pd

_HEAD = ("part", "ms", "share")


@dataclass(frozen=True)
class StepTime:
    """Time of a training step and its parts; made by `axon_nb.plan.step_time`."""

    title: str
    """Model and layout, as text."""
    parts: Mapping[str, float]
    """Seconds per part, of the slowest rank along ``pp``; they add up to the step."""
    flops: float
    """FLOPs of that rank in a step."""
    assumptions: tuple[str, ...]
    """Assumptions behind the prediction."""
    communication: CommunicationPlan = field(repr=False)
    """The communication, with times."""
    schedule: SchedulePlan | None = field(default=None, repr=False)
    """The pipeline schedule with these stages' times; None: no pipeline."""
    uncertainty: Uncertainty | None = None
    """The range of seconds in which the step is expected, and what it depends on; None: not estimated."""

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def flops_per_s(self) -> float:
        """FLOP/s of the rank over the whole step."""
        return self.flops / self.total_s if self.total_s else 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that computation does not hide."""
        return sum(seconds for part, seconds in self.parts.items() if part.startswith("communication"))

    def to_frame(self) -> pd.DataFrame:
        """One row per part: part, ms, share (0 to 1)."""
        import pandas as pd

        total = self.total_s or 1.0
        rows = [(part, 1e3 * seconds, seconds / total) for part, seconds in self.parts.items()]
        return pd.DataFrame(rows, columns=["part", "ms", "share"])

    def figure(self) -> Any:
        """A plotly figure: one bar of milliseconds, part by part."""
        bars = [
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "marker": {"color": paint_of(part)},
                "x": [1e3 * seconds],
                "y": ["step"],
            }
            for part, seconds in self.parts.items()
        ]
        layout = {
            "barmode": "stack",
            "title": {"text": f"{self.title}: {format_ms(self.total_s)} ms per step"},
            "xaxis": {"title": {"text": "ms"}},
            "yaxis": {"showticklabels": False},
            "legend": {"traceorder": "normal"},
            "height": 320,
        }
        return plotly_figure(bars, layout)

    def _summary(self) -> str:
        return (
            f"{self.title}: {format_ms(self.total_s)} ms per step, {format_flops(self.flops_per_s)} per rank, "
            f"{format_ms(self.exposed_s)} ms of exposed communication"
        )

    def _notes(self) -> tuple[str, ...]:
        return self.assumptions if self.uncertainty is None else (str(self.uncertainty), *self.assumptions)

    def _rows(self) -> list[tuple[str, ...]]:
        total = self.total_s or 1.0
        return [(part, format_ms(seconds), f"{seconds / total:.1%}") for part, seconds in self.parts.items()]

    def __str__(self) -> str:
        return text_table(self._summary(), _HEAD, self._rows(), self._notes())

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {
            "text/plain": str(self),
            "text/html": html_table(self._summary(), _HEAD, self._rows(), self._notes()),
        }
