"""The IPython extension: `%load_ext axon_nb`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(ipython: InteractiveShell) -> None:
    """Register the magics and start warming up in the background.

    Raises:
        UsageError: A package is too old.
    """
    from axon_nb.records.hooks import unmet_floor

    if problem := unmet_floor():
        from axon_nb.errors import UsageError

        raise UsageError(problem)
    from axon_nb.magics import extension

    extension.load(ipython)


def unload_ipython_extension(ipython: InteractiveShell) -> None:
    """Unregister the magics; a running cluster keeps running."""
    from axon_nb.magics import extension

    extension.unload(ipython)
