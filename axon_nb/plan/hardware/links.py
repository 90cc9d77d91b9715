"""Links between ranks, and how long collectives take on them.

A message of S bytes takes alpha + S beta: a latency and the time of its bytes (Hockney, The communication challenge for
MPP, 1994). A collective among n ranks is a number of rounds of such messages. Rounds and volume of each algorithm are
those of Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005). The ring
all_reduce is bandwidth-optimal: Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.records.units import format_bytes

OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter", "send")
"""Operations that a link has times for; `send` includes its receive."""

ALGORITHMS = ("auto", "ring", "tree")


@dataclass(frozen=True, slots=True)
class Cost:
    """Latency and inverse bandwidth of one round of messages."""

    latency_s: float
    """Seconds per round, whatever its size (alpha)."""
    s_per_byte: float
    """Seconds per byte that a rank sends (beta)."""


def rounds_and_volume(operation: str, num_ranks: int, algorithm: str = "ring") -> tuple[float, float]:
    """Return a collective's number of message rounds, and the bytes that a rank sends as a multiple of the payload.

    The payload S is the whole tensor: the reduced one, an all_gather's output, a reduce_scatter's input.

    ============== ================================== ===========================
    operation      ring                               tree
    ============== ================================== ===========================
    all_reduce     2 (n - 1) rounds, 2 (n - 1) / n S  2 log n rounds, 2 S
    all_gather     n - 1 rounds, (n - 1) / n S        log n rounds, (n - 1) / n S
    reduce_scatter n - 1 rounds, (n - 1) / n S        log n rounds, (n - 1) / n S
    broadcast      log n + n - 1, 2 (n - 1) / n S     log n rounds, log n S
    all_to_all     n - 1 rounds, (n - 1) / n S        the same
    send           1 round, S                         the same
    barrier        log n rounds, nothing              the same
    ============== ================================== ===========================

    Log is to base 2, rounded up. all_reduce's tree is a pair of trees that share and stream the payload (Sanders, Speck
    and Träff, 2009, as in NCCL); all_gather and reduce_scatter use recursive doubling and halving; broadcast uses a
    binomial tree. broadcast's ring is a scatter and an all_gather (van de Geijn).
    Barrier: dissemination (Hensgen, Finkel and Manber, 1988).

    Args:
        operation: One of `OPERATIONS`.
        num_ranks: n.
        algorithm: ``ring`` or ``tree``.

    Raises:
        UsageError: there is no such operation or algorithm.
    """
    if operation not in OPERATIONS or algorithm not in ("ring", "tree"):
        raise UsageError(
            f"operation must be one of {', '.join(OPERATIONS)} and algorithm ring or tree; got {operation!r} and "
            f"{algorithm!r}."
        )
    if num_ranks < 2:
        return 0.0, 0.0
    n, log = num_ranks, math.ceil(math.log2(num_ranks))
    part = (n - 1) / n
    if operation == "send":
        return 1.0, 1.0
    if operation == "barrier":
        return float(log), 0.0
    table = {
        "all_reduce": ((2.0 * (n - 1), 2 * part), (2.0 * log, 2.0)),
        "broadcast": ((log + n - 1.0, 2 * part), (float(log), float(log))),
        "all_to_all": ((n - 1.0, part), (n - 1.0, part)),
    }
    ring, tree = table.get(operation, ((n - 1.0, part), (float(log), part)))
    return ring if algorithm == "ring" else tree


@dataclass(frozen=True)
class Link:
    """The link between ranks along one mesh axis: one latency and bandwidth, or measured costs per operation."""

    name: str
    latency_s: float
    """Seconds per message between neighbours, whatever its size."""
    bandwidth_bytes_per_s: float
    """Bytes per second that a rank sends, in one direction."""
    source: str = ""
    """Where the numbers come from."""
    call_s: float = 0.0
    """Seconds per call on top of its messages, such as a kernel launch."""
    algorithm: str = "auto"
    """``ring``, ``tree``, or ``auto``: the faster one."""
    measured: Mapping[str, Cost] = field(default_factory=dict)
    """Costs that `calibrate` measured, by operation, applied to the ring's rounds and volume. Other operations use the
    fields above."""

    def __post_init__(self) -> None:
        numbers = self.latency_s, self.bandwidth_bytes_per_s, self.call_s
        known = all(isinstance(value, Real) for value in numbers)
        if not known or not (self.bandwidth_bytes_per_s > 0 and self.latency_s >= 0 and self.call_s >= 0):
            raise UsageError(
                f"Link {self.name!r}: latency_s and call_s must be 0 or more and bandwidth_bytes_per_s above 0; got "
                f"{self.latency_s!r}, {self.call_s!r} and {self.bandwidth_bytes_per_s!r}."
            )
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {self.algorithm!r}.")

    def seconds(self, operation: str, num_bytes: float, num_ranks: int) -> float:
        """Return how many seconds a call takes.

        Args:
            operation: One of `OPERATIONS`.
            num_bytes: The payload S of `rounds_and_volume`; for an all_gather, its output.
            num_ranks: Size of the group.

        Raises:
            UsageError: there is no such operation.
        """
        if num_ranks < 2 and operation in OPERATIONS:
            return 0.0
        cost = self.measured.get(operation)
        if cost is not None:
            rounds, volume = rounds_and_volume(operation, num_ranks)
            return self.call_s + rounds * cost.latency_s + volume * num_bytes * cost.s_per_byte
        names = ("ring", "tree") if self.algorithm == "auto" else (self.algorithm,)
        costs = [rounds_and_volume(operation, num_ranks, name) for name in names]
        return self.call_s + min(
            rounds * self.latency_s + volume * num_bytes / self.bandwidth_bytes_per_s for rounds, volume in costs
        )

    def scaled(self, efficiency: float) -> Link:
        """Return the same link at a fraction of its bandwidth, 0 to 1; presets have the hardware's peak.

        Raises:
            UsageError: it is not a fraction.
        """
        value: Any = efficiency
        if not isinstance(value, Real) or not 0 < float(value) <= 1:
            raise UsageError(
                f"efficiency must be a fraction of the bandwidth above 0 and up to 1, such as 0.8; got {efficiency!r}."
            )
        costs = {name: replace(cost, s_per_byte=cost.s_per_byte / efficiency) for name, cost in self.measured.items()}
        source = f"{self.source}; at {efficiency:.0%} of its bandwidth"
        return replace(
            self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * efficiency, source=source, measured=costs
        )

    def __str__(self) -> str:
        speed = (
            f"{format_bytes(round(self.bandwidth_bytes_per_s))}/s"
            if math.isfinite(self.bandwidth_bytes_per_s)
            else "unlimited bandwidth"
        )
        return (
            f"{self.name}: {1e6 * self.latency_s:.3g} us, {speed}"
            + (f", {1e6 * self.call_s:.3g} us per call" if self.call_s else "")
            + (f" ({self.source})" if self.source else "")
        )
