"""What carries messages between ranks, and how long a collective takes on it.

A message of S bytes takes alpha + S beta: a latency and the time of its bytes (Hockney, The communication challenge for
MPP, 1994). A collective among n ranks is some rounds of such messages. Rounds and volume of each algorithm are those of
Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH (2005), and for the ring
all_reduce, which no algorithm undercuts in bytes, Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.records.quantity import format_bytes

__all__ = ["ALGORITHMS", "OPERATIONS", "Cost", "Link", "rounds_and_volume"]

OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter", "send")
"""What a link has times for; the receiving of what is sent is in `send`."""

ALGORITHMS = ("auto", "ring", "tree")


@dataclass(frozen=True, slots=True)
class Cost:
    """Latency and inverse bandwidth of one round of messages."""

    latency_s: float
    """Seconds of a round, however small its messages (alpha)."""
    s_per_byte: float
    """Seconds of a byte that a rank sends (beta)."""


def rounds_and_volume(operation: str, num_ranks: int, algorithm: str = "ring") -> tuple[float, float]:
    """How many rounds of messages a collective takes, and which multiple of its payload a rank sends in all.

    The payload S is the whole tensor: what is reduced, what an all_gather ends with, what a reduce_scatter starts from.

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

    Log is to base 2, rounded up. The tree of all_reduce is a pair of trees that halve the payload between them and
    stream it (Sanders, Speck and Träff, 2009, as NCCL has it); of all_gather and reduce_scatter, recursive doubling and
    halving; of broadcast, a binomial tree. The ring of broadcast is a scatter and an all_gather (van de Geijn).
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
            f"{operation!r} by {algorithm!r}: operations are {', '.join(OPERATIONS)}; algorithms ring and tree."
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
    """A link between ranks, of one mesh axis: latency and bandwidth, for all operations or measured for each."""

    name: str
    latency_s: float
    """Seconds of one message, however small, between neighbours."""
    bandwidth_bytes_per_s: float
    """Bytes a second that a rank sends, in one direction."""
    source: str = ""
    """Where the numbers are from."""
    call_s: float = 0.0
    """Seconds of a call besides its messages, such as that of a kernel's launch."""
    algorithm: str = "auto"
    """``ring``, ``tree``, or ``auto``: the shorter one."""
    measured: Mapping[str, Cost] = field(default_factory=dict)
    """What `calibrate` has found, by operation; each counts by the ring's rounds and volume. Others: as above."""

    def __post_init__(self) -> None:
        numbers = self.latency_s, self.bandwidth_bytes_per_s, self.call_s
        known = all(isinstance(value, Real) for value in numbers)
        if not known or not (self.bandwidth_bytes_per_s > 0 and self.latency_s >= 0 and self.call_s >= 0):
            raise UsageError(
                f"link {self.name!r}: latency {self.latency_s!r} s, {self.call_s!r} s a call, {self.bandwidth_bytes_per_s!r} bytes "
                "a second: times are 0 or more, and the bandwidth is above 0."
            )
        if self.algorithm not in ALGORITHMS:
            raise UsageError(f"link {self.name!r}: algorithm={self.algorithm!r} is none of {', '.join(ALGORITHMS)}.")

    def seconds(self, operation: str, num_bytes: float, num_ranks: int) -> float:
        """How long a call takes.

        Args:
            operation: One of `OPERATIONS`.
            num_bytes: The payload S of `rounds_and_volume`: of an all_gather what it ends with.
            num_ranks: Of the group.

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
        ways = [rounds_and_volume(operation, num_ranks, name) for name in names]
        return self.call_s + min(
            rounds * self.latency_s + volume * num_bytes / self.bandwidth_bytes_per_s for rounds, volume in ways
        )

    def scaled(self, efficiency: float) -> Link:
        """The same at a share of its bandwidth, 0 to 1: presets have what the hardware could do at best.

        Raises:
            UsageError: that is no share.
        """
        given: Any = efficiency
        if not isinstance(given, Real) or not 0 < float(given) <= 1:
            raise UsageError(f"efficiency={efficiency!r}: a share of the bandwidth, above 0 and up to 1, such as 0.8.")
        costs = {name: replace(cost, s_per_byte=cost.s_per_byte / efficiency) for name, cost in self.measured.items()}
        source = f"{self.source}; at {efficiency:.0%} of its bandwidth"
        return replace(
            self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * efficiency, source=source, measured=costs
        )

    def __str__(self) -> str:
        speed = (
            f"{format_bytes(round(self.bandwidth_bytes_per_s))}/s"
            if math.isfinite(self.bandwidth_bytes_per_s)
            else "any bandwidth"
        )
        return (
            f"{self.name}: {1e6 * self.latency_s:.3g} us, {speed}"
            + (f", {1e6 * self.call_s:.3g} us a call" if self.call_s else "")
            + (f" ({self.source})" if self.source else "")
        )
