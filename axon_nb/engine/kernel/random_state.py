"""Detects random numbers that replicas of a model should not share, for a hint in the notebook.

Seeds Python's, NumPy's and torch's generators on every device for `%distributed seed`.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from axon_nb.engine.namespace import user_variables
from axon_nb.engine.session import current
from axon_nb.engine.sharding.sharded import loaded_class
from axon_nb.records.protocol.cells import Draws

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_FSDP2 = ("torch.distributed.fsdp", "FSDPModule")
_MAX_MODULES = 5000
_NUMPY_SEEDS = 1 << 32


class RandomDraws:
    """The random numbers drawn by one cell; create it when the cell starts.

    Args:
        device: The rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._state()

    def report(self, shell: Any) -> Draws | None:
        """Report at the end of the cell; None if nothing was drawn, or no model here is replicated."""
        try:
            return self._find_shared_draws(shell)
        except Exception:  # a hint must never fail a cell
            return None

    def _find_shared_draws(self, shell: Any) -> Draws | None:
        before, after = (b"".join(one.numpy().tobytes() for one in state) for state in (self._before, self._state()))
        if after == before:
            return None
        variables = user_variables(shell)
        models = {name: value for name, value in variables.items() if isinstance(value, nn.Module)}
        replicas = {name: model for name, model in models.items() if _is_replicated(model)}
        if not replicas:
            return None
        dropout = next((name for name, model in replicas.items() if _uses_dropout(model)), "")
        loader = next((name for name, value in variables.items() if _shuffles_globally(value)), "")
        first, last = (hashlib.blake2b(state, digest_size=8).hexdigest() for state in (before, after))
        return Draws((first, last), dropout, loader) if dropout or loader else None

    def _state(self) -> list[torch.Tensor]:
        try:
            states = [torch.default_generator.get_state()]
            if self._device.type == "cuda" and torch.cuda.is_initialized():
                states.append(torch.cuda.get_rng_state(self._device))
            return states
        except Exception:  # a torch mode that stays on between cells, such as fake tensors
            return []


def _is_replicated(model: nn.Module) -> bool:
    """Whether ranks train replicas of the model, each on its own data."""
    kinds = (loaded_class(*_DDP), loaded_class(*_FSDP2))
    return any(isinstance(module, kinds) for module, _ in zip(model.modules(), range(_MAX_MODULES), strict=False))


def _uses_dropout(model: nn.Module) -> bool:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    parts = (module for module, _ in zip(model.modules(), range(_MAX_MODULES), strict=False))
    return any(isinstance(part, kinds) and part.training and part.p > 0 for part in parts)


def _shuffles_globally(value: Any) -> bool:
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(value, data.DataLoader):
        return False
    sampler = value.sampler
    return isinstance(sampler, data.RandomSampler) and sampler.generator is None and value.generator is None


def seed(value: int, *, per_rank: bool = False) -> int:
    """Seed this rank with `value`, plus its rank if `per_rank`; return the seed."""
    rank_seed = value + current().config.rank if per_rank else value
    random.seed(rank_seed)
    np.random.seed(rank_seed % _NUMPY_SEEDS)
    torch.manual_seed(rank_seed)  # seeds all devices, too
    return rank_seed
