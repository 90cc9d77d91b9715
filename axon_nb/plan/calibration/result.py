"""The result of a calibration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from axon_nb.plan.display import Shown, Table, format_flops, format_ms, plotly_figure, titled
from axon_nb.plan.hardware import Link, Rates
from axon_nb.records.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd

_HEAD = ("axis", "ranks", "collective", "bytes", "measured, ms", "fitted, ms")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement."""

    axis: str
    num_ranks: int
    """Ranks along the axis."""
    operation: str
    bytes: int
    """Size of the whole tensor."""
    seconds: float
    """Seconds per call: the slowest rank's median."""


@dataclass(frozen=True, slots=True)
class Check:
    """A measurement that was not used for fitting, and what the calibration predicts for it."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: 0.1 is 10 % too long."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0


@dataclass(frozen=True, repr=False)
class Calibration(Shown):
    """Links and rates of running ranks; accepted as `links=` and as `rates=`."""

    links: Mapping[str, Link]
    """By axis; ``all`` if there was no mesh."""
    rates: Rates
    """Of the slowest rank while all compute."""
    overlap: float
    """Fraction of a collective's time, 0 to 1, that computation hides."""
    where: str
    """Ranks, backend, device and threads, as text."""
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    checks: tuple[Check, ...] = field(default=(), repr=False)
    """Check runs: matrix products and elementwise operations of other shapes, and each size of a collective as the
    other sizes predict it."""

    def _check_note(self) -> str:
        if not self.checks:
            return ""
        typical = statistics.median(abs(check.error) for check in self.checks)
        worst = max(self.checks, key=lambda check: abs(check.error))
        return (
            f"; its {len(self.checks)} check runs were off by {typical:.0%} (median), at most {worst.error:+.0%} "
            f"({worst.name})"
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per measurement: axis, num_ranks, operation, mib, ms, fit_ms."""
        import pandas as pd

        rows = [
            (s.axis, s.num_ranks, s.operation, s.bytes / 2**20, 1e3 * s.seconds, 1e3 * self._fit(s))
            for s in self.samples
        ]
        return pd.DataFrame(rows, columns=["axis", "num_ranks", "operation", "mib", "ms", "fit_ms"])

    def figure(self) -> Any:
        """A plotly figure: milliseconds over bytes, log-log; points are measured, lines are fitted."""
        traces = []
        for key in dict.fromkeys((sample.axis, sample.operation) for sample in self.samples):
            series = sorted((s for s in self.samples if (s.axis, s.operation) == key), key=lambda s: s.bytes)
            name = f"{key[1]}, {key[0]}"
            sizes = [sample.bytes for sample in series]
            measured, fitted = [1e3 * s.seconds for s in series], [1e3 * self._fit(s) for s in series]
            traces.append({"type": "scatter", "mode": "markers", "name": name, "x": sizes, "y": measured})
            traces.append({"type": "scatter", "mode": "lines", "name": f"{name}, fit", "x": sizes, "y": fitted})
        axes = {"xaxis": titled("bytes", type="log"), "yaxis": titled("ms", type="log")}
        return plotly_figure(traces, titled(self.where, **axes))

    def _fit(self, sample: Sample) -> float:
        return self.links[sample.axis].seconds(sample.operation, sample.bytes, sample.num_ranks)

    def _summary(self) -> str:
        rates = self.rates
        moving = (
            "" if rates.bytes_per_s is None else f", {format_bytes(round(rates.bytes_per_s))}/s of other operations"
        )
        return (
            f"{self.where}: {format_flops(rates.flops_per_s)} per rank{moving}, {1e6 * rates.launch_s:.3g} us per "
            f"launch; computation hides {self.overlap:.0%} of communication{self._check_note()}"
        )

    def _table(self) -> Table:
        rows = [
            (s.axis, str(s.num_ranks), s.operation, format_bytes(s.bytes), *map(format_ms, (s.seconds, self._fit(s))))
            for s in self.samples
        ]
        return self._summary(), _HEAD, rows, ()
