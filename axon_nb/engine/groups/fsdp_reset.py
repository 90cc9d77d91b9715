"""FSDP2 modules back to the state before a step, on versions of torch whose `reset_iter_state` does not exist yet.

What torch 2.13 does in it, by hand, for the names that 2.11 and 2.12 have. Private hooks all.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["param_groups", "reset_by_hand", "reset_root"]


def reset_root(root: Any) -> None:
    """Reset the FSDP2 module `root` and all below it, in the way that this torch has."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        reset_by_hand(root)


def reset_by_hand(root: Any) -> None:
    """As `reset_iter_state`, for a torch that lacks it; gradients of the aborted step are lost."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # it has not run forward yet
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what is dropped here may still be in use
    context, communication = state._state_ctx, state._comm_ctx
    communication.all_gather_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events", "post_forward_order"):
        if hasattr(communication, name):  # one list in 2.13
            getattr(communication, name).clear()
    if hasattr(communication, "reduce_scatter_state"):  # one value before
        communication.reduce_scatter_state = None
    for each in context.all_states:
        each._training_state = TrainingState.IDLE
        if hasattr(each, "_modules_to_run_forward"):
            each._modules_to_run_forward.clear()
        for group in param_groups(each):
            _reset_group(group, TrainingState.IDLE)
    context.iter_forward_root = None
    context.post_backward_final_callback_queued = False


def param_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 state, one or several by version of torch."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reset_group(group: Any, idle: Any) -> None:
    for name in (
        "_all_gather_result",
        "_all_reduce_state",
        "_partial_reduce_output",
        "_post_reduce_event",
        "_reshard_after_forward_event",
    ):
        if hasattr(group, name):
            setattr(group, name, None)
    group._post_forward_indices.clear()
    group._training_state = idle
    group._to_sharded()
