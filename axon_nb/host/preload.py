"""What the agent imports, so that a forked rank starts with it: one module a step, the loop runs in between."""

from __future__ import annotations

import gc
import importlib
import traceback

__all__ = ["Preload"]

_NEEDED = (
    "torch",
    "torch.distributed",
    "ipykernel.ipkernel",
    "ipykernel.displayhook",
    "ipyparallel.engine.app",
    "ipyparallel.engine.kernel",
    "axon_nb.engine.bootstrap",
)
# Imported while nothing else is to do: the first optimizer alone makes a rank import torch._dynamo, which takes
# longer than the rest together, and four ranks would do it at once.
_USEFUL = (
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
    """Imports step by step; a module that cannot be imported is left to the rank, which reports it where it is used."""

    def __init__(self, *, enabled: bool) -> None:
        self._needed = list(_NEEDED) if enabled else []
        self._useful = list(_USEFUL) if enabled else []

    @property
    def ready(self) -> bool:
        """Whether ranks can be forked."""
        return not self._needed

    @property
    def done(self) -> bool:
        """Whether everything is imported, the merely useful modules too."""
        return not self._needed and not self._useful

    def step(self, *, busy: bool) -> bool:
        """Import the next module; the merely useful ones only while not `busy`. True when there was one to import."""
        if self._needed:
            name = self._needed.pop(0)
        elif self._useful and not busy:
            name = self._useful.pop(0)
        else:
            return False
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
        if not self._needed and name == _NEEDED[-1]:
            gc.collect()
        return True
