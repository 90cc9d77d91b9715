"""Abort, from any thread at any time; and, when all ranks are idle, rebuild groups and reset wrappers in place.

Groups are rebuilt under the same objects. DDP, FSDP2, FSDP1 and pipelines return to the state before the step that was
aborted. Private hooks into torch; each comment says what goes wrong without the hook (measured on torch 2.13).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from axon_nb.comm.group import rank_device, resolve
from axon_nb.compat import deepspeed
from axon_nb.compat.deepspeed import clear_cached_groups
from axon_nb.engine.groups import creation
from axon_nb.engine.groups.creation import all_groups, c10d, named_group, rebuildable_groups
from axon_nb.engine.groups.recoverable import RecoverableGroup
from axon_nb.engine.groups.state import current_groups
from axon_nb.engine.live_objects import DDP, FSDP, FSDP1, live_objects
from axon_nb.records.hooks import missing_hooks
from axon_nb.records.protocol.recovery import GroupRecord, RebuildReport
from axon_nb.torch_api import torch_api

_SCHEDULES = ("torch.distributed.pipelining.schedules", "_PipelineSchedule")
_DEEPSPEED = ("deepspeed.runtime.engine", "DeepSpeedEngine")
_GRAPHS = ("torch.cuda.graphs", "CUDAGraph")
_DIRECTIONS = (
    ("torch.distributed.pipelining._p2p", "_PP_EDGE_GROUP_CACHE"),
    ("torch.distributed.pipelining.stage", "_PP_DIRECTION_GROUP_CACHE"),
)
"""Where torch keeps the groups of one direction of its pipelines: since 2.15, and in 2.14."""
_CLOSE_TIMEOUT_S = 1.0
_GLOO = "gloo"


def track_wrappers() -> None:
    """Track wrappers from now on, so that no search is needed later; call it before any is created."""
    live_objects(DDP, FSDP, FSDP1, _SCHEDULES)


def track_engines() -> None:
    """Track DeepSpeed's engines from now on; call it when DeepSpeed has been imported."""
    live_objects(_DEEPSPEED)


def reset_wrappers() -> tuple[int, list[str]]:
    """Reset every DDP, FSDP2 and FSDP1 module, pipeline schedule and DeepSpeed engine of this process.

    Returns:
        Their number, and for each kind that could not be reset a sentence: the groups are usable, but such objects must
        be created again.
    """
    ddp, fsdp, fsdp1, schedules = live_objects(DDP, FSDP, FSDP1, _SCHEDULES)
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
    failed += graphs_to_capture() if creation.native_groups() is not None else []
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
    for name in (*torch_api().schedule_flags, "_p2p_initialized"):
        if hasattr(schedule, name):
            setattr(schedule, name, False)
    for stage in [schedule._stage] if hasattr(schedule, "_stage") else schedule._stages:
        torch_api().reset_stage(stage)
        # Gradients not sent yet, and deferred work on weights.
        stage.bwd_cache.clear()
        stage.backward_state.clear()
        stage.dw_runner.clear()


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


def _forget_edges() -> None:
    """Make pipelines create their groups of one direction again, as an aborted or replaced rank does.

    Those of two ranks are a schedule's, whose next step takes new ones; those of 2.14 stay in the stages.
    """
    for module, name in _DIRECTIONS:
        getattr(sys.modules.get(module), name, {}).clear()
    for group in rebuildable_groups():
        if str(group.group_desc).startswith("pp_p2p_round_"):
            _drop(group)


def abort(*, again: bool) -> None:
    """End every wait of this rank in any group, and refuse new ones until `recover`.

    Args:
        again: Whether the connections were closed by an earlier abort; this one only wakes waiting threads.
    """
    state = current_groups()
    state.abort.set()
    threads = []
    if not again:
        # Each group takes milliseconds; one after the other that would be half a second for a dozen.
        closers = [group.connection_closer() for group in all_groups()]
        threads = [threading.Thread(target=close, name="axon_nb-close", daemon=True) for close in closers]
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached
            thread.run()
    state.fail_all_futures()
    if (native := state.native) is not None:
        native.abort(timeout_s=creation.ABORT_TIMEOUT_S)
    end = time.monotonic() + _CLOSE_TIMEOUT_S
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, end - time.monotonic()))


def num_calls() -> int:
    """Return the number of communication calls that this rank has started; on NCCL from zero after each rebuild."""
    state = current_groups()
    return state.calls.num_calls + (0 if state.native is None else state.native.num_collectives())


def disable_groups(reason: str) -> None:
    """Refuse communication, because the groups cannot be rebuilt; cells still run."""
    current_groups().abort.clear(broken=reason)


def pause() -> tuple[int, int, str]:
    """Give back what torch and NCCL keep for later on this rank's GPU, until `resume`; collective over all ranks.

    Returns:
        Free bytes of the GPU before and after, and why NCCL keeps its memory; empty if it does not, or has none.
    """
    device, native = rank_device(resolve(None)), creation.native_groups()
    if not torch.cuda.is_initialized():  # the questions would initialise CUDA
        return 0, 0, ""
    before = torch.cuda.mem_get_info(device)[0]
    torch.cuda.empty_cache()
    kept = "" if native is None else native.suspend()
    return before, torch.cuda.mem_get_info(device)[0], kept


def resume() -> None:
    """Let NCCL take again what `pause` made it give back; collective over all ranks."""
    if (native := creation.native_groups()) is not None:
        native.resume()


def list_groups() -> list[GroupRecord]:
    """List the groups that this rank is in, besides the default one."""
    default = c10d._get_default_group()
    return [
        GroupRecord(
            name=str(group.group_name),
            ranks=tuple(sorted(c10d._world.pg_group_ranks[group])),
            desc=str(group.group_desc or ""),
            backend=str(dist.get_backend(group)),
            timeout_s=_timeout(group).total_seconds(),
        )
        for group in sorted(rebuildable_groups(), key=lambda group: (len(group.group_name), group.group_name))
        if group is not default
    ]


def _timeout(group: Any) -> timedelta:
    native = creation.native_groups()
    return group.timeout if isinstance(group, RecoverableGroup) or native is None else native.timeout_of(group)


def recreate_groups(groups: Sequence[GroupRecord]) -> None:
    """Create, on a replacement rank, the groups of its predecessor: with their names and in their order."""
    for group in groups:
        options: dict[str, Any] = {"backend": group.backend, "group_desc": group.desc or None}
        options["timeout"] = timedelta(seconds=group.timeout_s)
        if group.name.isdigit():
            c10d._world.group_count = int(group.name)
            with current_groups().without_rendezvous():
                dist.new_group(list(group.ranks), **options)
            continue
        with current_groups().without_rendezvous(), named_group(group.name):
            dist.new_group(list(group.ranks), use_local_synchronization=True, **options)


def join_groups(groups: Sequence[GroupRecord], *, epoch: int) -> None:
    """Join the predecessor's groups, on a replacement that has joined the default group; collective over all ranks.

    The other ranks are in `recover`.

    Args:
        groups: What `list_groups` returned on the other ranks, for the groups that this rank is in.
        epoch: How often the groups have been rebuilt.
    """
    native = creation.native_groups()
    if native is not None:
        if problems := list(filter(None, native.exchange(epoch, "").values())):
            raise RuntimeError(problems[0])
        native.rebuild(c10d._get_default_group(), epoch)
    complete = common_groups({group.name: group.ranks for group in groups})
    joinable = [group for group in groups if group.name in complete]
    recreate_groups([group for group in joinable if group.backend == _GLOO])
    if native is not None:
        # torch makes them without a connection.
        recreate_groups([group for group in joinable if group.backend != _GLOO])
        for group in native.all():
            if group is not c10d._get_default_group():
                native.rebuild(group, epoch)
        native.end_rebuild()


def common_groups(members: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of this rank's groups that all of their ranks have; collective over all ranks.

    A rank that was aborted in `new_group`, or that destroyed a group on its own, lacks one: the others would wait
    for it forever.

    Args:
        members: Global ranks of each group that this rank has, by name.
    """
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, sorted(members))
    return {name for name, ranks in members.items() if all(name in names[rank] for rank in ranks)}


def sync_group_count(device: torch.device | str = "cpu") -> None:
    """Set the number of the next group to the highest of all ranks; if numbers differ, `new_group` hangs."""
    count = torch.tensor(c10d._world.group_count, device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    c10d._world.group_count = int(count)


def _rebuild_groups(epoch: int) -> int:
    """Rebuild the default group, agree on the others with it, and rebuild those: on all ranks in the same order.

    Gloo groups beside those of NCCL come first.
    """
    native, groups = creation.native_groups(), rebuildable_groups()
    if not groups:
        return 0
    if native is not None:
        native.begin_rebuild()
    default = c10d._get_default_group()
    _rebuild(default, epoch)
    ranks_of, size = c10d._world.pg_group_ranks, dist.get_world_size()
    # Before a world that shrinks is complete, it still has the groups of the ranks that leave.
    others = [group for group in groups if group is not default and max(ranks_of[group]) < size]
    complete = common_groups({group.group_name: list(c10d._world.pg_group_ranks[group]) for group in others})
    for group in others:
        if group.group_name in complete:
            _rebuild(group, epoch)
        else:
            _drop(group)
    if native is not None:
        native.end_rebuild()
    return 1 + len(complete)


def _rebuild(group: Any, epoch: int) -> None:
    native = creation.native_groups()
    if isinstance(group, RecoverableGroup) or native is None:
        group.rebuild(epoch)
    else:
        native.rebuild(group, epoch)


def _drop(group: Any) -> None:
    """Drop a group that some of its ranks do not have; operations on it raise."""
    if isinstance(group, RecoverableGroup):
        group.disable()
    c10d.destroy_process_group(group)


def recover(epoch: int, *, replaced: bool = False) -> RebuildReport:
    """Rebuild all groups and reset wrappers; collective over all ranks, on the main thread.

    Args:
        epoch: Number of this rebuild: the same on all ranks, and higher than any before.
        replaced: Whether a rank was replaced: its DDP objects are new, so the others need new reducers.
    """
    state = current_groups()
    state.abort.clear()
    state.abort.stop_at(None)
    state.calls.clear()
    state.joined.clear()
    if not state.installed:  # an untested torch: nothing can be rebuilt
        return RebuildReport(0, 0, 0, ())
    state.epoch, state.rebuilding = epoch, True
    native = state.native
    problem = creation.device_problem(rank_device(resolve(None)), rank=dist.get_rank())
    # A rank without its device would fail in the first collective, and keep the others waiting there.
    if native is not None and any(native.exchange(epoch, problem).values()):
        state.rebuilding = False
        return RebuildReport(0, 0, 0, (), lost_device=problem)
    _forget_edges()
    num_groups = _rebuild_groups(epoch)
    wrappers, not_reset = reset_wrappers()
    if replaced:
        for module in live_objects(DDP)[0]:  # the reducers of a replaced rank have not seen the buckets of the others
            rebuild_reducer(module)
        clear_cached_groups()
    sync_group_count(native.device if native is not None else "cpu")
    state.rebuilding = False
    return RebuildReport(num_groups, wrappers, len(state.gloo.abandoned), tuple(filter(None, [*not_reset, problem])))
