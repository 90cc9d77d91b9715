"""Sentences about values that should be equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_SHOWN = 6
"""Numbers of a tensor that a sentence shows."""


def shown(value: Any) -> str:
    """Return a value in a few characters: of a tensor, its first numbers."""
    import torch

    if not isinstance(value, torch.Tensor):
        return f"{value:.4g}" if isinstance(value, float) else repr(value)
    if value.dim() == 0:
        return f"{value.item():.4g}"
    numbers = [f"{number:.4g}" for number in value.detach().flatten()[:_SHOWN].tolist()]
    return f"[{', '.join(numbers)}{', …' if value.numel() > _SHOWN else ''}]"


def difference(got: Any, expected: torch.Tensor, *, tolerance: float = 0.0) -> str | None:
    """Return what differs, as the words after "rank 2 "; None if nothing does.

    Args:
        got: What the answer returned.
        expected: What is right.
        tolerance: The largest difference of a number that counts as equal.
    """
    import torch

    if not isinstance(got, torch.Tensor):
        return f"returned {shown(got)}; it must return a tensor"
    if got.shape != expected.shape:
        return f"has shape {tuple(got.shape)}; it must be {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"has dtype {got.dtype}; it must stay {expected.dtype}"
    got = got.detach().cpu()
    off = (got - expected).abs() if expected.is_floating_point() else got != expected
    wrong = ((off > tolerance) if expected.is_floating_point() else off) | got.isnan()
    if not bool(wrong.any()):
        return None
    if got.numel() <= _SHOWN // 2:
        return f"got {shown(got)}; right is {shown(expected)}"
    at = tuple(wrong.nonzero()[0].tolist())
    where = f"[{', '.join(map(str, at))}]"
    count = int(wrong.sum())
    return f"got {shown(got[at])} at {where}; right is {shown(expected[at])}. {count} of {got.numel()} numbers differ"


def first_difference(got: list[Any], expected: list[torch.Tensor], case: str, *, tolerance: float = 0.0) -> str | None:
    """Return a sentence about the lowest rank whose value is not as expected; None if all are.

    Args:
        got: One value per rank.
        expected: One value per rank.
        case: What the answer was given, such as ``7 numbers on 4 ranks``.
        tolerance: As for `difference`.
    """
    for rank, (value, right) in enumerate(zip(got, expected, strict=True)):
        if (words := difference(value, right, tolerance=tolerance)) is not None:
            return f"{case}: rank {rank} {words}"
    return None
