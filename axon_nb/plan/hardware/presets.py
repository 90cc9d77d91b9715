"""Links by name: generations of NVLink, PCI Express, InfiniBand and Ethernet, with sources.

Bandwidths are peaks of a GPU (NVLink, PCI Express) or a port (the others) in one direction, as vendors and standards
give them; use `Link.scaled` for a fraction. Latencies are those of NCCL's own model: for a ring with the Simple
protocol, 8.4 us per call and per round 3.4 us over NVLink, 5.7 us over PCI Express, 14 us over a network
(nccl/src/graph/tuning.cc, ncclTunerConstantsDefaults).

Compute rates of GPUs by name, with sources.

Peaks are those of NVIDIA's datasheets for dense matrices (half of the figures "with sparsity"). A training step of a
large transformer reaches about half of them: 163 of an A100's 312 TFLOP/s, 52 %, over whole steps on 3072 GPUs
(Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 5.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axon_nb.errors import UsageError
from axon_nb.plan.hardware.links import Link
from axon_nb.plan.hardware.rates import Rates

__all__ = ["GPUS", "PRESETS", "resolve_link", "resolve_links", "resolve_rates"]

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


def resolve_link(given: Link | str) -> Link:
    """Return the link itself, or the preset of this name.

    Raises:
        UsageError: there is no such preset.
    """
    if isinstance(given, Link):
        return given
    name = str(given).lower().replace("_", "-")
    if name not in PRESETS:
        raise UsageError(f"A link must be a `Link` or one of {', '.join(PRESETS)}; got {given!r}.")
    return PRESETS[name]


def resolve_links(given: Any, axes: Mapping[str, int]) -> dict[str, Link]:
    """Return the link of each axis.

    Args:
        given: A link or a preset's name for all axes; a mapping from axes to these, where ``all`` covers the axes not
            listed; the result of `calibrate`; None: no times are wanted.
        axes: Size by axis.

    Raises:
        UsageError: an axis of 2 or more ranks has no link, or a name is unknown.
    """
    given = getattr(given, "links", given)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(axes, resolve_link(given))
    if "all" in given:
        given = dict.fromkeys(axes, given["all"]) | dict(given)
    missing = [axis for axis, size in axes.items() if size > 1 and axis not in given]
    if missing:
        raise UsageError(
            f"links has no entry for the axis {missing[0]!r}: add it (it has {', '.join(given) or 'none'})."
        )
    return {axis: resolve_link(given[axis]) for axis in axes if axis in given}


_UTILIZATION = 0.52
_TERA = 1e12


def _gpu(name: str, tera_flops: float, tera_bytes: float, what: str) -> tuple[str, Rates]:
    source = f"{_UTILIZATION:.0%} of the {tera_flops:g} TFLOP/s and {tera_bytes:g} TB/s of NVIDIA's datasheet, {what}"
    return name, Rates(_UTILIZATION * tera_flops * _TERA, _UTILIZATION * tera_bytes * _TERA, 0.0, source)


GPUS: Mapping[str, Rates] = dict(
    (
        _gpu("v100", 125.0, 0.9, "V100 SXM2, float16"),
        _gpu("a100", 312.0, 2.039, "A100 80GB SXM, bfloat16"),
        _gpu("a100-tf32", 156.0, 2.039, "A100 80GB SXM, TF32"),
        _gpu("h100", 989.4, 3.35, "H100 SXM, bfloat16"),
        _gpu("h100-tf32", 494.7, 3.35, "H100 SXM, TF32"),
        _gpu("h200", 989.4, 4.8, "H200 SXM, bfloat16"),
        _gpu("h200-tf32", 494.7, 4.8, "H200 SXM, TF32"),
        _gpu("b200", 2250.0, 8.0, "B200, bfloat16"),
        _gpu("b200-tf32", 1125.0, 8.0, "B200, TF32"),
    )
)
"""One rank's rates, by GPU name; without kernel launches."""


def resolve_rates(given: Rates | float | str) -> Rates:
    """Return rates from themselves, a GPU's name, or a number of FLOP/s.

    Raises:
        UsageError: it is none of these.
    """
    found = getattr(given, "rates", given)
    if isinstance(found, Rates):
        return found
    if isinstance(found, str) and found.lower() in GPUS:
        return GPUS[found.lower()]
    if isinstance(found, int | float) and not isinstance(found, bool) and found > 0:
        return Rates(float(found))
    raise UsageError(
        "rates must be FLOP/s such as 400e12, a `Rates(…)`, the result of `plan.calibrate()`, or one of "
        f"{', '.join(GPUS)}; got {given!r}."
    )
