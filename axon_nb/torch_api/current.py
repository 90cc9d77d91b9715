"""torch 2.15 and newer: torch's private interfaces that differ between versions, as in the newest torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any


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

    def static_stages(self) -> AbstractContextManager[None]:
        """Make a pipeline in a fake world use the shapes that its stages were given.

        torch does so by itself since 2.14.
        """
        return contextlib.nullcontext()
