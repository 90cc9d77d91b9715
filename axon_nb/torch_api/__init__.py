"""Adapters for torch's private interfaces that differ between versions: one per torch generation.

`torch_api()` returns the adapter of the installed torch. Each file describes one generation and inherits the rest from
the next newer one, so dropping an old torch means deleting its file. A torch newer than all of them gets the newest
adapter; the self-test (`axon_nb.engine.self_test`) checks whether the hooks work there.
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

_OLDER_ADAPTERS: tuple[type[TorchApi], ...] = (Torch211, Torch212, Torch213, Torch214)


def adapter_for(version: str) -> type[TorchApi]:
    """Return the adapter for a torch version such as ``2.14.1+cu130``; newer unknown versions get the newest."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return next((kind for kind in _OLDER_ADAPTERS if numbers <= kind.last), TorchApi)


@functools.cache
def torch_api() -> TorchApi:
    """Return the adapter of the installed torch; imports torch."""
    import torch

    return adapter_for(torch.__version__)()
