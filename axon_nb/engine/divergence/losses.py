"""The losses of a step: the tensors from which backward passes start.

Private hook: torch has none for a backward as a whole, so `torch.autograd.backward` is wrapped while a cell is watched.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any

import torch

from axon_nb.engine.sharding.placement import local_tensor
from axon_nb.records.hooks import missing_hooks

_MAX_LOSSES = 64
"""Of one step, such as those of microbatches; the last are kept."""


class Losses:
    """Keeps the losses since the last optimizer step."""

    def __init__(self) -> None:
        self._kept: deque[torch.Tensor] = deque(maxlen=_MAX_LOSSES)
        self._original: Any = None
        self._wrapper: Any = None

    def begin(self) -> None:
        """Keep losses from now on."""
        if missing_hooks("inspection.backward_spans"):
            return
        original, kept = torch.autograd.backward, self._kept

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in (tensors,) if isinstance(tensors, torch.Tensor) else tensors:
                if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                    kept.append(local_tensor(tensor).detach())
            return original(tensors, *args, **kwargs)

        self._original, self._wrapper = original, backward
        torch.autograd.backward = backward

    def end(self) -> None:
        """Keep none any more."""
        # Code that wrapped it meanwhile keeps our wrapper, which only keeps a few numbers.
        if torch.autograd.backward is self._wrapper:
            torch.autograd.backward = self._original
        self._kept.clear()

    def take(self) -> list[torch.Tensor]:
        """Return the losses since the last call, each of one element."""
        losses = list(self._kept)
        self._kept.clear()
        return losses
