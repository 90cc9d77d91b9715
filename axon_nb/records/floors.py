"""The lowest versions of packages that the notebook's side runs with, and the sentence about one that is older.

`%load_ext axon_nb` asks before it imports anything else, so that an older package is a sentence and no traceback.
"""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.version import InvalidVersion, Version

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

_KERNEL = {"ipython": "IPython", "ipykernel": "ipykernel"}
"""Packages that a kernel has loaded, by their modules: to load the rest from another version fails in any way."""


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
        loaded = getattr(sys.modules.get(_KERNEL.get(package, "")), "__version__", installed)
        if _release(loaded) != _release(installed):
            return f"This kernel runs {package} {loaded}, and {installed} is installed: restart the kernel."
    return ""


def _release(version: str) -> tuple[int, ...]:
    try:
        return Version(version).release
    except InvalidVersion:  # of a build of its own
        return (sys.maxsize,)
