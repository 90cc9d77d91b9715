"""Putting DDP, FSDP2 and pipelines back to the state before a step, after one was aborted in the middle.

Private hooks into torch; each step says what goes wrong without it (measured on torch 2.13).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

from axon_nb.compat import deepspeed
from axon_nb.engine.live_objects import live_objects
from axon_nb.torch_api import torch_api

__all__ = ["follow_engines", "follow_wrappers", "rebuild_reducers", "renew_reducer", "reset_modules", "reset_wrappers"]


_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_FSDP = ("torch.distributed.fsdp", "FSDPModule")
_SCHEDULES = ("torch.distributed.pipelining.schedules", "_PipelineSchedule")
_DEEPSPEED = ("deepspeed.runtime.engine", "DeepSpeedEngine")


def follow_wrappers() -> None:
    """Before any is made: those made from now on are known, and need not be looked for."""
    live_objects(_DDP, _FSDP, _SCHEDULES)


def follow_engines() -> None:
    """When DeepSpeed has been imported: its engines are known from when they are made."""
    live_objects(_DEEPSPEED)


def reset_wrappers() -> tuple[int, list[str]]:
    """Reset every DDP and FSDP2 module, pipeline schedule and DeepSpeed engine of this process.

    Returns:
        How many there are, and why some could not be reset, a sentence for each kind: the groups are fit for use, but
        such an object must be built again.
    """
    ddp, fsdp, schedules = live_objects(_DDP, _FSDP, _SCHEDULES)
    failed = []
    for kind, modules in {
        "DDP models": (ddp, [], []),
        "FSDP2 models": ([], fsdp, []),
        "pipelines": ([], [], schedules),
    }.items():
        try:
            reset_modules(*modules)
        except Exception as error:  # this torch lacks what the self-test has named
            failed.append(f"{kind} could not be reset ({type(error).__name__}: {error}); build them again.")
    count = len(ddp) + len(fsdp) + len(schedules)
    return count + deepspeed.reset_engines(*live_objects(_DEEPSPEED)), failed


def reset_modules(ddp: Sequence[Any], fsdp: Sequence[Any], schedules: Sequence[Any]) -> None:
    """Reset these DDP and FSDP2 modules and pipeline schedules."""
    api = torch_api()
    for module in ddp:
        module._has_rebuilt_buckets = False
        module.reducer._reset_state()
    for module in fsdp:
        for group in api.fsdp_parameter_groups(module._get_fsdp_state()):
            # An all-gather of the aborted step would be waited for in the next forward.
            group._all_gather_result = None
            for parameter in group.fsdp_params:
                # Half-reduced gradients would be added to the next step's: weights then are silently wrong.
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
                api.drop_accumulated_gradient(parameter)
    for module in fsdp:
        if module._get_fsdp_state()._is_root:
            api.reset_fsdp(module)
    for schedule in schedules:
        _reset_schedule(schedule)


def _reset_schedule(schedule: Any) -> None:
    # Losses of the aborted step would be taken for those of the next: "backward through the graph a second time".
    schedule._internal_losses.clear()
    # Receives begun in the aborted step: "receiving twice", or a wait on a group that is gone.
    for name in ("fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages", "backward_counter"):
        if hasattr(schedule, name):
            getattr(schedule, name).clear()
    # Stages agree on shapes in their first step. Aborted there, or with a rank replaced, some have and some have not:
    # the next step would hang. And a receive that was under way holds the buffers; they are made anew with the rest.
    for stages, way in itertools.product(("stage", "stages"), ("forward", "backward")):
        if hasattr(schedule, name := f"_{stages}_{way}_initialized"):
            setattr(schedule, name, False)
    for stage in [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages:
        torch_api().reset_stage(stage)
        # Gradients that were not sent yet, and work on weights that was put off.
        stage.bwd_cache.clear()
        stage.backward_state.clear()
        stage.dw_runner.clear()


def rebuild_reducers() -> None:
    """Give every DDP module a fresh reducer: a replaced rank has none that has seen the buckets of the others."""
    for module in live_objects(_DDP)[0]:
        renew_reducer(module)


def renew_reducer(module: Any) -> None:
    """Give one DDP module a fresh reducer, with what was set on the old one; does not talk to the other ranks."""
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    if module.static_graph:
        # A fresh reducer learns the graph in its first backward, whose gradients it must be told to reduce.
        module._static_graph_delay_allreduce_enqueued = False
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
    for hook, state in module._comm_hooks:
        sys.modules["torch.distributed"]._register_comm_hook(module.reducer, state, hook)
