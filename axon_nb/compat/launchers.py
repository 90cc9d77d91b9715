"""Launchers of Lightning and Ignite: on ranks they call the function instead of starting processes.

Private hooks: Lightning's class of launchers that fork or spawn, and the class of Ignite's distributed model. Without
them these launchers fail on ranks.
"""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch.distributed as dist

LIGHTNING_LAUNCHERS = (
    "lightning.fabric.strategies.launchers.multiprocessing",
    "lightning.pytorch.strategies.launchers.multiprocessing",
    "lightning_fabric.strategies.launchers.multiprocessing",
    "pytorch_lightning.strategies.launchers.multiprocessing",
)
"""Modules of Lightning, and of its packages by their older names, whose launchers start processes."""


def call_on_rank(launchers: ModuleType) -> None:
    """Have ``ddp_notebook``, ``ddp_fork`` and ``ddp_spawn`` train the ranks of the cell.

    Args:
        launchers: One of `LIGHTNING_LAUNCHERS`, just imported.
    """
    kind = launchers._MultiProcessingLauncher
    has_trainer = "trainer" in inspect.signature(kind.launch).parameters

    @functools.wraps(kind.launch)
    def launch(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if has_trainer:  # what processes would send results to
            kwargs.pop("trainer", None)
        return function(*args, **kwargs)

    kind.launch = launch


def attach_ignite(native: ModuleType) -> None:
    """Have `idist.spawn` and `idist.Parallel` use the group of the ranks.

    Args:
        native: The module ``ignite.distributed.comp_models.native``, just imported.
    """
    kind = native._NativeDistModel
    create = kind.create_from_backend

    @functools.wraps(create)
    def create_from_backend(*args: Any, **kwargs: Any) -> Any:
        return kind.create_from_context() if dist.is_initialized() else create(*args, **kwargs)

    kind.create_from_backend = staticmethod(create_from_backend)
