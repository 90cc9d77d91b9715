"""The record of a search over layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.communication_table import format_ms, html_table, text_table
from axon_nb.plan.schedule_picture import plotly_figure
from axon_nb.plan.table_units import unit_for
from axon_nb.records.quantity import format_bytes

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Candidate", "SearchPlan"]

_GIB = 1024.0**3
_SHOWN_FITTING, _SHOWN_REJECTED = 12, 8
_TICKS = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
_HEAD = (
    "dp",
    "tp",
    "pp",
    "strategy",
    "num_microbatches",
    "activation_checkpointing",
    "step, ms",
    "memory, {}",
    "why not",
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout."""

    dp: int
    tp: int
    pp: int
    strategy: str = ""
    """Of the data axis; empty: none was tried."""
    num_microbatches: int = 1
    activation_checkpointing: bool = False
    """Whether activations are computed again in backward."""
    step_s: float = float("inf")
    """Seconds of a step; infinite where it cannot be."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part, of the fullest rank."""
    reason: str = ""
    """Why it is rejected; empty: it fits."""
    simulated: bool = False
    """Whether its memory was simulated; it is estimated else."""

    @property
    def fits(self) -> bool:
        """Whether it can be trained so."""
        return not self.reason

    @property
    def memory_bytes(self) -> int:
        """Of all parts."""
        return sum(self.memory.values())

    @property
    def sort_key(self) -> tuple[bool, bool, float, float]:
        """By which candidates are sorted: those that fit by time, the others by how much they need."""
        numbers = (self.step_s, self.memory_bytes)
        return not self.fits, not self.memory, *(numbers if self.fits else numbers[::-1])

    def layout(self, batch: int) -> dict[str, Any]:
        """What `axon_nb.plan.memory` is given to simulate it: ``plan.memory(model, **best.layout(batch), …)``.

        Args:
            batch: Samples of a step over all ranks.
        """
        options: dict[str, Any] = {
            "mesh": {"pp": self.pp, "dp": self.dp, "tp": self.tp},
            "strategy": self.strategy or "full_shard",
            "batch": batch // self.dp,
            "activation_checkpointing": True if self.activation_checkpointing else None,
        }
        return options | ({"num_microbatches": self.num_microbatches} if self.pp > 1 else {})

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
    notes: tuple[str, ...] = ()
    """What the numbers rest on."""
    batch: int = 1
    """Samples of a step over all ranks."""

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; None: none does."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.fits else None

    def to_frame(self) -> pd.DataFrame:
        """One row a layout, the best first.

        Columns: dp, tp, pp, strategy, microbatches, recompute, step_ms, memory_gib, fits, reason, simulated. Sizes
        are in GiB (1024³ bytes), times in milliseconds; neither is known of a layout that cannot be.
        """
        import pandas as pd

        rows = [
            (c.dp, c.tp, c.pp, c.strategy, c.num_microbatches, c.activation_checkpointing, 1e3 * c.step_s if c.memory else None,
             c.memory_bytes / _GIB if c.memory else None, c.fits, c.reason, c.simulated)
            for c in self.candidates
        ]  # fmt: skip
        names = [
            "dp",
            "tp",
            "pp",
            "strategy",
            "num_microbatches",
            "activation_checkpointing",
            "step_ms",
            "memory_gib",
            "fits",
            "reason",
        ]
        return pd.DataFrame(rows, columns=[*names, "simulated"])

    def figure(self) -> Any:
        """A plotly figure: milliseconds of a step over the memory of the fullest rank, a point a layout."""
        unit = unit_for(c.memory_bytes for c in self.candidates)
        traces = []
        for fits, name, colour in ((True, "fits", "#54a24b"), (False, "does not fit", "#e45756")):
            shown = [c for c in self.candidates if c.memory and c.fits is fits]
            trace = {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "marker": {"color": colour, "size": 8},
                "x": [unit.of(c.memory_bytes) for c in shown],
                "y": [1e3 * c.step_s for c in shown],
                "text": [_words(c) for c in shown],
                "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {unit.name}, %{{y:.4g}} ms",
            }
            traces.append(trace)
        layout = {
            "title": {"text": self.title},
            "xaxis": {"title": {"text": f"{unit.name} of the fullest rank"}, "type": "log", "tickvals": _TICKS},
            "yaxis": {"title": {"text": "ms a step"}, "type": "log"},
        }
        return plotly_figure(traces, layout)

    def _summary(self) -> str:
        fitting = sum(c.fits for c in self.candidates)
        said = f"{self.title}: {fitting} of {len(self.candidates)} layouts fit"
        if len(self._shown()) < len(self.candidates):
            said += "; the first of both kinds, and to_frame() has all"
        return f"{said}. Best: {_words(self.best)}." if self.best else f"{said}."

    def _shown(self) -> list[Candidate]:
        fitting = [c for c in self.candidates if c.fits]
        rejected = [c for c in self.candidates if not c.fits]
        room = _SHOWN_FITTING + _SHOWN_REJECTED
        first = fitting[: max(_SHOWN_FITTING, room - len(rejected))]
        return first + rejected[: room - len(first)]

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Head and rows."""
        unit = unit_for(c.memory_bytes for c in self._shown())
        rows: list[tuple[str, ...]] = [
            (
                str(c.dp),
                str(c.tp),
                str(c.pp),
                c.strategy if c.dp > 1 else "",
                str(c.num_microbatches) if c.memory else "",
                "yes" if c.activation_checkpointing else "",
                format_ms(c.step_s) if c.memory else "",
                f"{unit.text(c.memory_bytes, decimals=2)}{' (simulated)' if c.simulated else ''}" if c.memory else "",
                c.reason,
            )
            for c in self._shown()
        ]
        return tuple(name.format(unit.name) for name in _HEAD), rows

    def __str__(self) -> str:
        return text_table(self._summary(), *self._table(), self.notes)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self._summary(), *self._table(), self.notes)


def _words(one: Candidate) -> str:
    parts = [f"{name} {size}" for name, size in (("dp", one.dp), ("tp", one.tp), ("pp", one.pp)) if size > 1]
    if one.dp > 1:
        parts.append(one.strategy)
    if one.pp > 1:
        parts.append(f"{one.num_microbatches} microbatches")
    if one.activation_checkpointing:
        parts.append("recomputing")
    return ", ".join(parts) or "one GPU"
