"""torch 2.15 and newer: the private interfaces of torch that differ between versions, as the newest torch has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

__all__ = ["TorchApi"]


class TorchApi:
    """The adapter for torch 2.15; older generations override what was different.

    torch is imported when a method needs it: planning and the notebook side load no torch at import.
    """

    last: tuple[int, int] = (2, 15)
    """The newest torch that this adapter was written for, as (major, minor)."""
    gather_method = "all_gather_single"
    """The method of a ProcessGroup that gathers into one tensor."""
    scatter_method = "reduce_scatter_single"
    """The method of a ProcessGroup that reduces one tensor and scatters it."""
    world_fields: Mapping[str, type[Any]] = MappingProxyType({"pg_flight_recorder_hooks": dict})
    """What `distributed_c10d._World` holds besides the fields that every supported torch has: name and type."""

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
        """Prepare the sequence numbers of a new backend; torch counts by itself since 2.14 (pytorch#188611)."""

    def register_group_class(self, name: str) -> None:
        """Have torch build groups of backend `name`, whose creator returns a whole ProcessGroup.

        Such a group records its own operations. torch would attach its flight recorder to it and fail, because no
        backend is registered on it (pytorch: `_maybe_attach_flight_recorder`).
        """
        from torch.distributed import distributed_c10d as c10d

        c10d._FR_SELF_RECORDING_BACKENDS.add(name)  # type: ignore[attr-defined]

    def prepare_threads(self) -> None:
        """Make tensors without data fit for use in several threads; call it in a thread that outlives them."""

    def nccl_classes(self) -> tuple[type[Any], ...]:
        """The backend classes behind "nccl"; neither is a subclass of the other. Empty in a build without NCCL.

        Since 2.15 it is the second, unless ``TORCH_DIST_USE_NCCL2=0`` is set (pytorch#192281).
        """
        import torch.distributed as dist

        names = ("ProcessGroupNCCL", "ProcessGroupNCCL2")
        return tuple(vars(dist)[name] for name in names if name in vars(dist))

    def fsdp_parameter_groups(self, state: Any) -> list[Any]:
        """The parameter groups of one FSDP2 state."""
        return list(state._fsdp_param_groups)

    def drop_accumulated_gradient(self, parameter: Any) -> None:
        """Forget the gradient that an FSDPParam has accumulated unsharded; since 2.15 it is `_unsharded_param.grad`."""

    def reset_fsdp(self, root: Any) -> None:
        """Put an FSDP2 root module, and all below it, back to the state before a step.

        Raises:
            RuntimeError: `root` is not a root.
        """
        # A reduction that an aborted backward left open belongs to a root that is reset as well.
        root._get_fsdp_state()._comm_ctx.active_gradient_reduction = None
        # torch drops the sharded gradients of earlier backwards, too, which an abort elsewhere has not touched.
        states = root._get_fsdp_state()._state_ctx.all_states
        groups = [group for state in states for group in self.fsdp_parameter_groups(state)]
        parameters = [item.sharded_param for group in groups for item in group.fsdp_params]
        gradients = [parameter.grad for parameter in parameters]
        root.reset_iter_state()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient

    def reset_stage(self, stage: Any) -> None:
        """Forget what a pipeline stage held when its step was aborted."""
        if stage._gradient_reduction_handle is not None:  # `clear_runtime_states` would wait for it, in vain
            stage._gradient_reduction_handle = None
            stage.submod.set_manual_backward_finalization(False)
        stage.clear_runtime_states()
        # Their connections are closed, so that nothing writes to these buffers; torch would refuse another step.
        for received in (stage.args_recv_info, stage.grad_recv_info):
            for infos in received.values():
                for info in infos:
                    info.buffer = None

    def static_stages(self) -> AbstractContextManager[None]:
        """Within it a pipeline in a fake world takes the shapes that its stages were given.

        Since 2.14 torch does so by itself.
        """
        return contextlib.nullcontext()
