"""How much there is to compute, and at which rates it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from axon_nb.plan.asked_numbers import check_number

__all__ = ["PHASES", "Rates", "Work"]

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Work:
    """What some operations compute and move."""

    flops: float = 0.0
    """Floating point operations of matrix products, convolutions and attention; a multiplication and an addition are
    two."""
    bytes: float = 0.0
    """Bytes that all other operations read and write."""
    ops: float = 0.0
    """Number of operations; views do not count."""

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.ops + other.ops)

    def scaled(self, flops: float, rest: float | None = None) -> Work:
        """So many times the flops, and the bytes; the number of operations stays.

        Args:
            flops: Factor of the flops.
            rest: Factor of the bytes; None: the same.
        """
        return Work(self.flops * flops, self.bytes * (flops if rest is None else rest), self.ops)

    def times(self, count: float) -> Work:
        """The same work, so many times."""
        return Work(self.flops * count, self.bytes * count, self.ops * count)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a rank computes."""

    flops_per_s: float
    """Floating point operations a second, in matrix products."""
    bytes_per_s: float | None = None
    """Bytes a second that other operations read and write; None: they take no time."""
    launch_s: float = 0.0
    """Seconds that an operation takes besides: its launch."""
    source: str = "given"
    """Where the numbers are from."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """How much longer a measured model took than these rates say, by phase, one of `PHASES`."""
    launches: Mapping[str, float] = field(default_factory=dict)
    """Seconds that an operation of a measured model takes besides, by phase; of others `launch_s` times the factor."""
    wrappers: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step that a strategy's wrapper takes for each parameter of the model, besides what it sends and
    copies: its hooks, and the dispatch of distributed tensors. By strategy; measured with a model."""

    def __post_init__(self) -> None:
        for name, given, what in (
            ("flops_per_s", self.flops_per_s, "floating point operations a second, above 0"),
            ("bytes_per_s", 1.0 if self.bytes_per_s is None else self.bytes_per_s, "bytes a second, above 0; or None"),
        ):
            check_number(name, given, rule=what, least=1e-9)
        check_number("launch_s", self.launch_s, rule="seconds of an operation, 0 or more")

    def seconds(self, work: Work, phase: str) -> float:
        """How long some work takes.

        Args:
            work: Of one rank.
            phase: One of `PHASES`.
        """
        factor = self.factors.get(phase, 1.0)
        return self.busy_s(work) * factor + work.ops * self.launches.get(phase, self.launch_s * factor)

    def busy_s(self, work: Work) -> float:
        """The same by these rates alone, without launches."""
        moving = work.bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return work.flops / self.flops_per_s + moving

    def fitted(self, measured: Mapping[str, tuple[Work, float]], source: str) -> Rates:
        """The same, with the factors by which a model's phases took longer.

        Args:
            measured: Work and seconds, by phase.
            source: What was measured.
        """
        bare = replace(self, factors={}, launches={})
        factors = {
            phase: seconds / said
            for phase, (work, seconds) in measured.items()
            if seconds > 0 and (said := bare.seconds(work, phase)) > 0
        }
        return replace(bare, factors=factors, source=f"{self.source}; {source}")
