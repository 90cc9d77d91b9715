"""The record of a predicted training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axon_nb.plan.communication_plan import CommunicationPlan
from axon_nb.plan.communication_table import format_flops, format_ms, html_table, text_table
from axon_nb.plan.schedule_picture import plotly_figure
from axon_nb.plan.schedule_plan import SchedulePlan

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["StepTime"]

_HEAD = ("part", "ms", "share")


@dataclass(frozen=True)
class StepTime:
    """How long a training step takes, and what of; made by `axon_nb.plan.step_time`."""

    title: str
    """Model and layout, in words."""
    parts: Mapping[str, float]
    """Seconds by part, of the slowest rank along ``pp``; together the step."""
    flops: float
    """Floating point operations of that rank in a step."""
    assumptions: tuple[str, ...]
    """What the prediction rests on."""
    communication: CommunicationPlan = field(repr=False)
    """What is sent, with times."""
    schedule: SchedulePlan | None = field(default=None, repr=False)
    """The pipeline's, with these stages' times; None: there is none."""

    @property
    def total_s(self) -> float:
        """Seconds of the step."""
        return sum(self.parts.values())

    @property
    def flops_per_s(self) -> float:
        """Floating point operations that the rank does a second, over the whole step."""
        return self.flops / self.total_s if self.total_s else 0.0

    @property
    def exposed_s(self) -> float:
        """Seconds in which the rank only communicates."""
        return sum(seconds for part, seconds in self.parts.items() if part.startswith("communication"))

    def to_frame(self) -> pd.DataFrame:
        """One row a part: part, ms, share (0 to 1)."""
        import pandas as pd

        total = self.total_s or 1.0
        rows = [(part, 1e3 * seconds, seconds / total) for part, seconds in self.parts.items()]
        return pd.DataFrame(rows, columns=["part", "ms", "share"])

    def figure(self) -> Any:
        """A plotly figure: one bar of milliseconds, part by part."""
        bars = [
            {"type": "bar", "orientation": "h", "name": part, "x": [1e3 * seconds], "y": ["step"]}
            for part, seconds in self.parts.items()
        ]
        layout = {
            "barmode": "stack",
            "title": {"text": f"{self.title}: {format_ms(self.total_s)} ms a step"},
            "xaxis": {"title": {"text": "ms"}},
            "yaxis": {"showticklabels": False},
            "legend": {"traceorder": "normal"},
            "height": 320,
        }
        return plotly_figure(bars, layout)

    def _summary(self) -> str:
        return (
            f"{self.title}: a step of {format_ms(self.total_s)} ms, {format_flops(self.flops_per_s)} a rank, "
            f"{format_ms(self.exposed_s)} ms of it only communicating"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        total = self.total_s or 1.0
        return [(part, format_ms(seconds), f"{seconds / total:.1%}") for part, seconds in self.parts.items()]

    def __str__(self) -> str:
        return text_table(self._summary(), _HEAD, self._rows(), self.assumptions)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._summary(), _HEAD, self._rows(), self.assumptions)
