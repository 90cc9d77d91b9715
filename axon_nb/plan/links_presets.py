"""Links by name: what generations of NVLink, PCI Express, InfiniBand and Ethernet carry, with sources.

Bandwidths are what a GPU (NVLink, PCI Express) or a port (the others) sends in one direction at best, as vendors and
standards give them; `Link.scaled` takes a share of it. Latencies are those that NCCL itself reckons with: for a ring by
its Simple protocol 8.4 us a call, and a round of 3.4 us over NVLink, 5.7 over PCI Express, 14 over a network
(nccl/src/graph/tuning.cc, ncclTunerConstantsDefaults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.plan.links import Link

__all__ = ["PRESETS", "resolve_link", "resolve_links"]

_NCCL_CALL_S = 8.4e-6
_NVLINK_S, _PCI_S, _NET_S = 3.4e-6, 5.7e-6, 14.0e-6
_GB = 1e9
_KERNEL_TCP_S = 30e-6
"""Of a small message between two hosts over the kernel's TCP: an assumption; `calibrate` measures it."""


def _nvlink(name: str, gb_both_ways: float, gpu: str) -> Link:
    source = f"NVIDIA {gpu} datasheet: {gb_both_ways:g} GB/s a GPU, both directions together"
    return Link(name, _NVLINK_S, gb_both_ways / 2 * _GB, source, _NCCL_CALL_S)


def _pci(name: str, generation: int, gb: float) -> Link:
    source = f"PCI-SIG, PCI Express {generation}.0: 16 lanes, after 128b/130b encoding"
    return Link(name, _PCI_S, gb * _GB, source, _NCCL_CALL_S)


def _infiniband(name: str, gigabits: float) -> Link:
    source = f"InfiniBand Trade Association roadmap: 4 lanes, {gigabits:g} Gb/s a port"
    return Link(name, _NET_S, gigabits / 8 * _GB, source, _NCCL_CALL_S)


def _ethernet(name: str, gigabits: float, standard: str) -> Link:
    source = f"IEEE {standard}: {gigabits:g} Gb/s a port; latency assumed for TCP of the kernel"
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
"""By name."""


def resolve_link(given: Link | str) -> Link:
    """The link itself, or the preset of this name.

    Raises:
        UsageError: there is none.
    """
    if isinstance(given, Link):
        return given
    name = str(given).lower().replace("_", "-")
    if name not in PRESETS:
        raise UsageError(f"link {given!r}: presets are {', '.join(PRESETS)}; or give Link(name, latency_s, bandwidth).")
    return PRESETS[name]


def resolve_links(given: Any, axes: Mapping[str, int]) -> dict[str, Link]:
    """The link of each axis.

    Args:
        given: A link or a preset's name for all axes; a mapping of axes to these, where ``all`` stands for those that
            are not there; what `calibrate` has returned; None: no times are wanted.
        axes: Size by axis.

    Raises:
        UsageError: an axis of 2 or more ranks has none, or a name is unknown.
    """
    given = getattr(given, "links", given)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(axes, resolve_link(given))
    if "all" in given:
        given = dict.fromkeys(axes, given["all"]) | dict(given)
    lost = [axis for axis, size in axes.items() if size > 1 and axis not in given]
    if lost:
        raise UsageError(f"links has {', '.join(given) or 'nothing'}, and none for the axis {lost[0]!r}: add it.")
    return {axis: resolve_link(given[axis]) for axis in axes if axis in given}
