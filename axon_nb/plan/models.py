"""How a model, its inputs and its loss are given to a planner: by what can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from numbers import Integral
from typing import Any

from axon_nb.plan.errors import PlanError

__all__ = ["CapturedModel", "TensorSpec", "check_model", "dtype_name", "is_module"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_FACTORY = "a function without arguments that makes it, such as `lambda: GPT(GPTConfig(blocks=24))`"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor by its shape: ``TensorSpec(("batch", "seq"), "int64")``."""

    shape: tuple[int | str, ...]
    """Sizes; ``"batch"`` and ``"seq"`` stand for those that the plan is asked with."""
    dtype: str = "float32"
    """Its name in torch; ``torch.int64`` itself will do."""

    def __post_init__(self) -> None:
        shape: Any = self.shape
        sizes: list[Any] = list(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else [None]
        if not all(isinstance(size, str) or (isinstance(size, Integral) and int(size) >= 0) for size in sizes):
            raise PlanError(
                f"TensorSpec({shape!r}, …): the shape is a tuple of sizes and names, such as "
                "TensorSpec(('batch', 1024), 'int64')."
            )
        named = tuple(size if isinstance(size, str) else int(size) for size in sizes)
        object.__setattr__(self, "shape", named)
        object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))

    def sizes(self, named: Mapping[str, int | None]) -> tuple[int, ...]:
        """The shape with its names filled in.

        Raises:
            PlanError: a name is unknown, or its size is not given.
        """
        found = []
        for size in self.shape:
            if isinstance(size, str) and size not in named:
                raise PlanError(f"a size {size!r} in {self}: it is a number, or one of {', '.join(map(repr, named))}.")
            value = named[size] if isinstance(size, str) else size
            if value is None:
                raise PlanError(f"{self} asks for {size!r}, which is not given: memory(…, {size}=…).")
            found.append(int(value))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class CapturedModel:
    """A model that ranks hold, as it was before it was wrapped: it can be planned for without the ranks."""

    name: str
    """Its name on the ranks."""
    factory: bytes
    """What makes one like it, pickled by cloudpickle: a function without arguments."""


def check_model(model: Any) -> None:
    """See that a model is given in a way that can be planned for.

    Raises:
        PlanError: it is not; the message says how it is given.
    """
    if isinstance(model, CapturedModel) or (is_dataclass(model) and not isinstance(model, type)):
        return
    if isinstance(model, str):
        raise PlanError(f"model={model!r}: a name is not known here; give {_FACTORY}.")
    if is_module(model):
        raise PlanError(
            f"model is a {type(model).__name__} that is made already, and would be copied whole: give {_FACTORY}."
        )
    if not callable(model):
        raise PlanError(f"model={model!r}: give {_FACTORY}, or a config such as GPTConfig(blocks=24).")


def is_module(model: Any) -> bool:
    """Whether it is a `torch.nn.Module`; told without torch."""
    return any(kind.__module__.startswith("torch.nn.") and kind.__name__ == "Module" for kind in type(model).__mro__)


def dtype_name(given: Any, name: str) -> str:
    """A dtype by its name, without torch: ``torch.bfloat16`` and ``"bfloat16"`` are the same.

    Raises:
        PlanError: it is no floating-point dtype that models are trained in.
    """
    text = str(given).removeprefix("torch.")
    if text not in _DTYPES:
        raise PlanError(f"{name}={given!r}: it is one of {', '.join(_DTYPES)}.")
    return text


Factory = Callable[[], Any]
"""Makes a model, or the tensors that it is called with."""
