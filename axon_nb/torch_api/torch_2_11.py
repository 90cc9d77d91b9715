"""torch 2.11: differences from 2.12."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from axon_nb.torch_api.torch_2_12 import Torch212


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

    def prepare_stage(self, stage: Any) -> None:
        """Leave out messages of a rank to itself, which Gloo refuses: 2.11 sends one between two stages on a rank."""
        original = stage._get_init_p2p_neighbors_ops

        def without_own() -> list[Any]:
            return [op for op in original() if op.group_peer != stage.group_rank]

        stage._get_init_p2p_neighbors_ops = without_own

    def reset_stage(self, stage: Any) -> None:
        """Also forget the shapes, which stages exchange in their first step: if it was aborted, only some know them."""
        super().reset_stage(stage)
        stage.inputs_meta = stage._outputs_meta = None

    @contextlib.contextmanager
    def static_stages(self) -> Iterator[None]:
        """Do nothing: stages already use the given shapes."""
        yield
