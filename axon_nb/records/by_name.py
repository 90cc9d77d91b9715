"""Functions that are named rather than held, so that the process which calls them is the one that imports them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

__all__ = ["Imported", "OfClasses"]


@dataclass(frozen=True, slots=True)
class Imported:
    """A function of a module that is imported where it is called first."""

    module: str
    name: str

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        return getattr(import_module(self.module), self.name)(*args)


@dataclass(frozen=True, slots=True)
class OfClasses:
    """Whether an object is of one of these classes, by their names."""

    names: tuple[str, ...]

    def __call__(self, item: Any) -> bool:
        """Looks at the object's own class alone."""
        return type(item).__name__ in self.names
