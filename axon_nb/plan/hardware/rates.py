"""Amounts of work, and the rates at which a rank does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from axon_nb.plan.arguments import check_number

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Work:
    """The work of some operations."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention; a multiply-add counts as two."""
    bytes: float = 0.0
    """Bytes that all other operations read and write."""
    ops: float = 0.0
    """Number of operations, without views."""

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.ops + other.ops)

    def scaled(self, flops: float, rest: float | None = None) -> Work:
        """Scale the FLOPs and the bytes; the number of operations stays.

        Args:
            flops: Factor of the FLOPs.
            rest: Factor of the bytes; None: the same.
        """
        return Work(self.flops * flops, self.bytes * (flops if rest is None else rest), self.ops)

    def times(self, count: float) -> Work:
        """Repeat the same work."""
        return Work(self.flops * count, self.bytes * count, self.ops * count)


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a rank computes."""

    flops_per_s: float
    """FLOP/s of matrix products."""
    bytes_per_s: float | None = None
    """Bytes per second of all other operations; None: they are free."""
    launch_s: float = 0.0
    """Seconds per operation on top: its launch."""
    source: str = "given"
    """Where the numbers come from."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """By phase, one of `PHASES`: how much longer a measured model took than these rates predict."""
    launches: Mapping[str, float] = field(default_factory=dict)
    """By phase: launch seconds per operation of a measured model; other phases use `launch_s` times the factor."""
    wrappers: Mapping[str, float] = field(default_factory=dict)
    """By strategy: seconds per parameter that its wrapper adds to a step (hooks, DTensor dispatch), besides
    communication and copies; measured with a model. And as ``dtensor`` seconds per operation on DTensors."""
    products: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s of matrix products in dtypes where it is another: ``float32``, ``float64``, ``tf32``, ``bfloat16``. Only
    plans of programs look at each product."""
    issue_s: float = 0.0
    """Seconds in which the host issues an operation, while the device computes: a phase takes at least as long as that
    of all its operations."""
    is_graphed: bool = False
    """Whether the host issues the operations of a phase at once, as one CUDA graph."""

    def __post_init__(self) -> None:
        for name, value, what in (
            ("flops_per_s", self.flops_per_s, "a number of FLOP/s above 0"),
            (
                "bytes_per_s",
                1.0 if self.bytes_per_s is None else self.bytes_per_s,
                "a number of bytes per second above 0, or None",
            ),
        ):
            check_number(name, value, rule=what, least=1e-9)
        for name in ("launch_s", "issue_s"):
            check_number(name, getattr(self, name), rule="seconds per operation, 0 or more")

    def seconds(self, work: Work, phase: str) -> float:
        """Return the seconds that some work takes.

        Args:
            work: The work of one rank.
            phase: One of `PHASES`.
        """
        factor = self.factors.get(phase, 1.0)
        num_launches = min(work.ops, 1.0) if self.is_graphed else work.ops
        computing = self.busy_s(work) * factor + num_launches * self.launches.get(phase, self.launch_s * factor)
        return max(computing, num_launches * self.issue_s)

    def for_products(self, dtype: str) -> Rates:
        """Return the same with the FLOP/s of products in a dtype.

        Args:
            dtype: Such as ``bfloat16``; ``tf32`` for float32 that may be rounded to it.
        """
        rounded = self.products.get("float32") if dtype == "tf32" else None
        flops_per_s = self.products.get(dtype, rounded or self.flops_per_s)
        return self if flops_per_s == self.flops_per_s else replace(self, flops_per_s=flops_per_s)

    def compiled(self, share: float) -> Rates:
        """Return the same with other operations fused by a compiler.

        Args:
            share: Fraction of their bytes, and of the time to issue operations, that is left; above 0 and up to 1.
        """
        if self.bytes_per_s is None:
            return self
        source = f"{self.source}; {share:.0%} of the bytes of other operations, as they are compiled"
        return replace(self, bytes_per_s=self.bytes_per_s / share, issue_s=share * self.issue_s, source=source)

    def busy_s(self, work: Work) -> float:
        """Return the same without factors and launches."""
        moving = work.bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        return work.flops / self.flops_per_s + moving

    def fitted(self, measured: Mapping[str, tuple[Work, float]], source: str) -> Rates:
        """Return these rates with factors fitted to a measured model.

        Args:
            measured: Work and seconds, by phase.
            source: What was measured.
        """
        bare = replace(self, factors={}, launches={})
        factors = {
            phase: seconds / predicted_s
            for phase, (work, seconds) in measured.items()
            if seconds > 0 and (predicted_s := bare.seconds(work, phase)) > 0
        }
        return replace(bare, factors=factors, source=f"{self.source}; {source}")
