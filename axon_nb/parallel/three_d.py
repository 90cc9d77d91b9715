"""Meshes of ranks along named axes, and 3-D parallelism over one.

A model is split into stages, tensor parallelism is applied to their layers, and they are sharded over data ranks.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axon_nb.comm.collectives.movement import barrier, broadcast
from axon_nb.comm.collectives.reduction import all_reduce_mean
from axon_nb.comm.errors import WorldClosedError
from axon_nb.comm.group import ProcessGroup, rank_device, resolve
from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline import Pipeline, PipelineSchedule
from axon_nb.parallel.pipeline.pipeline import Loss
from axon_nb.parallel.pipeline.stages import Cost


def make_mesh(*, device: str | None = None, **axes: int) -> DeviceMesh:
    """Create a mesh of all ranks with these axes, the last one varying fastest. Collective.

    ``make_mesh(dp=2, tp=4)`` puts ranks 0-3 into one tensor-parallel group and 4-7 into the other.

    Args:
        device: ``cpu`` or ``cuda``; None: where the ranks compute.
        **axes: Size of each axis, in order; one may be -1 and gets the remaining ranks.

    Raises:
        UsageError: the product of the sizes is not the number of ranks.
        WorldClosedError: no world is initialized.
    """
    if not dist.is_initialized():
        raise WorldClosedError("No world is initialized: call `World.init()` first.")
    sizes = _resolve_sizes(axes, dist.get_world_size())
    return init_device_mesh(
        device or rank_device(resolve(None)).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
    )


def _resolve_sizes(axes: dict[str, int], world_size: int) -> dict[str, int]:
    if not axes:
        raise UsageError("A mesh needs at least one axis; make_mesh(dp=-1) puts all ranks on one.")
    for name, size in axes.items():
        if size != -1 and size < 1:
            raise UsageError(f"{name} must be at least 1, or -1 for the remaining ranks; got {size}.")
    open_axes = [name for name, size in axes.items() if size == -1]
    if len(open_axes) > 1:
        raise UsageError(f"Only one axis can be -1; got {' and '.join(open_axes)}.")
    product = math.prod(size for size in axes.values() if size != -1)
    shown = " x ".join(f"{name}={size}" for name, size in axes.items())
    if open_axes:
        if world_size % product:
            raise UsageError(
                f"{shown}: {world_size} ranks are not divisible by {product}, so {open_axes[0]} has no valid size."
            )
        return {name: world_size // product if size == -1 else size for name, size in axes.items()}
    if product != world_size:
        raise UsageError(f"{shown} needs {product} ranks, but the world has {world_size}; one axis may be -1.")
    return dict(axes)


def axis_group(mesh: DeviceMesh, axis: str) -> ProcessGroup:
    """Return the group of ranks that differ from this one only in their coordinate on `axis`.

    Raises:
        UsageError: the mesh has no such axis.
    """
    names = mesh.mesh_dim_names or ()
    if axis not in names:
        raise UsageError(f"The mesh has no axis {axis!r}; it has {', '.join(names) or 'no named axes'}.")
    return ProcessGroup.wrap(mesh.get_group(axis))


def coordinates(mesh: DeviceMesh) -> dict[str, int]:
    """Return this rank's coordinate on each axis.

    Raises:
        UsageError: this rank is not in the mesh.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError("This rank is not in the mesh.")
    return dict(zip(mesh.mesh_dim_names or (), coordinate, strict=True))


class Parallel3D(nn.Module):
    """Combines pipeline parallelism, FSDP2 and tensor parallelism for a model that is a sequence of blocks.

    ``Parallel3D(model, make_mesh(pp=2, dp=2, tp=2), tp_plan={"block*.up": ColwiseParallel(), …})``. Each rank holds its
    stages; their layers in the plan are sharded over `tp`, and everything is then sharded over `dp`. Ranks with the
    same coordinate on `dp` get the same samples. Create the optimizer afterwards, from `parameters()`.

    Args:
        model: A Sequential, built on every rank; parameters are copied from the first rank along dp and tp.
        mesh: A mesh with the axis `pp`, and optionally `dp` and `tp`; any of them may have size 1.
        tp_plan: torch's styles (`ColwiseParallel()`, `RowwiseParallel()` …) by module name in the whole model, where
            `*` matches any part of a name. Only with a `tp` axis.
        split: How to balance the stages; see `Pipeline.split`.
        at: Names of the children that start a new stage; replaces `split`.
        num_stages: Number of stages. None: one per rank of `pp`, or two if the schedule needs several.
        sample: Sample input, for split="time".
        num_microbatches: Microbatches per batch of a rank; None: as many as stages.
        schedule: Order of computation.
        loss: Mean loss of one microbatch; None: pass it to `step`.
        mixed_precision: dtype of parameters and activations in forward and backward, such as `torch.bfloat16`;
            gradients are averaged in float32. Needs a `dp` of 2 or more, as FSDP implements it.
        reshard_after_forward: Gather parameters again for every microbatch. False: gather once per step and keep them
            unsharded until its end.
        spans: Record a span for every action.

    Raises:
        UsageError: the mesh lacks an axis, a name of the plan matches nothing, or the model cannot be split like that.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        *,
        tp_plan: Mapping[str, Any] | None = None,
        split: Cost = "params",
        at: Sequence[str] | None = None,
        num_stages: int | None = None,
        sample: Any = None,
        num_microbatches: int | None = None,
        schedule: PipelineSchedule | str = PipelineSchedule.ONE_F_ONE_B,
        loss: Loss | None = None,
        mixed_precision: torch.dtype | None = None,
        reshard_after_forward: bool = False,
        spans: bool = True,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self._plan = dict(tp_plan or {})
        self._fsdp: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
        if mixed_precision is not None:
            if self._axis_size("dp") == 1:
                raise UsageError(
                    f"mixed_precision={mixed_precision} needs dp=2 or more, as FSDP implements it. Otherwise convert "
                    "the model, or use torch.autocast in its modules."
                )
            self._fsdp["mp_policy"] = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        _check(model, mesh, self._plan)
        self.pipeline = Pipeline.split(
            model,
            group=axis_group(mesh, "pp"),
            at=at,
            split=split,
            num_stages=num_stages,
            sample=sample,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss=loss,
            wrap=self._parallelize_stage,
            spans=spans,
        )

    def step(
        self, x: Any = None, target: Any = None, loss: Loss | None = None, **microbatches: Any
    ) -> torch.Tensor | None:
        """Run forward and backward on this rank's samples, like `Pipeline.step`, and average gradients over `dp`."""
        losses = self.pipeline.step(x, target, loss, **microbatches)
        if self._axis_size("tp") > 1:
            barrier(group=axis_group(self.mesh, "tp"))  # no rank goes on while one with the same stage can still fail
        return losses

    def forward(self, *args: Any) -> Any:
        """Compute the output for this rank's samples without gradients; None except on ranks with the last stage."""
        return self.pipeline(*args)

    def mean_loss(self, losses: torch.Tensor | None) -> float:
        """Average the losses that `step` returned over all samples of all ranks. Collective."""
        local = self.pipeline.mean_loss(losses)
        if self._axis_size("dp") == 1:
            return local
        device = next(self.pipeline.parameters()).device
        mean = torch.tensor(local, dtype=torch.float64, device=device)
        return float(all_reduce_mean(mean, group=axis_group(self.mesh, "dp")))

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip by the norm over the whole model, like `axon_nb.parallel.clip_grad_norm`. Collective."""
        return self.pipeline.clip_grad_norm(max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)

    def local_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a global batch, by its coordinate on `dp`.

        Raises:
            UsageError: the batch is not divisible by the size of `dp`.
        """
        parts = self._axis_size("dp")
        if len(batch) % parts:
            raise UsageError(f"The batch size must be divisible by dp ({parts}); got {len(batch)}.")
        return batch.chunk(parts)[self.mesh.get_local_rank("dp") if parts > 1 else 0]

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks together."""
        return self.pipeline.num_stages

    def stage_ranks(self) -> dict[int, int]:
        """Return the global rank of each stage, among the ranks with this one's coordinates on `dp` and `tp`."""
        return self.pipeline.stage_ranks()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by their names in the whole model."""
        return self.pipeline.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers by their names in the whole model."""
        return self.pipeline.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's stages as DTensors; `full_tensor()` of one is collective over its stage's ranks."""
        return self.pipeline.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the same layout, as returned by `state_dict`."""
        return self.pipeline.load_state_dict(state_dict, strict, assign)

    def _axis_size(self, axis: str) -> int:
        return _axis_size(self.mesh, axis)

    def _parallelize_stage(self, stage: nn.Module) -> nn.Module:
        """Apply tensor parallelism over `tp`, then FSDP over `dp`."""
        self._broadcast_to_replicas(stage)
        if self._axis_size("tp") > 1:
            self._apply_tp_plan(stage)
        if self._axis_size("dp") > 1:
            options = {**self._fsdp, "mesh": self.mesh["dp"]}
            for child in stage.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child, **options)
            fully_shard(stage, **options)
        return stage

    @torch.no_grad()
    def _broadcast_to_replicas(self, stage: nn.Module) -> None:
        for axis in ("dp", "tp"):
            if self._axis_size(axis) > 1:
                group = axis_group(self.mesh, axis)
                for tensor in (*stage.parameters(), *stage.buffers()):
                    broadcast(tensor, group=group)

    def _apply_tp_plan(self, stage: nn.Module) -> None:
        from torch.distributed.tensor.parallel import parallelize_module  # takes a second to import

        here = {key: style for key, style in self._plan.items() if _matching(stage, key)}
        if here:
            parallelize_module(stage, self.mesh["tp"], here)


def _axis_size(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def _check(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in ("pp", "dp", "tp")]
    if "pp" not in names or unknown:
        raise UsageError(
            "The mesh must have the axis pp, and optionally dp and tp, such as make_mesh(pp=2, dp=2, tp=2); it has "
            f"{', '.join(names) or 'no named axes'}."
        )
    if _axis_size(mesh, "tp") > 1 and not plan:
        raise UsageError(
            f"tp={_axis_size(mesh, 'tp')} needs tp_plan, the layers to shard, such as "
            "{'block*.up': ColwiseParallel(), 'block*.down': RowwiseParallel()}. Otherwise use dp instead."
        )
    absent = [key for key in plan if not _matching(model, key)]
    if absent:
        raise UsageError(f"tp_plan[{absent[0]!r}] matches no module of the model.")


def _matching(model: nn.Module, key: str) -> bool:
    """Whether `key` of a plan matches any module, compared part by part as torch does."""
    wanted = key.split(".")

    def fits(parts: list[str]) -> bool:
        return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))

    return any(fits(name.split(".")) for name, _ in model.named_modules() if name)
