"""Resets DDP, FSDP2, FSDP1 and pipelines to the state before a step, after an abort during one.

Private hooks into torch; each comment says what goes wrong without the hook (measured on torch 2.13).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch

from axon_nb.compat import deepspeed
from axon_nb.engine.groups import nccl
from axon_nb.engine.live_objects import live_objects
from axon_nb.records.hooks import missing_hooks
from axon_nb.torch_api import torch_api

_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_FSDP1 = ("torch.distributed.fsdp", "FullyShardedDataParallel")
_SCHEDULES = ("torch.distributed.pipelining.schedules", "_PipelineSchedule")
_DEEPSPEED = ("deepspeed.runtime.engine", "DeepSpeedEngine")
_GRAPHS = ("torch.cuda.graphs", "CUDAGraph")


def track_wrappers() -> None:
    """Track wrappers from now on, so that no search is needed later; call it before any is created."""
    live_objects(_DDP, _FSDP, _FSDP1, _SCHEDULES)


def track_engines() -> None:
    """Track DeepSpeed's engines from now on; call it when DeepSpeed has been imported."""
    live_objects(_DEEPSPEED)


def reset_wrappers() -> tuple[int, list[str]]:
    """Reset every DDP, FSDP2 and FSDP1 module, pipeline schedule and DeepSpeed engine of this process.

    Returns:
        Their number, and for each kind that could not be reset a sentence: the groups are usable, but such objects must
        be created again.
    """
    ddp, fsdp, fsdp1, schedules = live_objects(_DDP, _FSDP, _FSDP1, _SCHEDULES)
    failed = []
    for kind, modules in {
        "DDP models": {"ddp": ddp},
        "FSDP2 models": {"fsdp": fsdp},
        "FSDP1 models": {"fsdp1": fsdp1},
        "pipelines": {"schedules": schedules},
    }.items():
        try:
            reset_modules(**modules)
        except Exception as error:  # this torch lacks a hook; the self-test has reported it
            failed.append(f"{kind} could not be reset ({type(error).__name__}: {error}). Create them again.")
    failed += graphs_to_capture() if nccl.groups() is not None else []
    count = len(ddp) + len(fsdp) + len(fsdp1) + len(schedules)
    return count + deepspeed.reset_engines(*live_objects(_DEEPSPEED)), failed


def graphs_to_capture(kind: tuple[str, str] = _GRAPHS) -> list[str]:
    """Return a sentence if this process holds CUDA graphs: they would launch collectives on freed communicators.

    Args:
        kind: Module and class of the graphs.
    """
    if not any(live_objects(kind)):
        return []
    return ["CUDA graphs still hold the communicators of before: capture those that contain collectives again."]


def reset_modules(
    *, ddp: Sequence[Any] = (), fsdp: Sequence[Any] = (), fsdp1: Sequence[Any] = (), schedules: Sequence[Any] = ()
) -> None:
    """Reset these DDP, FSDP2 and FSDP1 modules and pipeline schedules.

    Raises:
        AttributeError: this torch lacks a hook.
    """
    api = torch_api()
    for module in ddp:
        module._has_rebuilt_buckets = False
        module.reducer._reset_state()
    for module in fsdp:
        for group in api.fsdp_parameter_groups(module._get_fsdp_state()):
            # Otherwise the next forward would wait for an all-gather of the aborted step.
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                # Half-reduced gradients would be added to the next step's, and weights would be silently wrong.
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
                api.drop_accumulated_gradient(parameter)
    for module in fsdp:
        if module._get_fsdp_state()._is_root:
            api.reset_fsdp(module)
    if fsdp1 and (missing := missing_hooks("groups.fsdp1_reset")):
        raise AttributeError(f"this torch has no {', '.join(missing)}")
    for module in fsdp1:
        _reset_fsdp1(module)
    for schedule in schedules:
        _reset_schedule(schedule)


@torch.no_grad()
def _reset_fsdp1(module: Any) -> None:
    """Reset one FSDP1 module, but not those within it."""
    # A state dict's hook has entered them and not left: they put back what they have replaced.
    for context in module._unshard_params_ctx.values():
        context.__exit__(None, None, None)
    module._unshard_params_ctx.clear()
    module.training_state, module._unshard_event = type(module.training_state).IDLE, None
    if module._is_root:
        module._post_backward_callback_queued = False
        order = module._exec_order_data
        order.handles_post_forward_order.clear()
        order.current_order_index = 0
        if order.is_first_iter:  # recorded again from its start
            for handle in order.handles_pre_forward_order:
                handle._pre_forward_order_index = None
            order.handles_pre_forward_order.clear()
    handle = module._handle
    if handle is not None and hasattr(handle.flat_param, "_local_shard"):  # else it has never run
        _reset_flat_parameter(handle)


def _reset_flat_parameter(handle: Any) -> None:
    flat = handle.flat_param
    owners = flat._param_infos if handle._use_orig_params else ()
    is_resharded = (
        handle._training_state.name == "IDLE"
        and flat.data_ptr() == flat._local_shard.data_ptr()
        and all(isinstance(getattr(owner, name, None), torch.nn.Parameter) for name, owner, _ in owners)
    )
    handle._training_state = type(handle._training_state).IDLE
    handle._prefetched = handle._needs_pre_forward_unshard = False
    handle._needs_pre_backward_unshard = handle._ran_pre_backward_hook = False
    handle._post_forward_index, flat._post_backward_called = None, False
    if hasattr(flat, "_post_backward_hook_state"):  # or it would run once more in the next backward
        flat._post_backward_hook_state[-1].remove()
        del flat._post_backward_hook_state
    if not is_resharded:  # else parameters may have changes of the user's that are not in the shard yet
        handle._use_sharded_flat_param()
    # A half-gathered parameter, or one from before a step, would be taken for the current one.
    for name in ("_full_param_padded", "_full_prec_full_param_padded", "_mp_shard"):
        if hasattr(flat, name):
            getattr(flat, name).untyped_storage().resize_(0)
    # Half-reduced gradients would be added to the next step's; those of earlier backwards, and of layers that are done,
    # are where the optimizer finds them.
    if hasattr(flat, "_saved_grad_shard"):
        flat.grad = getattr(flat, "_cpu_grad", flat._saved_grad_shard)
        del flat._saved_grad_shard
    elif flat.grad is not None and flat.grad.shape != flat._local_shard.shape:
        flat.grad = None
    elif is_resharded:
        return
    if handle._use_orig_params:
        handle._use_sharded_grad_views()


def _reset_schedule(schedule: Any) -> None:
    # Losses of the aborted step would be mixed with the next one's: "backward through the graph a second time".
    schedule._internal_losses.clear()
    # Receives started in the aborted step: "receiving twice", or a wait on a group that is gone.
    for name in ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages", "backward_counter"):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    # Stages agree on shapes in their first step. If it was aborted, or a rank was replaced, only some have: the next
    # step would hang. And a receive in progress holds the buffers; they are created again with the rest.
    for stages, direction in itertools.product(("stage", "stages"), ("forward", "backward")):
        if hasattr(schedule, name := f"_{stages}_{direction}_initialized"):
            setattr(schedule, name, False)
    for stage in [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages:
        torch_api().reset_stage(stage)
        # Gradients not sent yet, and deferred work on weights.
        stage.bwd_cache.clear()
        stage.backward_state.clear()
        stage.dw_runner.clear()


def rebuild_reducers() -> None:
    """Give every DDP module a fresh reducer: that of a replaced rank has not seen the buckets of the others."""
    for module in live_objects(_DDP)[0]:
        rebuild_reducer(module)


def rebuild_reducer(module: Any) -> None:
    """Give one DDP module a fresh reducer with the settings of the old one; does not communicate."""
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    if module.static_graph:
        # A fresh reducer learns the graph in its first backward, and must be set to reduce the gradients of that one.
        module._static_graph_delay_allreduce_enqueued = False
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
    for hook, state in module._comm_hooks:
        sys.modules["torch.distributed"]._register_comm_hook(module.reducer, state, hook)
