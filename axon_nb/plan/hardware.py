"""Hardware: rates at which a rank computes, links between ranks, and what is known of cards and networks by name.

Cards: peaks are those of NVIDIA's datasheets for dense matrices (half of the figures "with sparsity"). The achieved
fraction is fitted to half of the published runs in docs/published, and checked on the other half: see
docs/plan_published.md. For cards without such runs it is an assumption, and plans say so. A card's name also stands for
the links of its hosts: NVLink within one, network ports between them.

Links: a message of S bytes takes alpha + S beta: a latency and the time of its bytes (Hockney, The communication
challenge for MPP, 1994). A collective among n ranks is a number of rounds of such messages. Rounds and volume of each
algorithm are those of Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH
(2005). The ring all_reduce is bandwidth-optimal: Patarasuk and Yuan, Bandwidth Optimal All-reduce (2009).

Presets: bandwidths are peaks of a GPU (NVLink, PCI Express) or a port (the others) in one direction, as vendors and
standards give them; use `Link.scaled` for a fraction. Latencies are those of NCCL's own model: for a ring with the
Simple protocol, 8.4 us per call and per round 3.4 us over NVLink, 5.7 us over PCI Express, 14 us over a network
(nccl/src/graph/tuning.cc, ncclTunerConstantsDefaults).
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

from axon_nb.errors import UsageError
from axon_nb.plan.arguments import check_number
from axon_nb.records.units import format_bytes

PHASES = ("forward", "backward", "optimizer")
_TERA = 1e12
ISSUE_S = 5e-6
"""Seconds in which Python and the driver issue an operation: an assumption, no published run depends on it."""
OPERATIONS = ("all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "reduce_scatter", "send")
"""Operations that a link has times for; `send` includes its receive."""
ALGORITHMS = ("auto", "ring", "tree")
_NCCL_CALL_S = 8.4e-6
_NVLINK_S, _PCI_S, _NET_S = 3.4e-6, 5.7e-6, 14.0e-6
_GB = 1e9
_KERNEL_TCP_S = 30e-6
"""A small message between two hosts over kernel TCP: an assumption; `calibrate` measures it."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of some operations."""

    flops: float = 0.0
    """FLOPs of matrix products, convolutions and attention; a multiply-add counts as two."""
    bytes: float = 0.0
    """Bytes that all other operations read and write."""
    ops: float = 0.0
    """Number of operations, without views."""
    attention: float = 0.0
    """The part of `flops` that is attention."""

    def __add__(self, other: Work) -> Work:
        flops, attention = self.flops + other.flops, self.attention + other.attention
        return Work(flops, self.bytes + other.bytes, self.ops + other.ops, attention)

    def scaled(self, flops: float, rest: float | None = None) -> Work:
        """Scale the FLOPs and the bytes; the number of operations stays.

        Args:
            flops: Factor of the FLOPs.
            rest: Factor of the bytes; None: the same.
        """
        moved = self.bytes * (flops if rest is None else rest)
        return Work(self.flops * flops, moved, self.ops, self.attention * flops)

    def times(self, count: float) -> Work:
        """Repeat the same work."""
        return Work(self.flops * count, self.bytes * count, self.ops * count, self.attention * count)


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
    attention_flops_per_s: float | None = None
    """FLOP/s of attention; None: those of matrix products."""
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
        attending = work.attention / (self.attention_flops_per_s or self.flops_per_s)
        return (work.flops - work.attention) / self.flops_per_s + attending + moving

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


@dataclass(frozen=True, slots=True)
class Shares:
    """What steps achieve of datasheets' figures: `scripts/published_fit.py` writes these into fitted.toml."""

    achieved: Mapping[str, float]
    """Fraction of the peak that matrix products achieve, by card."""
    other: float
    """Counted bytes per second of other operations, as a multiple of the memory's bandwidth."""
    compiled: float
    """Fraction of these bytes that remains when `torch.compile` or hand-written kernels fuse the operations."""
    nvlink: float
    """Fraction of NVLink's bandwidth that large collectives achieve within a host."""
    network: float
    """Fraction of a network port's bandwidth that large messages between hosts achieve."""


FITTED = Shares(**tomllib.loads(Path(__file__).with_name("fitted.toml").read_text(encoding="utf-8")))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, in hosts of 8 with NVLink inside and one network port per GPU."""

    name: str
    what: str
    """The datasheet and the dtype of its matrix products."""
    tera_flops: float
    """Peak."""
    tera_bytes: float
    """Peak bandwidth of its memory, per second."""
    gib: float
    """Size of its memory, as its driver reports it."""
    nvlink: str
    """Preset of the link within a host."""
    port: str
    """Preset of its network port."""
    tera_float32: float
    """Peak of products in float32, and with float64's matrix units at most that of float64."""
    tera_tf32: float
    """Peak of products in float32 that may be rounded to TF32."""
    achieved: float
    """Fraction of the peak that the matrix products of a training step achieve."""
    assumption: str = ""
    """Why `achieved` is an assumption; empty: it is fitted to published runs of this card and dtype."""
    gpus_per_host: int = 8

    @property
    def rates(self) -> Rates:
        """One rank's rates."""
        return self.rates_with(FITTED)

    def rates_with(self, shares: Shares) -> Rates:
        """Return one rank's rates with other shares than the fitted ones; `achieved` stays."""
        basis = f" ({self.assumption})" if self.assumption else ""
        source = (
            f"{self.achieved:.0%}{basis} of the {self.tera_flops:g} TFLOP/s of NVIDIA's datasheet, {self.what}; "
            f"other operations at {shares.other:g} times its {self.tera_bytes:g} TB/s"
        )
        flops_per_s, bytes_per_s = self.achieved * self.tera_flops * _TERA, shares.other * self.tera_bytes * _TERA
        peaks = {"float32": self.tera_float32, "float64": self.tera_float32, "tf32": self.tera_tf32}
        products = {dtype: self.achieved * peak * _TERA for dtype, peak in peaks.items()}
        if self.tera_flops == self.tera_tf32:  # the user has asked for TF32
            products = {}
        attention = flops_per_s / 2 if self.name.endswith("fp8") else None  # it stays in bfloat16
        made = Rates(flops_per_s, bytes_per_s, source=source, products=products, issue_s=ISSUE_S)
        return replace(made, attention_flops_per_s=attention)


class _Board(NamedTuple):
    tera_bytes: float
    gib: float
    nvlink: str
    port: str
    tera_float32: float
    tera_tf32: float


_V100 = _Board(0.9, 31.7, "nvlink2", "ib-edr", 15.7, 15.7)  # it has no TF32


_A100 = _Board(2.039, 80.0, "nvlink3", "ib-hdr", 19.5, 156.0)


_H100 = _Board(3.35, 79.6, "nvlink4", "ib-ndr", 66.9, 494.7)


_GRAND_TETON = _Board(2.4, 79.6, "nvlink4", "ib-ndr", 66.9, 494.7)


_H200 = _Board(4.8, 140.4, "nvlink4", "ib-ndr", 66.9, 494.7)


_B200 = _Board(8.0, 179.1, "nvlink5", "ib-ndr", 75.0, 1125.0)


def _card(
    name: str, what: str, tera_flops: float, board: _Board, like: str = "", *, achieved: float | None = None
) -> tuple[str, Card]:
    """A card whose share is fitted to its own runs, or, as an assumption, that of another card or a given one."""
    if achieved is not None:
        return name, Card(name, what, tera_flops, *board, achieved, "assumed: no published run was compared")
    assumption = f"assumed: that of {like}, which has the same matrix units" if like else ""
    return name, Card(name, what, tera_flops, *board, FITTED.achieved[like or name], assumption)


CARDS: Mapping[str, Card] = dict(
    (
        _card("v100", "V100 SXM2, float16", 125.0, _V100, achieved=0.52),
        _card("a100", "A100 80GB SXM, bfloat16", 312.0, _A100),
        _card("a100-tf32", "A100 80GB SXM, TF32", 156.0, _A100, like="a100"),
        _card("h100", "H100 SXM, bfloat16", 989.4, _H100),
        _card("h100-fp8", "H100 SXM, float8 linear layers", 1978.9, _H100),
        _card("h100-tf32", "H100 SXM, TF32", 494.7, _H100, like="h100"),
        _card("h100-500w", "H100 SXM limited to 500 W, with HBM2e, bfloat16", 989.4, _GRAND_TETON),
        _card("h100-500w-fp8", "H100 SXM limited to 500 W, with HBM2e, float8 linear layers", 1978.9, _GRAND_TETON),
        _card("h200", "H200 SXM, bfloat16", 989.4, _H200, like="h100"),
        _card("h200-fp8", "H200 SXM, float8 linear layers", 1978.9, _H200, like="h100-fp8"),
        _card("h200-tf32", "H200 SXM, TF32", 494.7, _H200, like="h100"),
        _card("b200", "B200, bfloat16", 2250.0, _B200, achieved=0.6),
        _card("b200-tf32", "B200, TF32", 1125.0, _B200, achieved=0.6),
    )
)
"""The cards, by name."""


GPUS: Mapping[str, Rates] = {name: card.rates for name, card in CARDS.items()}
"""One rank's rates, by GPU name."""


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


def _nvlink(name: str, gb_both_ways: float, gpu: str) -> Link:
    source = f"NVIDIA {gpu} datasheet: {gb_both_ways:g} GB/s per GPU, both directions together"
    return Link(name, _NVLINK_S, gb_both_ways / 2 * _GB, source, _NCCL_CALL_S)


def _pci(name: str, generation: int, gb: float) -> Link:
    source = f"PCI-SIG, PCI Express {generation}.0: 16 lanes, after 128b/130b encoding"
    return Link(name, _PCI_S, gb * _GB, source, _NCCL_CALL_S)


def _infiniband(name: str, gigabits: float) -> Link:
    source = f"InfiniBand Trade Association roadmap: 4 lanes, {gigabits:g} Gb/s per port"
    return Link(name, _NET_S, gigabits / 8 * _GB, source, _NCCL_CALL_S)


def _ethernet(name: str, gigabits: float, standard: str) -> Link:
    source = f"IEEE {standard}: {gigabits:g} Gb/s per port; latency assumed for kernel TCP"
    return Link(name, _KERNEL_TCP_S, gigabits / 8 * _GB, source)


PRESETS: Mapping[str, Link] = {
    link.name: link
    for link in (
        _nvlink("nvlink2", 300, "V100"),
        _nvlink("nvlink3", 600, "A100"),
        _nvlink("nvlink4", 900, "H100"),
        _nvlink("nvlink5", 1800, "B200"),
        _pci("pcie3", 3, 15.75),
        _pci("pcie4", 4, 31.5),
        _pci("pcie5", 5, 63.0),
        _infiniband("ib-edr", 100),
        _infiniband("ib-hdr", 200),
        _infiniband("ib-ndr", 400),
        _infiniband("ib-xdr", 800),
        _ethernet("ethernet-1g", 1, "802.3ab"),
        _ethernet("ethernet-10g", 10, "802.3ae"),
        _ethernet("ethernet-25g", 25, "802.3by"),
        _ethernet("ethernet-100g", 100, "802.3bm"),
        _ethernet("ethernet-400g", 400, "802.3bs"),
    )
}
"""The presets, by name."""


def resolve_link(link: Link | str) -> Link:
    """Return the link itself, or the preset of this name.

    Raises:
        UsageError: there is no such preset.
    """
    if isinstance(link, Link):
        return link
    name = str(link).lower().replace("_", "-")
    if name not in PRESETS:
        raise UsageError(f"A link must be a `Link` or one of {', '.join(PRESETS)}; got {link!r}.")
    return PRESETS[name]


def resolve_links(links: Any, axes: Mapping[str, int]) -> dict[str, Link]:
    """Return the link of each axis.

    Args:
        links: A link or a preset's name for all axes; a GPU's name, for links between GPUs in hosts of 8; a mapping
            from axes to links or names of presets, where ``all`` covers the axes not listed; the result of `calibrate`;
            None: no times are needed.
        axes: Size by axis; ranks along the last one are neighbours.

    Raises:
        UsageError: an axis of 2 or more ranks has no link, or a name is unknown.
    """
    links = getattr(links, "links", links)
    if links is None:
        return {}
    if isinstance(links, str) and links.lower() in CARDS:
        return links_of_card(CARDS[links.lower()], axes)
    if not isinstance(links, Mapping):
        return dict.fromkeys(axes, resolve_link(links))
    if "all" in links:
        links = dict.fromkeys(axes, links["all"]) | dict(links)
    missing = [axis for axis, size in axes.items() if size > 1 and axis not in links]
    if missing:
        raise UsageError(
            f"links has no entry for the axis {missing[0]!r}: add it (it has {', '.join(links) or 'none'})."
        )
    return {axis: resolve_link(links[axis]) for axis in axes if axis in links}


def links_of_card(card: Card, axes: Mapping[str, int], shares: Shares = FITTED) -> dict[str, Link]:
    """Return the link of each axis between cards in hosts of NVLink and one port each.

    Ranks of a group that share a host form rings that leave it through all their ports, so each ring step between hosts
    has their sum, up to NVLink's bandwidth (as in NCCL).

    Args:
        card: The card.
        axes: Size by axis; ranks along the last one are neighbours.
        shares: What links achieve of their bandwidth.
    """
    links, stride = {}, 1
    for axis, size in reversed(list(axes.items())):
        links[axis] = _link(card, max(card.gpus_per_host // stride, 1), stride * size > card.gpus_per_host, shares)
        stride *= size
    return {axis: links[axis] for axis in axes}


def link_between(card: Card, ranks: Sequence[int], shares: Shares = FITTED) -> Link:
    """Return the link between some ranks, of which each 8 in a row share a host; see `links_of_card`.

    Args:
        card: The card.
        ranks: Numbers in the world.
        shares: What links achieve of their bandwidth.
    """
    hosts = Counter(rank // card.gpus_per_host for rank in ranks)
    return _link(card, min(hosts.values(), default=1), len(hosts) > 1, shares)


def _link(card: Card, ranks_per_host: int, between_hosts: bool, shares: Shares) -> Link:
    inside = resolve_link(card.nvlink).scaled(shares.nvlink)
    if not between_hosts:
        return inside
    port = resolve_link(card.port).scaled(shares.network)
    bandwidth = min(ranks_per_host * port.bandwidth_bytes_per_s, inside.bandwidth_bytes_per_s)
    name = f"{ranks_per_host} x {port.name}" if ranks_per_host > 1 else port.name
    return replace(port, name=name, bandwidth_bytes_per_s=bandwidth)


def resolve_rates(rates: Rates | float | str) -> Rates:
    """Return rates from themselves, a GPU's name, or a number of FLOP/s.

    Raises:
        UsageError: it is none of these.
    """
    value = getattr(rates, "rates", rates)
    if isinstance(value, Rates):
        return value
    if isinstance(value, str) and value.lower() in GPUS:
        return GPUS[value.lower()]
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return Rates(float(value))
    raise UsageError(
        "rates must be FLOP/s such as 400e12, a `Rates(…)`, the result of `plan.calibrate()`, or one of "
        f"{', '.join(GPUS)}; got {rates!r}."
    )
