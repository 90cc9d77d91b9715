"""Whose code a file is: a library's or the user's."""

from __future__ import annotations

import functools
import os
import sysconfig

__all__ = ["library_of"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FOLDERS = tuple(
    os.path.join(path, "") for path in dict.fromkeys(map(sysconfig.get_path, ("purelib", "platlib", "stdlib")))
)


@functools.lru_cache(4096)  # asked for each frame of each thread
def library_of(filename: str) -> str:
    """The package that a file belongs to, ``Python`` for the standard library; empty for the user's own code."""
    if filename.startswith(os.path.join(_PACKAGE, "")):
        return os.path.basename(_PACKAGE)
    for folder in _FOLDERS:
        if filename.startswith(folder):
            first = filename.removeprefix(folder).split(os.sep)
            return first[0].removesuffix(".py") if "packages" in folder else "Python"
    return "Python" if filename.startswith("<frozen") else ""
