"""Something to be done right after a module is imported, without importing it.

Ranks start without the frameworks that cells may use: each takes seconds to import. What a framework needs changed is
changed when its module has just been executed, before the import statement of the cell returns.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["Hook", "after_import"]

Hook = Callable[[ModuleType], None]
"""Takes the module that was imported; is called again when it is reloaded."""


class _Finder(MetaPathFinder):
    """Finds nothing by itself: has what the other finders find tell when it was executed."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that somebody waits for; None for all others."""
        if fullname not in self.hooks:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    _tell(spec.loader, self.hooks[fullname])
                    return spec
        return None


_finder = _Finder()


def after_import(name: str, hook: Hook) -> None:
    """Call `hook` whenever the module `name` has been executed, and now if it has been already.

    A hook that fails leaves the import alone and warns.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.hooks[name] = hook
    if name in sys.modules:
        _call(hook, sys.modules[name])


def _tell(loader: Any, hook: Hook) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        # The loader stays what it was: others ask it for sources and files of the package.
        del loader.exec_module
        execute(module)
        _call(hook, module)

    loader.exec_module = exec_module


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:
        warnings.warn(
            f"axon_nb could not prepare {module.__name__} {_version(module)} for this rank: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


def _version(module: ModuleType) -> str:
    package = sys.modules.get(module.__name__.partition(".")[0])
    return str(getattr(package, "__version__", "")) or "of an unknown version"
