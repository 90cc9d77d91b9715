"""Compute rates of GPUs by name, with sources.

Peaks are those of NVIDIA's datasheets for dense matrices (half of the figures "with sparsity"). A training step of a
large transformer reaches about half of them: 163 of an A100's 312 TFLOP/s, 52 %, over whole steps on 3072 GPUs
(Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 5.1).
"""

from __future__ import annotations

from collections.abc import Mapping

from axon_nb.errors import UsageError
from axon_nb.plan.step_time_work import Rates

__all__ = ["GPUS", "resolve_rates"]

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
