"""torch 2.14: what was different before 2.15."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from axon_nb.torch_api.current import TorchApi

__all__ = ["Torch214"]


class Torch214(TorchApi):
    """The adapter for torch 2.14."""

    last = (2, 14)
    world_fields: Mapping[str, type[Any]] = MappingProxyType({})

    def register_group_class(self, name: str) -> None:
        """Nothing to do: torch attaches no flight recorder from Python yet."""

    def drop_accumulated_gradient(self, parameter: Any) -> None:
        """Half-reduced gradients would be added to those of the next step."""
        parameter.unsharded_accumulated_grad = None

    def reset_fsdp(self, root: Any) -> None:
        """As in 2.15; a backward leaves no reduction open yet."""
        root.reset_iter_state()

    def reset_stage(self, stage: Any) -> None:
        """Forget what a pipeline stage held; its next step allocates the buffers for receiving again."""
        stage.clear_runtime_states()
