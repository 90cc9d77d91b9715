"""What axon_nb needs of other packages: lowest and tested versions, the register of private hooks, self-test results.

`hooks.toml` beside this file lists what axon_nb uses without a promise that it stays; `missing_hooks` says which of
that the installed versions lack. Every fallback asks it, and so do the self-test, `axon-nb doctor` and one test that
walks them all. `%load_ext axon_nb` asks for the lowest versions before it imports anything else, so that an older
package is a sentence and no traceback.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from msgspec import Struct, convert, field
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

TESTED = {
    "torch": ("2.8", "2.16"),
    "ipykernel": ("6.17", "8"),
    "ipython": ("7.34", "10"),
    "ipyparallel": ("8.8", "10"),
}
"""By package: the lowest version that passed the self-test, and the first version above the tested range."""
REGISTER = Path(__file__).with_name("hooks.toml")
"""The data file; its first lines explain the fields."""
_ABSENT = object()
FLOORS = {
    "ipython": "7.34",
    "ipykernel": "6.17",
    "jupyter_client": "7.4",
    "traitlets": "5.7",
    "pyzmq": "26.0",
    "ipyparallel": "8.8",
    "ipywidgets": "7.7",
    "anywidget": "0.9",
    "plotly": "5.24",
    "pandas": "2.2",
    "psutil": "5.9",
    "numpy": "1.26",
}
"""By distribution, as in pyproject.toml."""
_MODULES = {"ipython": "IPython", "pyzmq": "zmq"}
"""The modules of packages that are not called like them."""


class Capability(Struct, frozen=True):
    """A feature that relies on private APIs of other packages, and whether it works here."""

    name: str
    """Short and stable identifier, such as ``release``."""
    label: str
    """What it does, as a verb phrase."""
    works: bool
    lost: str
    """What users lose without it, as a clause."""
    reason: str = ""
    """Why it does not work; empty if it does."""
    fix: str = ""
    """Command that restores it; empty if it works."""


class Verdict(Struct, frozen=True):
    """Result of the self-test."""

    torch: str
    """Version of torch, such as ``2.15.0+cu132``."""
    python: str
    seconds: float
    """Duration of the test."""
    capabilities: tuple[Capability, ...]

    @property
    def lost(self) -> list[Capability]:
        """The capabilities that do not work."""
        return [capability for capability in self.capabilities if not capability.works]

    def without_passed(self) -> Verdict:
        """Return a copy with only the capabilities that do not work."""
        return replace(self, capabilities=tuple(self.lost))


def are_tested(versions: Mapping[str, str]) -> bool:
    """Whether all these versions, by package, are in the tested ranges."""
    return all(
        release(TESTED[package][0]) <= release(version) < release(TESTED[package][1])
        for package, version in versions.items()
    )


def release(version: str) -> tuple[int, ...]:
    """Return major and minor number of a version such as ``2.15.0+cu132``, also of a nightly build; empty: unknown."""
    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def install_command(package: str) -> str:
    """The command that installs a tested version of `package`."""
    lowest, above = TESTED[package]
    return f'pip install "{package}>={lowest},<{above}"'


class Hook(Struct, frozen=True, forbid_unknown_fields=True):
    """One private hook, or several with the same fallback."""

    group: str
    """Its name, such as ``groups.gloo``."""
    package: str
    """The distribution that it belongs to, such as ``torch``; ``Python`` for the interpreter."""
    files: tuple[str, ...]
    """Our files that use it, relative to the root of the repository."""
    replaces: str
    """What it is used for, or what it replaces."""
    needs: tuple[str, ...] = ()
    """What must be there: ``module:attribute.path``, or ``name.attribute.path`` of an object that the caller passes. A
    trailing ``(option=)`` is a parameter that the function must have; ``module:`` alone is a module that must exist."""
    uses: tuple[str, ...] = ()
    """Private names used besides, which are not visible on an installed class."""
    objects: Mapping[str, str] = field(default_factory=dict)
    """What stands in for an object that the caller does not pass, as ``module:Class`` or ``module:``, by its name."""
    check: str = ""
    """``module:function`` that returns the names that are missing, for what names alone do not show."""
    lost: str = ""
    """What users lose without it, as a clause; empty if `capability` says so."""
    capability: str = ""
    """The self-test's check that tries it for real, and says what is lost without it."""
    upstream: str = ""
    """URL of the issue or pull request that changed it, or that would make it unnecessary; else of its source."""
    since: str = ""
    """The first version of the package that it is used with; empty: any."""
    before: str = ""
    """The first version that it is not used with any more; empty: none."""
    only_if: str = ""
    """``module:attribute`` without which the hook is not used, such as a class that only some builds have."""
    if_loaded: bool = False
    """Whether it is only used once the package has been imported; never imported for a check."""

    @property
    def is_used(self) -> bool:
        """Whether axon_nb uses it with the installed versions."""
        if self.only_if and _resolve(self.only_if) is _ABSENT:
            return False
        if not (self.since or self.before):
            return True
        version = release(_installed(self.package))
        return release(self.since or "0") <= version and (not self.before or version < release(self.before))

    @property
    def fix(self) -> str:
        """How to get it back, as an imperative."""
        if self.package in TESTED:
            return f"Run `{install_command(self.package)}`."
        newest = tested_versions(self.package)[-1]
        if self.package == "Python":
            return f"Use Python {newest}."
        return f'Run `pip install "{self.package}=={newest}.*"`.'


@functools.cache
def _register() -> dict[str, Any]:
    return tomllib.loads(REGISTER.read_text(encoding="utf-8"))


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return {table["group"]: table for table in _register()["hook"]}


def groups() -> list[str]:
    """Names of all hooks, in the order of the register."""
    return list(_tables())


@functools.cache
def hook(group: str) -> Hook:
    """Look up a hook.

    Raises:
        KeyError: the register has no hook of this name.
        ValidationError: its table has an unknown field, or lacks one.
    """
    return convert(_tables()[group], Hook)


def read_all() -> None:
    """Read all hooks, and the versions on which they depend: a process that is forked from this one has them."""
    for entry in map(hook, groups()):
        if entry.since or entry.before:
            _installed(entry.package)


@functools.cache
def tested_versions(package: str) -> tuple[str, ...]:
    """Versions of a package that were checked to have its hooks, such as ``("2.11", "2.12")``, oldest first.

    Raises:
        KeyError: the register has no hook into this package.
    """
    return tuple(_register()["tested"][package])


def missing_hooks(group: str, **objects: Any) -> list[str]:
    """Names of what the installed versions lack of a hook, such as ``torch.optim.Optimizer.profile_hook_step``.

    Imports the modules that the hook is in, except of packages that may stay unloaded (`Hook.if_loaded`).

    Args:
        group: Name of the hook in the register.
        **objects: Live objects that the register names, such as ``kernel``; for others, their classes are checked.
    """
    entry = hook(group)
    if not entry.is_used:
        return []
    missing = [need.replace(":", ".").rstrip(".") for need in entry.needs if not _is_there(need, entry, objects)]
    if entry.check and not missing and (objects or _may_load(entry, entry.package)):
        missing = list(_resolve(entry.check)(**objects))
    return missing


def _may_load(entry: Hook, module: str) -> bool:
    return not entry.if_loaded or module in sys.modules


@functools.cache
def _installed(package: str) -> str:
    if (module := sys.modules.get(package)) is not None and isinstance(version := vars(module).get("__version__"), str):
        return version
    from importlib import metadata  # takes 10 ms, and few hooks depend on the version

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return tested_versions(package)[-1]


def _is_there(need: str, entry: Hook, objects: Mapping[str, Any]) -> bool:
    path, _, option = need.removesuffix("=)").partition("(")
    module, colon, names = path.partition(":")
    if not colon:
        name, _, names = path.partition(".")
        if name in objects:
            return _reaches(objects[name], names.split("."), option)
        known = max((prefix for prefix in entry.objects if path.startswith(f"{prefix}.")), key=len)
        names = path.removeprefix(f"{known}.")
        module, _, kind = entry.objects[known].partition(":")
        names = f"{kind}.{names}" if kind else names
    if not _may_load(entry, module):
        return True  # not imported yet
    if not names:
        return _exists(module)
    return _reaches(_module(module), names.split("."), option)


def _reaches(owner: Any, names: list[str], option: str) -> bool:
    for position, name in enumerate(names):
        if hasattr(owner, name):
            owner = getattr(owner, name)
        else:
            is_last = position == len(names) - 1
            return is_last and not option and isinstance(owner, type) and name in _names_in_methods(owner)
    if not option:
        return True
    try:
        return option in inspect.signature(owner).parameters
    except (TypeError, ValueError):  # C code does not say
        return True


@functools.cache
def _names_in_methods(kind: type) -> frozenset[str]:
    """The names that methods of a Python class read or set, among them attributes that only its objects have."""
    codes: list[CodeType] = []
    for base in kind.__mro__[:-1]:
        for value in vars(base).values():
            for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
                plain = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
                codes += [plain.__code__] if isinstance(plain, FunctionType) else []
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names, (constant for constant in code.co_consts if isinstance(constant, str)))
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(names)


def _resolve(place: str) -> Any:
    module, _, names = place.partition(":")
    value = _module(module)
    for name in names.split("."):
        value = getattr(value, name, _ABSENT)
    return value


def _module(name: str) -> Any:
    try:
        return sys.modules.get(name) or importlib.import_module(name)
    except Exception:  # a new version may fail in any way
        return _ABSENT


def _exists(module: str) -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return module in sys.modules or importlib.util.find_spec(module) is not None
    return False


def unmet_floor() -> str:
    """What to do about the first package that is missing, too old, or loaded in another version than is installed."""
    for package, lowest in FLOORS.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            return f'axon_nb needs {package}, which is not installed. Run `%pip install "{package}>={lowest}"`.'
        if _release(installed) < _release(lowest):
            return (
                f"axon_nb needs {package} {lowest} or newer; got {installed}. "
                f'Run `%pip install "{package}>={lowest}"`, then restart the kernel.'
            )
        # To load the rest of a package from another version than its first half fails in any way.
        loaded = getattr(sys.modules.get(_MODULES.get(package, package)), "__version__", installed)
        if _release(loaded) != _release(installed):
            return f"This kernel runs {package} {loaded}, and {installed} is installed: restart the kernel."
    return ""


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release
    except InvalidVersion:  # of a build of its own
        return (sys.maxsize,)
