"""The record of a search over layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.communication_table import html_table, text_table
from axon_nb.plan.schedule_picture import plotly_figure
from axon_nb.records.quantity import format_bytes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Candidate", "SearchPlan"]

_GIB = 1024.0**3
_SHOWN = 20
_HEAD = ("dp", "tp", "pp", "strategy", "microbatches", "recompute", "step, ms", "memory, GiB", "why not")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout."""

    dp: int
    tp: int
    pp: int
    strategy: str
    """Of the data axis."""
    microbatches: int
    recompute: bool
    """Whether activations are computed again in backward."""
    step_s: float = float("inf")
    """Seconds of a step; infinite where it cannot be."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part, of the fullest rank."""
    reason: str = ""
    """Why it is rejected; empty: it fits."""

    @property
    def fits(self) -> bool:
        """Whether it can be trained so."""
        return not self.reason

    @property
    def memory_bytes(self) -> int:
        """Of all parts."""
        return sum(self.memory.values())

    @property
    def rank_key(self) -> tuple[float, int]:
        """By which candidates are sorted: time, then memory."""
        return self.step_s, self.memory_bytes

    def rejected(self, reason: str) -> Candidate:
        """The same, which cannot be."""
        return replace(self, reason=reason)

    def judged(self, memory: Mapping[str, int], step_s: float, limit: float) -> Candidate:
        """The same, with its memory in bytes and its time; rejected when it needs more than the limit."""
        total = sum(memory.values())
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items() if size)
        reason = f"needs {format_bytes(total)} of {format_bytes(round(limit))}: {parts}" if total > limit else ""
        return replace(self, memory=dict(memory), step_s=step_s, reason=reason)


@dataclass(frozen=True)
class SearchPlan:
    """Layouts, those that fit and the fastest first; made by `axon_nb.plan.search`."""

    title: str
    """What was asked for, in words."""
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; None: none does."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.fits else None

    def to_frame(self) -> pd.DataFrame:
        """One row a layout: dp, tp, pp, strategy, microbatches, recompute, step_ms, memory_gib, fits, reason."""
        import pandas as pd

        rows = [
            (c.dp, c.tp, c.pp, c.strategy, c.microbatches, c.recompute, 1e3 * c.step_s, c.memory_bytes / _GIB, c.fits,
             c.reason)
            for c in self.candidates
        ]  # fmt: skip
        names = ["dp", "tp", "pp", "strategy", "microbatches", "recompute", "step_ms", "memory_gib", "fits", "reason"]
        return pd.DataFrame(rows, columns=names)

    def figure(self) -> Any:
        """A plotly figure: milliseconds of a step over GiB of the fullest rank, a point a layout."""
        known = [c for c in self.candidates if c.memory]
        traces = [
            {
                "type": "scatter",
                "mode": "markers",
                "name": "fits" if fits else "does not fit",
                "x": [c.memory_bytes / _GIB for c in known if c.fits is fits],
                "y": [1e3 * c.step_s for c in known if c.fits is fits],
                "text": [f"dp {c.dp}, tp {c.tp}, pp {c.pp}, {c.strategy}" for c in known if c.fits is fits],
            }
            for fits in (True, False)
        ]
        layout = {
            "title": {"text": self.title},
            "xaxis": {"title": {"text": "GiB of the fullest rank"}},
            "yaxis": {"title": {"text": "ms a step"}, "type": "log"},
        }
        return plotly_figure(traces, layout)

    def _summary(self) -> str:
        fitting = sum(c.fits for c in self.candidates)
        shown = f"; the first {_SHOWN} of them" if len(self.candidates) > _SHOWN else ""
        return f"{self.title}: {fitting} of {len(self.candidates)} layouts fit{shown}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(c.dp),
                str(c.tp),
                str(c.pp),
                c.strategy if c.dp > 1 else "",
                str(c.microbatches),
                "yes" if c.recompute else "",
                f"{1e3 * c.step_s:.4g}" if c.memory else "",
                f"{c.memory_bytes / _GIB:.3g}" if c.memory else "",
                c.reason,
            )
            for c in self.candidates[:_SHOWN]
        ]

    def __str__(self) -> str:
        return text_table(self._summary(), _HEAD, self._rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._summary(), _HEAD, self._rows())
