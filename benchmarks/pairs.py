"""Paired measurements: median with its 95 % confidence interval, compared with a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Row, median


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % confidence interval of the median by order statistics, without assumptions on the distribution."""
    ordered = sorted(values)
    outside = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    return ordered[outside], ordered[-1 - outside]


@dataclass(frozen=True)
class PairedRow(Row):
    """A median over pairs with its interval: of the ratio if there is a peer value, otherwise of `ours`."""

    low: float = 0.0
    high: float = 0.0
    pairs: int = 0
    median_ratio: float | None = None
    """Median of the pairs' ratios; None if differences are measured."""

    @property
    def ratio(self) -> float | None:
        """Median of the ratios, which is not the ratio of the medians."""
        return self.median_ratio

    @property
    def met(self) -> bool | None:
        """Whether the interval is within the limit; if noise exceeds the limit, whether it includes no difference."""
        if self.limit is None:
            return None
        same, middle = (0.0, self.ours) if self.median_ratio is None else (1.0, self.median_ratio)
        if self.high <= self.limit:
            return True
        return self.high - self.low > self.limit - same and self.low <= same <= self.high and middle <= self.limit

    def cells(self) -> list[str]:
        """Format as a table row."""
        cells = super().cells()
        shown = f"[{self.low:.3f}, {self.high:.3f}]" if self.median_ratio else f"[{self.low:.1f}, {self.high:.1f}]"
        if self.median_ratio is None:
            cells[1] = f"{self.ours:+.1f} {self.unit} {shown}"
        else:
            cells[3] = f"{self.median_ratio:.3f} {shown}"
        return cells

    @classmethod
    def of_ratios(
        cls, measure: str, pairs: Sequence[tuple[float, float]], limit: float | None, *, peer: str = "plain Gloo"
    ) -> PairedRow:
        """Create from (ours, peer) in seconds; measures the ratio."""
        ratios = [ours / peer for ours, peer in pairs]
        low, high = interval(ratios)
        ours, peer_ms = (median([pair[i] for pair in pairs]) * 1e3 for i in (0, 1))
        return cls(
            measure, ours, "ms", peer, peer_ms, limit, low=low, high=high, pairs=len(pairs),
            median_ratio=median(ratios),
        )  # fmt: skip

    @classmethod
    def of_differences(cls, measure: str, pairs: Sequence[tuple[float, float]], limit: float | None) -> PairedRow:
        """Create from (ours, peer) in seconds; measures the difference in microseconds."""
        differences = [(ours - peer) * 1e6 for ours, peer in pairs]
        low, high = interval(differences)
        ours, peer = (median([pair[i] for pair in pairs]) * 1e6 for i in (0, 1))
        note = f"{ours:.1f} us, plain Gloo {peer:.1f} us, ratio {median([o / p for o, p in pairs]):.3f}"
        return cls(
            measure, median(differences), "us", limit=limit, note=note, low=low, high=high, pairs=len(pairs)
        )  # fmt: skip
