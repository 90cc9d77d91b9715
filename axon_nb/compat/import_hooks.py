"""Post-import hooks: run code right after a module is imported.

Ranks start without the frameworks that cells may use, as each takes seconds to import. Hooks patch a framework's module
right after it was executed, before the cell's import statement returns.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Hook = Callable[[ModuleType], None]
"""Called with the imported module, and again when it is reloaded."""


class _Finder(MetaPathFinder):
    """Delegates to the other finders and hooks the loaders of the specs that they find."""

    def __init__(self) -> None:
        self.hooks: dict[str, Hook] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find and hook the spec of a module with a hook; None for all others."""
        if fullname not in self.hooks:
            return None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    _hook_loader(spec.loader, self.hooks[fullname])
                    return spec
        return None


def after_import(name: str, hook: Hook) -> None:
    """Call `hook` whenever the module `name` has been executed, and at once if it is already imported.

    A failing hook does not fail the import; it warns.
    """
    finder = next((item for item in sys.meta_path if isinstance(item, _Finder)), None)
    if finder is None:
        sys.meta_path.insert(0, finder := _Finder())
    finder.hooks[name] = hook
    if name in sys.modules:
        _call(hook, sys.modules[name])


def _hook_loader(loader: Any, hook: Hook) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        # Restore the loader: others use it to read the package's sources and files.
        del loader.exec_module
        execute(module)
        _call(hook, module)

    loader.exec_module = exec_module


def _call(hook: Hook, module: ModuleType) -> None:
    try:
        hook(module)
    except Exception as error:
        warnings.warn(
            f"axon_nb could not patch {module.__name__} {_version(module)} for this rank: "
            f"{type(error).__name__}: {error}",
            stacklevel=2,
        )


def _version(module: ModuleType) -> str:
    package = sys.modules.get(module.__name__.partition(".")[0])
    return str(getattr(package, "__version__", "")) or "(unknown version)"
