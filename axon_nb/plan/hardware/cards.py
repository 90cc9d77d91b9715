"""What GPUs achieve in training steps, and the links between them: one documented set of assumptions per card.

Peaks are those of NVIDIA's datasheets for dense matrices (half of the figures "with sparsity"). The achieved fraction
is fitted to half of the published runs in docs/published, and checked on the other half: see docs/plan_published.md.
For cards without such runs it is an assumption, and plans say so.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from axon_nb.plan.hardware.rates import Rates

_TERA = 1e12
ISSUE_S = 5e-6
"""Seconds in which Python and the driver issue an operation: an assumption, no published run depends on it."""


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
        """Return one rank's rates with other shares than the fitted ones; `achieved` stays.

        Args:
            shares: The shares.
        """
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
        return Rates(flops_per_s, bytes_per_s, source=source, products=products, issue_s=ISSUE_S)


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
