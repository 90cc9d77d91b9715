"""Patches DeepSpeed when a cell imports it, and resets its engines after an aborted step to the state before the step.

Uses private parts of DeepSpeed, as of version 0.19; each line says what goes wrong without it. An engine that cannot be
reset raises when it is used, instead of training on with half a gradient. Gradients of the micro-batches since the last
step are lost; weights and optimizer states are kept.

The register lists the private hooks as `deepspeed.reset`, `deepspeed.zero`, `deepspeed.setup` and `deepspeed.groups`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType, ModuleType
from typing import Any

import torch

from axon_nb.records.hooks import missing_hooks

_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_GROUPS = "deepspeed.utils.groups"
_PARTITIONED = ("_release_ipg_buffers", "all_grad_tensors", "averaged_gradients", "ipg_buckets")
_SHARDED = ("averaged_gradients", "ipg_buckets", "parameter_offload", "params_already_reduced")
_COORDINATOR = ("_invalidate_trace", "is_invalid_trace", "release_backward_leftovers")


def reset_problems(engine: Any = None) -> list[str]:
    """Names of what the optimizer of this engine should have for a reset and has not; none without an engine."""
    absent: list[str] = []
    optimizer = getattr(engine, "optimizer", None)
    coordinator = _coordinator(optimizer)
    if coordinator is not None:
        absent += [name for name in _COORDINATOR if not hasattr(coordinator, name)]
    if not hasattr(optimizer, "_backward_hook_state"):
        return absent  # stage 0 has torch's own optimizer
    if coordinator is not None:
        absent += [name for name in _SHARDED if not hasattr(optimizer, name)]
    elif hasattr(optimizer, "ipg_buckets"):
        absent += [name for name in _PARTITIONED if not hasattr(optimizer, name)]
    return absent


def reset_engines(engines: Iterable[Any]) -> int:
    """Reset each engine to the state before a step; return their number. Does not communicate."""
    engines = list(engines)
    for engine in engines:
        try:
            if absent := missing_hooks("deepspeed.reset", engine=engine):
                raise AttributeError(f"this DeepSpeed lacks {absent[0]}")
            _reset(engine)
        except Exception as error:  # another version, or a partially constructed engine
            _disable(engine, f"{type(error).__name__}: {error}")
    _forget_forward([engine.module for engine in engines if hasattr(engine, "module")])
    return len(engines)


def clear_cached_groups() -> None:
    """After a rank was replaced, make new engines create their groups again, as the new rank does."""
    groups = sys.modules.get(_GROUPS)
    for name, value in list(vars(groups).items()) if groups is not None else ():
        if name.startswith("_") and name.endswith(("_GROUP", "_GROUP_RANKS")):
            if isinstance(value, dict):
                value.clear()
            else:
                setattr(groups, name, None)


def _coordinator(optimizer: Any) -> Any:
    """The object that gathers stage 3 parameters; None in other stages. For inference the optimizer owns it."""
    offload = getattr(optimizer, "parameter_offload", optimizer)
    return offload.get_param_coordinator() if hasattr(offload, "get_param_coordinator") else None


def _disable(engine: Any, reason: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"this DeepSpeed engine could not be reset after a cell was aborted ({reason}): create it again with "
            "`deepspeed.initialize`."
        )

    engine.module.register_forward_pre_hook(refuse, prepend=True)


def _reset(engine: Any) -> None:
    # The aborted micro-batch may have been counted on some ranks only: they would then step at different times.
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    for name, value in {
        "_running_engine_backward": False,
        "_running_engine_step": False,
        "_unmanaged_backward_count": 0,
        "inside_no_sync_ctxt": False,
    }.items():
        if hasattr(engine, name):
            setattr(engine, name, value)
    for timer in getattr(getattr(engine, "timers", None), "timers", {}).values():  # "timer has already been started"
        timer.reset()
    optimizer = engine.optimizer
    coordinator = _coordinator(optimizer)
    if coordinator is not None:
        _reset_parameters(engine.module, coordinator)
    for parameter in engine.module.parameters():
        parameter.grad = None
    if not hasattr(optimizer, "_backward_hook_state"):
        return
    # Otherwise the next backward's hooks are counted with those of the aborted one, and nothing is reduced.
    hooks = optimizer._backward_hook_state
    hooks.backward_active_depth = hooks.remaining_grad_acc_hooks = 0
    hooks.reset_for_new_step()
    if hasattr(optimizer, "ipg_buckets"):
        _reset_reduction(optimizer)
    optimizer.zero_grad(set_to_none=True)


def _reset_reduction(optimizer: Any) -> None:
    """Reset the gradients that ZeRO has collected, reduced and stored so far."""
    for bucket in optimizer.ipg_buckets.values():
        # "Gradient computed twice for this partition"
        getattr(bucket, "clear_params", bucket.clear)()
    reduced = optimizer.params_already_reduced
    for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
        reduced[key] = False
    # Otherwise gradients of the aborted step would be added to the next one's.
    optimizer.averaged_gradients.clear()
    for name in ("all_grad_tensors", "extra_large_param_to_reduce", "previous_reduced_grads", "norm_for_param_grads"):
        if getattr(optimizer, name, None):
            getattr(optimizer, name).clear()
    for name in ("_offload_accumulated_param_ids", "_offload_boundary_param_ids"):
        if hasattr(optimizer, name):
            setattr(optimizer, name, set())
    if hasattr(optimizer, "_release_ipg_buffers"):  # stages 1 and 2 count from -1, stage 3 from 0
        optimizer._release_ipg_buffers()
        optimizer.micro_step_id = -1
    else:
        optimizer.param_reduce_events.clear()
        optimizer.micro_step_id = 0
    if getattr(optimizer, "cpu_offload", False):
        optimizer.reset_cpu_buffers()
    optimizer._coalesce_grad_reduction = False


def _reset_parameters(module: Any, coordinator: Any) -> None:
    """Stage 3: reshard parameters that are gathered or being gathered."""
    in_flight = getattr(module, "ds_inflight_param_registry", None)
    if in_flight is not None:
        in_flight.data.clear()  # their operations failed: waiting for them would raise
    for parameter in module.parameters():
        if not hasattr(parameter, "ds_status"):
            continue
        parameter.ds_active_sub_modules.clear()
        status = parameter.ds_status
        if status.name == "AVAILABLE":
            parameter.partition()
        elif status.name == "INFLIGHT":
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            parameter.ds_status = type(status).NOT_AVAILABLE
    coordinator.release_backward_leftovers()
    # The recorded module order ends where the step was aborted, and may differ between ranks.
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for each in module.modules():
        # Otherwise the next access to a parameter outside forward would gather it, on one rank only.
        if hasattr(each._parameters, "_in_forward"):
            each._parameters._in_forward = False
        for name in ("applied_pre_backward_ref_cnt", "ds_grads_remaining"):
            if name in vars(each):
                setattr(each, name, 0)
        if hasattr(each, "ds_recompute_parameters"):
            each.ds_recompute_parameters.clear()


def _forget_forward(roots: list[Any]) -> None:
    """Trim stage 3's stack of modules in forward to the root models at its bottom."""
    stack = getattr(sys.modules.get(_OFFLOAD), "FWD_MODULE_STACK", None)
    if stack:
        known = {id(root) for root in roots}
        stack[:] = [module for module in dict.fromkeys(stack) if id(module) in known]


def skip_shm_all_reduce(backend: ModuleType) -> None:
    """Prevent DeepSpeed from building its shared-memory all-reduce, as it does on CPUs at start.

    Only inference uses it. Building it takes a compiler and half a minute, and a rank that waits in it hangs forever
    if another rank fails. Without the hook it is built.

    Args:
        backend: The module ``deepspeed.comm.torch``, just imported.
    """
    if hasattr(backend, "build_shm_op"):
        vars(backend).update(build_shm_op=lambda: None)


def _run_step(step: Callable[..., Any], on_step_end: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    result = step(*args, **kwargs)
    on_step_end()
    return result


STEP_CODE: CodeType = _run_step.__code__
"""The code object under which a whole step of an engine runs, once `wrap_step` has wrapped it."""


def wrap_step(engine: ModuleType, on_step_end: Callable[[], None]) -> None:
    """Call `on_step_end` right after each step of an engine.

    DeepSpeed's optimizers distribute new weights after torch's optimizer has stepped: an interrupt in between
    would leave ranks with different weights.

    Args:
        engine: The module ``deepspeed.runtime.engine``, just imported.
        on_step_end: Called on the stack of the step.
    """
    kind = engine.DeepSpeedEngine
    original = kind.step

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _run_step(original, on_step_end, self, *args, **kwargs)

    kind.step = step
