"""torch 2.11: differences from 2.12."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from axon_nb.torch_api.torch_2_12 import Torch212

__all__ = ["Torch211"]


class Torch211(Torch212):
    """The adapter for torch 2.11, the oldest supported version."""

    last = (2, 11)

    def prepare_threads(self) -> None:
        """Set the device guard in this thread: a CUDA build without a GPU crashes if a thread that set it has ended."""
        import torch

        if not torch.cuda.is_available():
            torch._C._ensureCUDADeviceGuardSet()

    def fsdp_parameter_groups(self, state: Any) -> list[Any]:
        """The state's only group, if any."""
        return [] if state._fsdp_param_group is None else [state._fsdp_param_group]

    def _drop_reductions(self, communication: Any) -> None:
        communication.reduce_scatter_state = None

    @contextlib.contextmanager
    def static_stages(self) -> Iterator[None]:
        """Do nothing: stages already use the given shapes."""
        yield
