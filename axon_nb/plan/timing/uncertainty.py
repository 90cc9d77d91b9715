"""The range of seconds in which a step is expected, and the assumptions on which it depends most."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.rates import Rates
from axon_nb.plan.tables import format_ms

Predict = Callable[[Rates, Mapping[str, Link], float], float]
"""Returns a step's seconds with these rates and links, and this fraction of hidden communication."""

SPREADS = {"matrix products": 0.25, "other operations": 0.4, "links": 0.3, "hidden": 0.3}
"""By how much each assumption may be off, as a fraction of it. With these, four of five published steps lie in their
intervals (tests/plan/test_published.py)."""


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """An interval of a prediction, and what it depends on."""

    low_s: float
    high_s: float
    depends_on: tuple[str, ...]
    """The assumptions that change the prediction most, the most important first: at most two."""

    def __str__(self) -> str:
        text = f"expected: {format_ms(self.low_s)} to {format_ms(self.high_s)} ms"
        return f"{text}; it depends most on {' and on '.join(self.depends_on)}" if self.depends_on else text


def estimate_uncertainty(predict: Predict, rates: Rates, links: Mapping[str, Link], overlap: float) -> Uncertainty:
    """Vary the assumptions one by one, and combine the changes as independent errors.

    Args:
        predict: Predicts the step.
        rates: Rates of one rank.
        links: The links by axis.
        overlap: Fraction of overlappable communication that is hidden.
    """
    seconds = predict(rates, links, overlap)
    changes: dict[str, tuple[float, float]] = {}

    def vary(name: str, spread: float, at: Callable[[float], float]) -> None:
        changes[name] = max(seconds - at(1 + spread), 0.0), max(at(1 - spread) - seconds, 0.0)

    vary(
        "the rate of matrix products",
        SPREADS["matrix products"],
        lambda factor: predict(replace(rates, flops_per_s=rates.flops_per_s * factor), links, overlap),
    )
    if (moved := rates.bytes_per_s) is not None:
        vary(
            "the rate of other operations",
            SPREADS["other operations"],
            lambda factor: predict(replace(rates, bytes_per_s=moved * factor), links, overlap),
        )

    def with_bandwidth(axis: str, factor: float) -> float:
        return predict(rates, {**links, axis: _faster(links[axis], factor)}, overlap)

    for axis in links:
        vary(f"the bandwidth along {axis}", SPREADS["links"], functools.partial(with_bandwidth, axis))
    if links:
        vary(
            "how much communication is hidden",
            SPREADS["hidden"],
            lambda factor: predict(rates, links, min(overlap * factor, 1.0)),
        )
    low, high = (math.sqrt(sum(change[side] ** 2 for change in changes.values())) for side in (0, 1))
    order = sorted((name for name in changes if max(changes[name]) > 0), key=lambda name: -max(changes[name]))
    return Uncertainty(seconds - low, seconds + high, tuple(order[:2]))


def _faster(link: Link, factor: float) -> Link:
    costs = {name: replace(cost, s_per_byte=cost.s_per_byte / factor) for name, cost in link.measured.items()}
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, measured=costs)
