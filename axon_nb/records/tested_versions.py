"""The versions that axon_nb was tested with, and the command that installs one of them."""

from __future__ import annotations

__all__ = ["TESTED", "install_line"]

TESTED = {
    "torch": ("2.11", "2.16"),
    "ipykernel": ("7.0", "8"),
    "ipython": ("9.0", "10"),
    "ipyparallel": ("9.1", "10"),
}
"""For each package the lowest version that passed the tests, and the lowest that did not exist when they ran."""


def install_line(package: str) -> str:
    """The command that installs a tested version of `package`."""
    lowest, above = TESTED[package]
    return f'pip install "{package}>={lowest},<{above}"'
