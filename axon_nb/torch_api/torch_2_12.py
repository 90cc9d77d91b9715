"""torch 2.12: differences from 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axon_nb.torch_api.torch_2_13 import Torch213

_FIELDS_TO_CLEAR = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)


class Torch212(Torch213):
    """The adapter for torch 2.12."""

    last = (2, 12)
    gather_method = "_allgather_base"
    scatter_method = "_reduce_scatter_base"

    @property
    def all_gather_single(self) -> Callable[..., Any]:
        """The function under its older name."""
        import torch.distributed as dist

        return dist.all_gather_into_tensor

    @property
    def reduce_scatter_single(self) -> Callable[..., Any]:
        """The function under its older name."""
        import torch.distributed as dist

        return dist.reduce_scatter_tensor

    def reset_fsdp(self, root: Any) -> None:
        """Do by hand what `reset_iter_state` does since 2.13; gradients of the aborted step are lost."""
        state = root._get_fsdp_state()
        communication, context = state._comm_ctx, state._state_ctx
        idle = type(state._training_state).IDLE
        communication.all_gather_state = None
        self._drop_reductions(communication)
        communication.post_forward_order.clear()
        for each in context.all_states:
            each._training_state = idle
            each._modules_to_run_forward.clear()
            for group in self.fsdp_parameter_groups(each):
                for name in _FIELDS_TO_CLEAR:
                    setattr(group, name, None)
                group._post_forward_indices.clear()
                group._training_state = idle
                group._to_sharded()
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False

    def _drop_reductions(self, communication: Any) -> None:
        communication.reduce_scatter_states.clear()
