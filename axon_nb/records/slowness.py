"""Deliberate slowness: which ranks compute slowly, which links carry messages slowly, and how long a message takes.

A group's collectives go around a ring of its ranks, in their order; its root-based ones and messages go straight from
one rank to another. So a slow link between ranks that are not neighbours in the ring delays only the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct

from axon_nb.errors import UsageError
from axon_nb.records.ranks import name_ranks

_MBIT = 1e6 / 8
_ALL_REDUCE, _ONE_WAY = ("all_reduce", "barrier"), ("all_gather", "reduce_scatter")
_FROM_ROOT, _TO_ROOT = ("broadcast", "scatter"), ("gather", "reduce")


class SlowRank(Struct, frozen=True):
    """A rank that computes slowly."""

    rank: int
    factor: float
    """How many times as long its computing takes; above 1."""


class SlowLink(Struct, frozen=True):
    """A link between two ranks, in both directions, that carries messages slowly."""

    ranks: tuple[int, ...]
    """The two ranks, the lower first; empty: every pair of ranks."""
    latency_s: float = 0.0
    """Seconds that each message takes, however small it is."""
    mbit_per_s: float = 0.0
    """Millions of bits per second; 0: as fast as the link is."""

    def seconds(self, num_bytes: float) -> float:
        """Return the delay of one message."""
        return self.latency_s + (num_bytes / (self.mbit_per_s * _MBIT) if self.mbit_per_s else 0.0)

    def __str__(self) -> str:
        where = f"link {self.ranks[0]}-{self.ranks[1]}" if self.ranks else "all links"
        facts = [f"{self.mbit_per_s:g} Mbit/s"] if self.mbit_per_s else []
        facts += [f"{self.latency_s * 1e3:g} ms"] if self.latency_s else []
        return f"{where}: {', '.join(facts)}"


class Slowness(Struct, frozen=True, omit_defaults=True):
    """All that is slowed."""

    ranks: tuple[SlowRank, ...] = ()
    links: tuple[SlowLink, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranks or self.links)

    def __str__(self) -> str:
        factors = dict.fromkeys(slow.factor for slow in self.ranks)
        texts = [
            f"{name_ranks(slow.rank for slow in self.ranks if slow.factor == factor)} × {factor:g}"
            for factor in factors
        ]
        return "; ".join([*texts, *map(str, self.links)])

    def with_ranks(self, ranks: Iterable[int], factor: float) -> Slowness:
        """Return the same with these ranks slowed by `factor`.

        Raises:
            UsageError: the factor is not above 1.
        """
        if not 1 < factor < float("inf"):
            raise UsageError(
                f"--factor: must be above 1, how many times as long computing takes; got {factor:g}. "
                "Run `%distributed slow off` to end the slowness."
            )
        slow = {known.rank: known for known in self.ranks}
        slow.update({rank: SlowRank(rank, factor) for rank in ranks})
        return msgspec.structs.replace(self, ranks=tuple(slow[rank] for rank in sorted(slow)))

    def with_link(self, link: SlowLink) -> Slowness:
        """Return the same with this link slowed; what was set for it before, or for all links, is replaced.

        Raises:
            UsageError: the link joins a rank with itself, or neither latency nor rate is set.
        """
        if link.ranks and link.ranks[0] == link.ranks[1]:
            raise UsageError(f"--link: must join two different ranks, such as 0-1; got {link.ranks[0]} twice.")
        if link.latency_s < 0 or link.mbit_per_s < 0 or not (link.latency_s or link.mbit_per_s):
            raise UsageError("A slow link needs --mbit, --latency or both, above 0: such as --mbit 100 --latency 5ms.")
        others = () if not link.ranks else tuple(other for other in self.links if other.ranks != link.ranks)
        return msgspec.structs.replace(self, links=tuple(sorted((*others, link), key=lambda one: one.ranks)))

    def on_world(self, size: int) -> Slowness:
        """Return the part that concerns the ranks of a world of this size."""
        return Slowness(
            tuple(slow for slow in self.ranks if slow.rank < size),
            tuple(link for link in self.links if all(rank < size for rank in link.ranks)),
        )

    def factor_of(self, rank: int) -> float:
        """Return how many times as long a rank's computing takes."""
        return next((slow.factor for slow in self.ranks if slow.rank == rank), 1.0)

    def between(self, one: int, other: int) -> SlowLink | None:
        """Return the slow link between two ranks; one that is named counts before all links."""
        pair = (min(one, other), max(one, other))
        links = [link for link in self.links if link.ranks in (pair, ())]
        return max(links, key=lambda link: len(link.ranks), default=None) if one != other else None


def message_delay_s(slowness: Slowness, sender: int, receiver: int, num_bytes: float) -> float:
    """Return how many seconds later a message arrives.

    Args:
        slowness: What is slowed.
        sender: A rank.
        receiver: The other one.
        num_bytes: Size of the message.
    """
    link = slowness.between(sender, receiver)
    return link.seconds(num_bytes) if link is not None else 0.0


def collective_delay_s(
    slowness: Slowness, name: str, members: Sequence[int], rank: int, num_bytes: float, *, root: int = 0
) -> float:
    """Return how many seconds later a collective ends on a rank.

    A ring makes 2 (n - 1) rounds for an all_reduce, n - 1 for an all_gather or a reduce_scatter, and ends a round when
    its slowest link has carried one part of n. An all_to_all sends each part at the same time.

    Args:
        slowness: What is slowed.
        name: The operation's public name, such as ``all_gather_single``.
        members: The ranks of the group, in order.
        rank: The rank.
        num_bytes: Of the whole tensor: what an all_gather returns, or a reduce_scatter gets. For gather and scatter,
            of one rank's part.
        root: The rank that a broadcast comes from, or a gather goes to.
    """
    size = len(members)
    part = num_bytes / size
    if name.startswith((*_ALL_REDUCE, *_ONE_WAY)):
        ring = zip(members, [*members[1:], members[0]], strict=True)
        rounds = (size - 1) * (2 if name.startswith(_ALL_REDUCE) else 1)
        return rounds * max(message_delay_s(slowness, one, other, part) for one, other in ring)
    if name.startswith("all_to_all"):
        return max(message_delay_s(slowness, rank, other, part) for other in members)
    if name.startswith(_FROM_ROOT):
        return message_delay_s(slowness, root, rank, num_bytes)
    if name.startswith(_TO_ROOT) and rank == root:
        return max(message_delay_s(slowness, other, rank, num_bytes) for other in members)
    return 0.0
