"""Accelerate's launchers in a cell: they use the ranks instead of starting processes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["call_on_ranks", "missing_launch_hooks"]

_NAMES = ("debug_launcher", "notebook_launcher")


def missing_launch_hooks(launchers: ModuleType) -> list[str]:
    """Names of the hooks that this Accelerate does not have.

    Args:
        launchers: The module ``accelerate.launchers``.
    """
    return [name for name in (*_NAMES, "patch_environment") if not hasattr(launchers, name)]


def call_on_ranks(launchers: ModuleType, *, world_size: int) -> None:
    """Make the launchers call the training function on this rank, as they do if there is nothing to start.

    Processes started from ranks would try to rendezvous on a port where nothing listens.

    Args:
        launchers: The module ``accelerate.launchers``, just imported; ``accelerate`` itself takes them from there.
        world_size: Number of ranks.
    """
    for name in _NAMES:
        if not missing_launch_hooks(launchers):
            setattr(launchers, name, _caller(getattr(launchers, name), launchers.patch_environment, world_size))


def _caller(
    original: Callable[..., Any], patch_environment: Callable[..., Any], world_size: int
) -> Callable[..., None]:
    @functools.wraps(original)
    def launch(
        function: Callable[..., Any],
        args: Sequence[Any] = (),
        num_processes: int | None = None,
        mixed_precision: str = "no",
        **_: Any,
    ) -> None:
        if num_processes not in (None, world_size):
            print(
                f"axon_nb: {original.__name__}({num_processes} processes) runs on the {world_size} ranks of this cell."
            )
        with patch_environment(accelerate_mixed_precision=str(mixed_precision).lower()):
            function(*args)

    return launch
