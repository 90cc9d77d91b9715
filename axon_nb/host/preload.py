"""Modules that the agent imports so that forked ranks already have them: one per step of the event loop."""

from __future__ import annotations

import gc
import importlib
import traceback

__all__ = ["Preload"]

_REQUIRED = (
    "torch",
    "torch.distributed",
    "ipykernel.ipkernel",
    "ipykernel.displayhook",
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    "axon_nb.engine.bootstrap",
)
# Imported while the agent is idle. The first optimizer alone makes a rank import torch._dynamo, which takes
# longer than everything else together, and four ranks would do it at once.
_OPTIONAL = (
    "IPython.extensions.storemagic",
    "IPython.core.completer",
    "psutil",
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
    "matplotlib_inline.backend_inline",
)


class Preload:
    """Imports modules step by step; a failing import is left to the rank, which reports it where it uses the module."""

    def __init__(self, *, enabled: bool) -> None:
        self._required = list(_REQUIRED) if enabled else []
        self._optional = list(_OPTIONAL) if enabled else []

    @property
    def ready(self) -> bool:
        """Whether ranks can be forked."""
        return not self._required

    @property
    def done(self) -> bool:
        """Whether everything is imported, including the optional modules."""
        return not self._required and not self._optional

    def step(self, *, busy: bool) -> bool:
        """Import the next module, optional ones only while not `busy`; return whether there was one to import."""
        if self._required:
            name = self._required.pop(0)
        elif self._optional and not busy:
            name = self._optional.pop(0)
        else:
            return False
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
        if not self._required and name == _REQUIRED[-1]:
            gc.collect()
        return True
