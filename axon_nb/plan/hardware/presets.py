"""Links by name: generations of NVLink, PCI Express, InfiniBand and Ethernet, with sources.

Bandwidths are peaks of a GPU (NVLink, PCI Express) or a port (the others) in one direction, as vendors and standards
give them; use `Link.scaled` for a fraction. Latencies are those of NCCL's own model: for a ring with the Simple
protocol, 8.4 us per call and per round 3.4 us over NVLink, 5.7 us over PCI Express, 14 us over a network
(nccl/src/graph/tuning.cc, ncclTunerConstantsDefaults).

A card's name stands for the links of its hosts: NVLink within one, network ports between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.plan.hardware.cards import CARDS, FITTED, GPUS, Card, Shares
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.rates import Rates

_NCCL_CALL_S = 8.4e-6
_NVLINK_S, _PCI_S, _NET_S = 3.4e-6, 5.7e-6, 14.0e-6
_GB = 1e9
_KERNEL_TCP_S = 30e-6
"""A small message between two hosts over kernel TCP: an assumption; `calibrate` measures it."""


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


def link_between(card: Card, ranks: Sequence[int]) -> Link:
    """Return the link between some ranks, of which each 8 in a row share a host; see `links_of_card`.

    Args:
        card: The card.
        ranks: Numbers in the world.
    """
    hosts = Counter(rank // card.gpus_per_host for rank in ranks)
    return _link(card, min(hosts.values(), default=1), len(hosts) > 1, FITTED)


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
