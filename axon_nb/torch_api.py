"""Adapters for torch's private interfaces that differ between versions: one per torch generation.

`torch_api()` returns the adapter of the installed torch. Each class describes one generation and inherits the rest from
the next newer one, so dropping an old torch means deleting its class. A torch newer than all of them gets the newest
adapter; the self-test (`axon_nb.engine.self_test`) checks whether the hooks work there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

_FIELDS_TO_CLEAR = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)


class TorchApi:
    """The adapter for torch 2.15; older generations override what differs.

    Methods import torch when needed: planning and the notebook side must not load torch at import.
    """

    last: tuple[int, int] = (2, 15)
    """The newest torch version that this adapter was written for, as (major, minor)."""
    gather_method = "all_gather_single"
    """Name of the ProcessGroup method that gathers into one tensor."""
    scatter_method = "reduce_scatter_single"
    """Name of the ProcessGroup method that reduces one tensor and scatters it."""
    world_fields: Mapping[str, type[Any]] = MappingProxyType({"pg_flight_recorder_hooks": dict})
    """Fields of `distributed_c10d._World` that not every supported torch has: name and type."""

    schedule_flags: tuple[str, ...] = (
        "_stage_forward_initialized",
        "_stages_forward_initialized",
        "_stage_backward_initialized",
        "_stages_backward_initialized",
    )
    """Flags of a pipeline's schedule, as far as it has them, that its stages have exchanged their shapes."""

    @property
    def all_gather_single(self) -> Callable[..., Any]:
        """Torch's function that gathers equal tensors into one."""
        import torch.distributed as dist

        return dist.all_gather_single

    @property
    def reduce_scatter_single(self) -> Callable[..., Any]:
        """Torch's function that reduces one tensor and scatters it in equal parts."""
        import torch.distributed as dist

        return dist.reduce_scatter_single

    def begin_sequence(self, backend: Any) -> None:
        """Initialise the sequence numbers of a new backend; not needed since 2.14 (pytorch#188611)."""

    def register_group_class(self, name: str) -> None:
        """Let torch create groups of backend `name`, whose creator returns a complete ProcessGroup.

        Such a group records its own operations. torch would try to attach its flight recorder and fail, because no
        backend is registered on it (pytorch: `_maybe_attach_flight_recorder`).
        """
        from torch.distributed import distributed_c10d as c10d

        c10d._FR_SELF_RECORDING_BACKENDS.add(name)  # type: ignore[attr-defined]

    def prepare_threads(self) -> None:
        """Prepare tensors without data for use in several threads; call it in a thread that outlives them."""

    def nccl_classes(self) -> tuple[type[Any], ...]:
        """The backend classes behind "nccl"; neither is a subclass of the other. Empty in a build without NCCL.

        Since 2.15 it is the second one, unless ``TORCH_DIST_USE_NCCL2=0`` is set (pytorch#192281).
        """
        import torch.distributed as dist

        names = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
        return tuple(vars(dist)[name] for name in names if name in vars(dist))

    def fsdp_parameter_groups(self, state: Any) -> list[Any]:
        """Return the parameter groups of an FSDP2 state."""
        return list(state._fsdp_param_groups)

    def fsdp_unsharded(self, modules: Iterable[Any]) -> dict[int, Any]:
        """Return the DTensor of each parameter that FSDP2 has unsharded now, by the `id` of the unsharded one.

        Without FSDP2's parameter groups such parameters look like plain tensors of each rank.

        Args:
            modules: Modules to search for those that FSDP2 manages.
        """
        shards = {}
        for module in modules:
            if not hasattr(module, "_get_fsdp_state"):
                continue
            for group in self.fsdp_parameter_groups(module._get_fsdp_state()):
                for parameter in getattr(group, "fsdp_params", ()):
                    if getattr(getattr(parameter, "sharded_state", None), "name", "") == "UNSHARDED":
                        shards[id(parameter.unsharded_param)] = parameter.sharded_param
        return shards

    def drop_accumulated_gradient(self, parameter: Any) -> None:
        """Drop an FSDPParam's accumulated unsharded gradient; since 2.15 that is `_unsharded_param.grad`."""

    def reset_fsdp(self, root: Any) -> None:
        """Reset an FSDP2 root module and its submodules to the state before a step.

        Raises:
            RuntimeError: `root` is not a root.
        """
        # A reduction left open by an aborted backward belongs to a root that is being reset.
        root._get_fsdp_state()._comm_ctx.active_gradient_reduction = None
        # torch also drops sharded gradients of earlier backwards, which the abort did not affect: restore them.
        states = root._get_fsdp_state()._state_ctx.all_states
        groups = [group for state in states for group in self.fsdp_parameter_groups(state)]
        parameters = [item.sharded_param for group in groups for item in group.fsdp_params]
        gradients = [parameter.grad for parameter in parameters]
        root.reset_iter_state()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def prepare_stage(self, stage: Any) -> None:
        """Prepare a new pipeline stage; nothing to do."""

    def reset_stage(self, stage: Any) -> None:
        """Clear the state of a pipeline stage whose step was aborted."""
        if stage._gradient_reduction_handle is not None:  # `clear_runtime_states` would wait for it forever
            stage._gradient_reduction_handle = None
            stage.submod.set_manual_backward_finalization(False)
        stage.clear_runtime_states()
        # The connections are closed, so nothing writes to these buffers; torch would reject another step with them.
        for received in (stage.args_recv_info, stage.grad_recv_info):
            for infos in received.values():
                for info in infos:
                    info.buffer = None

    def run_schedule(self, schedule: Any, *args: Any, **inputs: Any) -> None:
        """Run a step of a pipeline's schedule, without merging its outputs.

        Args:
            schedule: torch's schedule.
            *args: The batch for the first stage.
            **inputs: `target`; for a batch that is split already, `arg_mbs`, `kwarg_mbs` and `target_mbs` instead.
        """
        schedule.step(*args, return_outputs=False, **inputs)

    def static_stages(self) -> AbstractContextManager[None]:
        """Make a pipeline in a fake world use the shapes that its stages were given.

        torch does so by itself since 2.14.
        """
        return contextlib.nullcontext()

    def forget_placements(self) -> None:
        """Clear DTensor's cache of placements."""
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()

    def root_mesh(self, mesh: Any) -> Any:
        """Return the mesh of which `mesh` is a slice, or itself."""
        return mesh._get_root_mesh()

    def prepare_fake_world(self) -> None:
        """Let torch run collectives on tensors without data; it can since 2.11."""


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


class Torch213(Torch214):
    """The adapter for torch 2.13."""

    last = (2, 13)

    def begin_sequence(self, backend: Any) -> None:
        """Agree with the peers on the first sequence number."""
        backend._set_sequence_number_for_group()

    def run_schedule(self, schedule: Any, *args: Any, **inputs: Any) -> None:
        """Run a step; what is split already takes the place of what torch splits, which is all it accepts here.

        Before 2.10, torch merges the outputs of all steps.
        """
        given = [inputs.pop(name, None) for name in ("arg_mbs", "kwarg_mbs", "target_mbs")]
        if any(given):
            run = schedule._step_microbatches
            schedule._step_microbatches = lambda *split, **options: run(*given, *split[len(given) :], **options)
        can_skip = "return_outputs" in inspect.signature(schedule.step).parameters
        try:
            schedule.step(*args, **inputs, **({"return_outputs": False} if can_skip else {}))
        finally:
            vars(schedule).pop("_step_microbatches", None)

    @contextlib.contextmanager
    def static_stages(self) -> Iterator[None]:
        """Skip the stages' vote on whether all know their shapes, which a fake world cannot answer."""
        from torch.distributed.pipelining import schedules

        base: Any = schedules._PipelineSchedule
        vote = base._warmup_p2p

        def decide(_: Any, stages: list[Any], *__: Any) -> None:
            for stage in stages:
                stage._inference_mode = schedules.InferenceMode.STATIC  # type: ignore[attr-defined]

        base._warmup_p2p = decide
        try:
            yield
        finally:
            base._warmup_p2p = vote


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


class Torch211(Torch212):
    """The adapter for torch 2.11."""

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


class Torch210(Torch211):
    """The adapter for torch 2.8 to 2.10; 2.8 is the oldest supported version."""

    last = (2, 10)
    schedule_flags = ("_stage_initialized", "_stages_initialized", *TorchApi.schedule_flags)

    def prepare_threads(self) -> None:
        """Set the device guard in this thread, where this torch has one."""
        import torch

        if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
            super().prepare_threads()

    def prepare_stage(self, stage: Any) -> None:
        """Leave out a stage's messages to its own rank, where this torch sends some."""
        if hasattr(stage, "_get_init_p2p_neighbors_ops"):
            super().prepare_stage(stage)

    def forget_placements(self) -> None:
        """Clear the cache, which has no function for it here."""
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()

    def root_mesh(self, mesh: Any) -> Any:
        """Look the mesh up in torch's table, where a mesh does not know it."""
        if hasattr(mesh, "_get_root_mesh"):
            return super().root_mesh(mesh)
        from torch.distributed import device_mesh

        return device_mesh._mesh_resources.get_root_mesh(mesh)

    def prepare_fake_world(self) -> None:
        """Register what torch 2.11 registers by itself: collectives on tensors without data."""
        importlib.import_module("torch.distributed._tools.fake_collectives")


_OLDER_ADAPTERS: tuple[type[TorchApi], ...] = (Torch210, Torch211, Torch212, Torch213, Torch214)


def adapter_for(version: str) -> type[TorchApi]:
    """Return the adapter for a torch version such as ``2.14.1+cu130``; newer unknown versions get the newest."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return next((kind for kind in _OLDER_ADAPTERS if numbers <= kind.last), TorchApi)


@functools.cache
def torch_api() -> TorchApi:
    """Return the adapter of the installed torch; imports torch."""
    import torch

    return adapter_for(torch.__version__)()
