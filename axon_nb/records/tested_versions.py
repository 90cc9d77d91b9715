"""Versions that axon_nb was tested with, and the command that installs one of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["TESTED", "are_tested", "install_command"]

TESTED = {
    "torch": ("2.11", "2.16"),
    "ipykernel": ("7.0", "8"),
    "ipython": ("9.13", "10"),
    "ipyparallel": ("9.1", "10"),
}
"""By package: the lowest version that passed the tests, and the first version above the tested range."""


def are_tested(versions: Mapping[str, str]) -> bool:
    """Whether all these versions, by package, are in the tested ranges."""
    return all(
        _numbers(TESTED[package][0]) <= _numbers(version) < _numbers(TESTED[package][1])
        for package, version in versions.items()
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number of a version such as ``2.15.0+cu132``."""
    return tuple(int(number) for number in [*re.findall(r"\d+", version), "0", "0"][:2])


def install_command(package: str) -> str:
    """The command that installs a tested version of `package`."""
    lowest, above = TESTED[package]
    return f'pip install "{package}>={lowest},<{above}"'
