"""Packages that import nothing: each of their public names is imported from its module on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: Its name.
        homes: By module below the package, the names to import from there, such as ``"Link Rates"``. A module without
            an attribute of its own name stands for itself.
    """
    namespace = vars(sys.modules[package])
    module_of = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{module_of[name]}")
        is_home = module.__name__.endswith(f".{name}") and not hasattr(module, name)
        value = namespace[name] = module if is_home else getattr(module, name)
        return value

    return load, lambda: sorted(namespace["__all__"])
