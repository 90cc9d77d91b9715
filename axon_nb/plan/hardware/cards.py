"""What GPUs achieve in training steps, and the links between them: one documented set of assumptions per card.

Peaks are those of NVIDIA's datasheets for dense matrices (half of the figures "with sparsity"). The achieved fraction
is fitted to half of the published runs in docs/published, and checked on the other half: see docs/plan_published.md.
For cards without such runs it is an assumption, and plans say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from axon_nb.plan.hardware.rates import Rates

__all__ = ["CARDS", "COMPILED_SHARE", "GPUS", "ISSUE_S", "NETWORK_SHARE", "NVLINK_SHARE", "OTHER_SHARE", "Card"]

_TERA = 1e12
OTHER_SHARE = 1.65
"""Counted bytes per second of operations other than matrix products, as a multiple of the memory's bandwidth. Above 1:
caches hold a part of these bytes, and the published runs use fused norms and optimizers."""
COMPILED_SHARE = 0.6
"""Fraction of the bytes of these operations that remains when `torch.compile` or hand-written kernels fuse them."""
ISSUE_S = 5e-6
"""Seconds in which Python and the driver issue an operation: an assumption, no published run depends on it."""
NVLINK_SHARE = 0.87
"""Fraction of NVLink's bandwidth that large collectives achieve within a host."""
NETWORK_SHARE = 0.89
"""Fraction of a network port's bandwidth that large messages between hosts achieve."""


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
    nvlink: str
    """Preset of the link within a host."""
    port: str
    """Preset of its network port."""
    achieved: float
    """Fraction of the peak that the matrix products of a training step achieve."""
    is_fitted: bool = True
    """Whether `achieved` is from published runs of this card and dtype."""
    gpus_per_host: int = 8

    @property
    def rates(self) -> Rates:
        """One rank's rates."""
        basis = "" if self.is_fitted else " (assumed: no published run was compared)"
        source = (
            f"{self.achieved:.0%}{basis} of the {self.tera_flops:g} TFLOP/s of NVIDIA's datasheet, {self.what}; "
            f"other operations at {OTHER_SHARE:g} times its {self.tera_bytes:g} TB/s"
        )
        flops_per_s, bytes_per_s = self.achieved * self.tera_flops * _TERA, OTHER_SHARE * self.tera_bytes * _TERA
        return Rates(flops_per_s, bytes_per_s, source=source, issue_s=ISSUE_S)


class _Board(NamedTuple):
    tera_bytes: float
    nvlink: str
    port: str


_V100 = _Board(0.9, "nvlink2", "ib-edr")
_A100 = _Board(2.039, "nvlink3", "ib-hdr")
_H100 = _Board(3.35, "nvlink4", "ib-ndr")
_GRAND_TETON = _Board(2.4, "nvlink4", "ib-ndr")
_H200 = _Board(4.8, "nvlink4", "ib-ndr")
_B200 = _Board(8.0, "nvlink5", "ib-ndr")


def _card(
    name: str, what: str, tera_flops: float, achieved: float, board: _Board, *, is_fitted: bool = True
) -> tuple[str, Card]:
    return name, Card(name, what, tera_flops, *board, achieved, is_fitted)


CARDS: Mapping[str, Card] = dict(
    (
        _card("v100", "V100 SXM2, float16", 125.0, 0.52, _V100, is_fitted=False),
        _card("a100", "A100 80GB SXM, bfloat16", 312.0, 0.72, _A100),
        _card("a100-tf32", "A100 80GB SXM, TF32", 156.0, 0.72, _A100, is_fitted=False),
        _card("h100", "H100 SXM, bfloat16", 989.4, 0.785, _H100),
        _card("h100-fp8", "H100 SXM, float8 linear layers", 1978.9, 0.63, _H100),
        _card("h100-tf32", "H100 SXM, TF32", 494.7, 0.785, _H100, is_fitted=False),
        _card("h100-500w", "H100 SXM limited to 500 W, with HBM2e, bfloat16", 989.4, 0.66, _GRAND_TETON),
        _card(
            "h100-500w-fp8", "H100 SXM limited to 500 W, with HBM2e, float8 linear layers", 1978.9, 0.45, _GRAND_TETON
        ),
        _card("h200", "H200 SXM, bfloat16", 989.4, 0.785, _H200, is_fitted=False),
        _card("h200-fp8", "H200 SXM, float8 linear layers", 1978.9, 0.63, _H200),
        _card("h200-tf32", "H200 SXM, TF32", 494.7, 0.785, _H200, is_fitted=False),
        _card("b200", "B200, bfloat16", 2250.0, 0.6, _B200, is_fitted=False),
        _card("b200-tf32", "B200, TF32", 1125.0, 0.6, _B200, is_fitted=False),
    )
)
"""The cards, by name."""

GPUS: Mapping[str, Rates] = {name: card.rates for name, card in CARDS.items()}
"""One rank's rates, by GPU name."""
