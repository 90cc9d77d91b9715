"""Muon for the matrices of a GPT's blocks and AdamW for the rest, as a program has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from axon_nb.parallel import Muon


class Both:
    """The two optimizers of a model, after it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        matrices = [name for name, parameter in named.items() if "block" in name and parameter.ndim == 2]
        rest = [parameter for name, parameter in named.items() if name not in matrices]
        self._both = Muon([named[name] for name in matrices]), torch.optim.AdamW(rest)

    @property
    def state(self) -> dict[Any, Any]:
        """The states of both."""
        return {**self._both[0].state, **self._both[1].state}

    def step(self) -> None:
        """Step both."""
        for one in self._both:
            one.step()

    def zero_grad(self) -> None:
        """Free all gradients."""
        for one in self._both:
            one.zero_grad()
