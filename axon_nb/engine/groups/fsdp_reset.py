"""FSDP2 back to the state before a step, on every torch that is supported.

torch has `reset_iter_state` for it since 2.13; before, the same is done by hand (read from the sources of 2.11.0 and
2.12.0, whose names differ: one parameter group a module in 2.11, several since).
"""

from __future__ import annotations

from typing import Any

__all__ = ["param_groups", "reset_root", "reset_root_by_hand"]

_TO_NONE = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of one FSDP state."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reset_root(module: Any) -> None:
    """Reset the module on which `fully_shard` was called last, and all below it."""
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:
        reset_root_by_hand(module)


def reset_root_by_hand(module: Any) -> None:
    """What `reset_iter_state` does, where torch does not have it; gradients of the aborted step are lost."""
    state = module._get_fsdp_state()
    communication, context = state._comm_ctx, state._state_ctx
    idle = type(state._training_state).IDLE
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for each in context.all_states:
        each._training_state = idle
        if hasattr(each, "_modules_to_run_forward"):
            each._modules_to_run_forward.clear()
        for group in param_groups(each):
            for name in _TO_NONE:
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False
