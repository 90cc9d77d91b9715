"""Picklable functions given by name, imported only in the process that calls them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["HasClassName", "LazyFunction"]


@dataclass(frozen=True, slots=True)
class LazyFunction:
    """A function whose module is imported on the first call."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """Import the module and call the function."""
        return getattr(import_module(self.module), self.name)(*args)


@dataclass(frozen=True, slots=True)
class HasClassName:
    """Predicate: whether an object's class has one of these names."""

    names: tuple[str, ...]

    def __call__(self, item: Any) -> bool:
        """Check the object's own class; base classes do not count."""
        return type(item).__name__ in self.names
