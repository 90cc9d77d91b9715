"""Where torch's private interfaces differ between versions: one adapter per torch generation.

`torch_api()` returns the adapter of the torch that runs. Each file describes one generation and inherits the rest from
the next newer one: dropping an old torch means deleting its file. A torch newer than all of them gets the newest
adapter; the self-test (`axon_nb.engine.self_test`) finds out whether the hooks work there.
"""

from __future__ import annotations

import functools
import re

from axon_nb.torch_api.current import TorchApi
from axon_nb.torch_api.torch_2_11 import Torch211
from axon_nb.torch_api.torch_2_12 import Torch212
from axon_nb.torch_api.torch_2_13 import Torch213
from axon_nb.torch_api.torch_2_14 import Torch214

__all__ = ["TorchApi", "adapter_for", "torch_api"]

_OLDER: tuple[type[TorchApi], ...] = (Torch211, Torch212, Torch213, Torch214)


def adapter_for(version: str) -> type[TorchApi]:
    """The adapter for a torch version such as ``2.14.1+cu130``; an unknown newer one gets the newest adapter."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return next((kind for kind in _OLDER if numbers <= kind.last), TorchApi)


@functools.cache
def torch_api() -> TorchApi:
    """The adapter of the torch that is installed; imports torch."""
    import torch

    return adapter_for(torch.__version__)()
