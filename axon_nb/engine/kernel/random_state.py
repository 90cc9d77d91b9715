"""Whether a cell has drawn random numbers that copies of a model should not share, for a hint in the notebook.

`%distributed seed` on a rank: Python's, NumPy's and torch's generators, on every device.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from axon_nb.engine.namespace import users_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import loaded
from axon_nb.records.protocol.cells import Draws as Drawn

__all__ = ["Draws", "seed"]

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_MAX_MODULES = 5000


class Draws:
    """The random numbers of one cell; made when it begins.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._state()

    def report(self, shell: Any) -> Drawn | None:
        """At the cell's end: None when nothing was drawn, or when no model here is a copy of other ranks' one."""
        try:
            return self._look(shell)
        except Exception:  # odd objects of the user: a hint is not worth a cell
            return None

    def _look(self, shell: Any) -> Drawn | None:
        after = self._state()
        if after == self._before:
            return None
        variables = users_variables(shell)
        copies = {name: value for name, value in variables.items() if isinstance(value, nn.Module) and _is_copy(value)}
        if not copies:
            return None
        dropout = next((name for name, model in copies.items() if _drops(model)), "")
        loader = next((name for name, value in variables.items() if _shuffles(value)), "")
        first, last = (hashlib.blake2b(state, digest_size=8).hexdigest() for state in (self._before, after))
        return Drawn((first, last), dropout, loader) if dropout or loader else None

    def _state(self) -> bytes:
        try:
            states = [torch.get_rng_state()]
            if self._device.type == "cuda" and torch.cuda.is_initialized():
                states.append(torch.cuda.get_rng_state(self._device))
            return b"".join(state.numpy().tobytes() for state in states)
        except Exception:  # a mode of torch that is on between cells, such as one of fake tensors
            return b""


def _is_copy(model: nn.Module) -> bool:
    """Whether ranks train copies of the model on data of their own."""
    kinds = (loaded(*_DDP), loaded(*_FSDP2))
    return any(isinstance(module, kinds) for module, _ in zip(model.modules(), range(_MAX_MODULES), strict=False))


def _drops(model: nn.Module) -> bool:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    parts = (module for module, _ in zip(model.modules(), range(_MAX_MODULES), strict=False))
    return any(isinstance(part, kinds) and part.training and part.p > 0 for part in parts)


def _shuffles(value: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(value, data.DataLoader):
        return False
    sampler = value.sampler
    return isinstance(sampler, data.RandomSampler) and sampler.generator is None and value.generator is None


_NUMPY_SEEDS = 1 << 32


def seed(value: int, *, per_rank: bool = False) -> int:
    """Seed this rank; with `per_rank` by the sum of `value` and the rank's number. Returns the seed."""
    own = value + current().config.rank if per_rank else value
    random.seed(own)
    np.random.seed(own % _NUMPY_SEEDS)
    torch.manual_seed(own)  # those of all devices, too
    return own
