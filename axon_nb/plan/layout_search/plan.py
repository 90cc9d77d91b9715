"""The record of a search over layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from axon_nb.plan.display import Shown, Table, format_ms, plotly_figure, state_paint, titled, unit_for
from axon_nb.plan.layout_search.meshes import mesh_axes
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

_GIB = 1024.0**3
NEAR = 0.2
"""Four of five published steps are predicted within this fraction: docs/plan_published.md."""
_SHOWN_FITTING, _SHOWN_REJECTED = 12, 8
_TICKS = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2, 5)]
_HEAD = ("strategy", "microbatches", "checkpointing", "step, ms", "memory, {}", "reason")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout and its evaluation."""

    dp: int
    tp: int
    pp: int
    strategy: str = ""
    """Strategy of the data axis; empty: none was tried."""
    num_microbatches: int = 1
    activation_checkpointing: bool = False
    """Whether backward recomputes activations."""
    step_s: float = float("inf")
    """Seconds per step; infinite if the layout is impossible."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part of the rank that needs most."""
    reason: str = ""
    """Why it is rejected; empty: it fits."""
    simulated: bool = False
    """Whether its memory is simulated instead of estimated."""
    ep: int = 1
    """Ranks that share one copy of the experts; they have different samples."""
    cp: int = 1
    """Ranks that share a sequence."""

    @property
    def num_sharers(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.dp * self.ep * self.cp

    @property
    def fits(self) -> bool:
        """Whether the layout is possible and fits."""
        return not self.reason

    @property
    def memory_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory.values())

    @property
    def sort_key(self) -> tuple[bool, bool, float, float]:
        """Sort key: layouts that fit come first, by time; the others by the memory they need."""
        numbers = (self.step_s, self.memory_bytes)
        return not self.fits, not self.memory, *(numbers if self.fits else numbers[::-1])

    def layout(self, global_batch: int) -> dict[str, Any]:
        """Return the layout as arguments of `plan.memory`: ``plan.memory(model, **best.layout(global_batch), …)``.

        Args:
            global_batch: Samples per step over all ranks.
        """
        options: dict[str, Any] = {
            "mesh": mesh_axes(self),
            "strategy": self.strategy or "full_shard",
            "batch": global_batch // (self.dp * self.ep),
            "activation_checkpointing": True if self.activation_checkpointing else None,
        }
        return options | ({"num_microbatches": self.num_microbatches} if self.pp > 1 else {})

    @property
    def row(self) -> dict[str, Any]:
        """The layout and its evaluation; impossible layouts have neither time nor memory."""
        return {
            "dp": self.dp,
            "tp": self.tp,
            "pp": self.pp,
            "ep": self.ep,
            "cp": self.cp,
            "strategy": self.strategy,
            "num_microbatches": self.num_microbatches,
            "activation_checkpointing": self.activation_checkpointing,
            "step_ms": 1e3 * self.step_s if self.memory else None,
            "memory_gib": self.memory_bytes / _GIB if self.memory else None,
            "fits": self.fits,
            "reason": self.reason,
            "simulated": self.simulated,
        }

    def with_result(self, memory: Mapping[str, int], step_s: float, limit: float) -> Candidate:
        """The same, with its memory in bytes and its time; rejected when it needs more than the limit."""
        total = sum(memory.values())
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items() if size)
        reason = f"needs {format_bytes(total)} of {format_bytes(round(limit))}: {parts}" if total > limit else ""
        return replace(self, memory=dict(memory), step_s=step_s, reason=reason)


@dataclass(frozen=True, repr=False)
class SearchPlan(Shown):
    """Layouts, those that fit first and the fastest at the top; made by `axon_nb.plan.search`."""

    title: str
    """The request, as text."""
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...] = ()
    """Assumptions behind the numbers."""
    global_batch: int = 1
    """Samples per step over all ranks."""
    limit_bytes: int = 0
    """Bytes that a rank can use; 0 if there is no limit."""

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits; None if none does."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and first.fits else None

    def to_frame(self) -> pd.DataFrame:
        """One row per layout, the best first.

        Columns: dp, tp, pp, ep, cp, strategy, num_microbatches, activation_checkpointing, step_ms, memory_gib, fits,
        reason, simulated. Impossible layouts have neither time nor memory.
        """
        import pandas as pd

        return pd.DataFrame([one.row for one in self.candidates])

    def figure(self) -> Any:
        """A plotly figure: milliseconds per step over the memory of the rank that needs most, one point per layout.

        A line marks the memory of a rank; crosses do not fit.
        """
        unit = unit_for(c.memory_bytes for c in self.candidates)
        traces = []
        for fits, name, color, symbol in (
            (True, "fits", state_paint("ok"), "circle"),
            (False, "does not fit", state_paint("error"), "x"),
        ):
            shown = [c for c in self.candidates if c.memory and c.fits is fits]
            trace = {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "marker": {"color": color, "size": 8, "symbol": symbol},
                "x": [unit.of(c.memory_bytes) for c in shown],
                "y": [1e3 * c.step_s for c in shown],
                "text": [_describe(c) for c in shown],
                "hovertemplate": f"%{{text}}<br>%{{x:.4g}} {unit.name}, %{{y:.4g}} ms",
            }
            traces.append(trace)
        memory = titled(f"{unit.name} on the fullest rank", type="log", tickvals=_TICKS)
        figure = plotly_figure(traces, titled(self.title, xaxis=memory, yaxis=titled("ms per step", type="log")))
        if self.limit_bytes:
            limit = {"color": state_paint("error"), "dash": "dash", "width": 1.5}
            text = f"{format_bytes(self.limit_bytes)} per rank"
            figure.add_vline(x=unit.of(self.limit_bytes), line=limit, annotation_text=text)
        return figure

    def _summary(self) -> str:
        fitting = sum(c.fits for c in self.candidates)
        text = f"{self.title}: {fitting} of {len(self.candidates)} layouts fit"
        if len(self._shown()) < len(self.candidates):
            text += "; to_frame() has all of them"
        return f"{text}. Best: {_describe(self.best)}{self._next()}." if self.best else f"{text}."

    @property
    def near(self) -> tuple[Candidate, ...]:
        """The other layouts that fit and take at most 20 % longer, which is within the error of predictions."""
        if self.best is None:
            return ()
        limit = (1 + NEAR) * self.best.step_s
        return tuple(c for c in self.candidates[1:] if c.fits and c.step_s <= limit)

    def _next(self) -> str:
        fitting = [c for c in self.candidates[1:] if c.fits]
        if self.best is None or not fitting:
            return ""
        longer = fitting[0].step_s / self.best.step_s - 1
        layouts = f"{len(self.near)} layout{'s are' if len(self.near) != 1 else ' is'}"
        near = f", and {layouts} within {NEAR:.0%}, too close to tell apart" if self.near else ""
        return f"; the next takes {longer:.1%} longer{near}"

    def _shown(self) -> list[Candidate]:
        fitting = [c for c in self.candidates if c.fits]
        rejected = [c for c in self.candidates if not c.fits]
        room = _SHOWN_FITTING + _SHOWN_REJECTED
        first = fitting[: max(_SHOWN_FITTING, room - len(rejected))]
        return first + rejected[: room - len(first)]

    def _table(self) -> Table:
        unit = unit_for(c.memory_bytes for c in self._shown())
        tried = [axis for axis in ("ep", "cp") if any(getattr(c, axis) > 1 for c in self.candidates)]
        axes = ("dp", "tp", "pp", *tried)
        rows: list[tuple[str, ...]] = [
            (
                *(str(getattr(c, axis)) for axis in axes),
                c.strategy if c.num_sharers > 1 else "",
                str(c.num_microbatches) if c.memory else "",
                "yes" if c.activation_checkpointing else "",
                format_ms(c.step_s) if c.memory else "",
                f"{unit.text(c.memory_bytes, decimals=2)}{' (simulated)' if c.simulated else ''}" if c.memory else "",
                c.reason,
            )
            for c in self._shown()
        ]
        return self._summary(), [*axes, *(name.format(unit.name) for name in _HEAD)], rows, self.notes


def _describe(one: Candidate) -> str:
    sizes = [(axis, getattr(one, axis)) for axis in ("dp", "ep", "cp", "tp", "pp")]
    parts = [f"{axis} {size}" for axis, size in sizes if size > 1]
    if one.num_sharers > 1:
        parts.append(one.strategy)
    if one.pp > 1:
        parts.append(f"{one.num_microbatches} microbatches")
    if one.activation_checkpointing:
        parts.append("activation checkpointing")
    return ", ".join(parts) or "one GPU"
