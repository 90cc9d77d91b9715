"""torch 2.14: differences from 2.15."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from axon_nb.torch_api.current import TorchApi


class Torch214(TorchApi):
    """The adapter for torch 2.14."""

    last = (2, 14)
    world_fields: Mapping[str, type[Any]] = MappingProxyType({})

    def register_group_class(self, name: str) -> None:
        """Do nothing: torch 2.14 attaches no flight recorder from Python."""

    def drop_accumulated_gradient(self, parameter: Any) -> None:
        """Drop the gradient: a half-reduced one would be added to that of the next step."""
        parameter.unsharded_accumulated_grad = None

    def reset_fsdp(self, root: Any) -> None:
        """Reset as in 2.15; here a backward leaves no reduction open."""
        root.reset_iter_state()

    def reset_stage(self, stage: Any) -> None:
        """Clear a pipeline stage's state; its next step allocates receive buffers again."""
        stage.clear_runtime_states()
