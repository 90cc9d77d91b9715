"""The forms in which users give a model and its inputs to a planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from numbers import Integral
from typing import Any

from axon_nb.plan.errors import PlanError

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FACTORY = "a function without arguments that makes the model, such as `lambda: GPT(GPTConfig(blocks=24))`"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape and dtype: ``TensorSpec(("batch", "seq"), "int64")``."""

    shape: tuple[int | str, ...]
    """Sizes; ``"batch"`` and ``"seq"`` stand for the plan's arguments of these names."""
    dtype: str = "float32"
    """Its name in torch; ``torch.int64`` works too."""

    def __post_init__(self) -> None:
        shape: Any = self.shape
        sizes: list[Any] = list(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else [None]
        if not all(isinstance(size, str) or (isinstance(size, Integral) and int(size) >= 0) for size in sizes):
            raise PlanError(
                "A TensorSpec's shape must be a tuple of sizes and names, such as "
                f"TensorSpec(('batch', 1024), 'int64'); got {shape!r}."
            )
        named = tuple(size if isinstance(size, str) else int(size) for size in sizes)
        object.__setattr__(self, "shape", named)
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))

    def sizes(self, named: Mapping[str, int | None]) -> tuple[int, ...]:
        """Return the shape with its names filled in.

        Raises:
            PlanError: a name is unknown, or its size is missing.
        """
        values = []
        for size in self.shape:
            if isinstance(size, str) and size not in named:
                raise PlanError(
                    f"A size in {self} must be a number or one of {', '.join(map(repr, named))}; got {size!r}."
                )
            value = named[size] if isinstance(size, str) else size
            if value is None:
                raise PlanError(f"{self} needs a size for {size!r}: give {size}=….")
            values.append(int(value))
        return tuple(values)


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model of the ranks as it was before wrapping; plans can use it without the ranks."""

    name: str
    """Its name on the ranks."""
    factory: bytes
    """A function without arguments that makes an equal model, pickled by cloudpickle."""


def check_model(model: Any) -> None:
    """Check that a model is given in a supported form.

    Raises:
        PlanError: it is not.
    """
    if isinstance(model, CapturedModel) or (is_dataclass(model) and not isinstance(model, type)):
        return
    if isinstance(model, str):
        raise PlanError(f"model={model!r} is a name, which is not supported here: give {_FACTORY}.")
    if is_module(model):
        raise PlanError(
            f"model is an instance of {type(model).__name__}, which would be copied with its data: give {_FACTORY}."
        )
    if not callable(model):
        raise PlanError(f"model must be {_FACTORY}, or a GPTConfig(…); got {model!r}.")


def is_module(model: Any) -> bool:
    """Return whether it is a `torch.nn.Module`, without importing torch."""
    return any(kind.__module__.startswith("torch.nn.") and kind.__name__ == "Module" for kind in type(model).__mro__)


def dtype_name(dtype: Any, name: str) -> str:
    """Return a dtype's name without importing torch: ``torch.bfloat16`` and ``"bfloat16"`` are the same.

    Raises:
        PlanError: it is not a floating-point dtype for training.
    """
    text = str(dtype).removeprefix("torch.")
    if text not in _DTYPES:
        raise PlanError(f"{name} must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
    return text
