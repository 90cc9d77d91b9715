"""3-D parallelism: a model cut into stages, each stage's layers cut over ranks, and what is left sharded over data."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axon_nb.comm.errors import CommError
from axon_nb.comm.move import broadcast
from axon_nb.comm.reduce import all_reduce_mean
from axon_nb.parallel.mesh import axis_group
from axon_nb.parallel.pipeline import Pipeline, PipelineSchedule
from axon_nb.parallel.pipeline.pipeline import Loss
from axon_nb.parallel.pipeline.split import Cost

__all__ = ["Parallel3D"]


class Parallel3D(nn.Module):
    """Pipeline x FSDP2 x tensor parallelism of a model that is a sequence of blocks.

    ``Parallel3D(model, make_mesh(pp=2, dp=2, tp=2), tp_plan={"block*.up": ColwiseParallel(), …})``. Each rank holds, of
    its stages, its part over `tp` of the layers in the plan, and of all that its shard over `dp`. Ranks with the same
    place on `dp` are given the same samples. Make the optimizer afterwards, from `parameters()`.

    Args:
        model: A Sequential, built on every rank; the parameters of the first rank along dp and tp are sent to the
            others of its stages.
        mesh: With the axis `pp`, and `dp` and `tp` where wanted; any of them may be of size 1.
        tp_plan: torch's styles (`ColwiseParallel()`, `RowwiseParallel()` …) by the name of a module in the whole model,
            where `*` stands for any part of a name. Only with an axis `tp`.
        split: How stages are balanced, as in `Pipeline.split`.
        at: Children that begin a new stage, instead of `split`.
        num_stages: None: one a rank of `pp`, or two where the schedule has several.
        sample: For split="time".
        num_microbatches: Parts of a rank's batch; None: as many as stages.
        schedule: In which order ranks compute.
        loss: Mean loss of one microbatch; None: `step` is given it.
        mixed_precision: dtype of parameters and activations in forward and backward, such as `torch.bfloat16`;
            gradients are averaged in float32. It comes with sharding, so it needs a `dp` of 2 or more.
        reshard_after_forward: Gather parameters for every microbatch anew; False: once a step, and keep them whole
            until its end.
        spans: Record every action.

    Raises:
        CommError: an axis or a name of the plan is not there, or the model cannot be cut so.
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
            if self._size("dp") == 1:
                raise CommError(
                    f"mixed_precision={mixed_precision} without a dp of 2 or more: it comes with FSDP; in one copy of "
                    "the model, convert it, or use torch.autocast in its modules."
                )
            self._fsdp["mp_policy"] = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=torch.float32)
        _check(model, mesh, self._plan)
        self.pipeline = Pipeline.split(
            model,
            axis_group(mesh, "pp"),
            at=at,
            split=split,
            num_stages=num_stages,
            sample=sample,
            num_microbatches=num_microbatches,
            schedule=schedule,
            loss=loss,
            wrap=self._take_apart,
            spans=spans,
        )

    def step(self, x: Any = None, target: Any = None, loss: Loss | None = None) -> torch.Tensor | None:
        """Forward and backward of this rank's samples, as `Pipeline.step`; gradients are averaged over `dp`."""
        return self.pipeline.step(x, target, loss)

    def forward(self, *args: Any) -> Any:
        """The output for this rank's samples on the ranks with the last stage, without gradients; None elsewhere."""
        return self.pipeline(*args)

    def mean_loss(self, losses: torch.Tensor | None) -> float:
        """The mean of what `step` returned over all samples of all ranks, on every rank; collective."""
        own = self.pipeline.mean_loss(losses)
        if self._size("dp") == 1:
            return own
        device = next(self.pipeline.parameters()).device
        mean = torch.tensor(own, dtype=torch.float64, device=device)
        return float(all_reduce_mean(mean, group=axis_group(self.mesh, "dp")))

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip by the norm over the whole model; as `axon_nb.parallel.clip_grad_norm`, collective."""
        return self.pipeline.clip_grad_norm(max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite)

    def own_samples(self, batch: torch.Tensor) -> torch.Tensor:
        """This rank's part of a batch that all ranks have, by its place on `dp`.

        Raises:
            CommError: it cannot be cut evenly.
        """
        parts = self._size("dp")
        if len(batch) % parts:
            raise CommError(
                f"a batch of {len(batch)} samples over dp={parts}: {len(batch)} / {parts} = {len(batch) / parts:g} is "
                "no whole number."
            )
        return batch.chunk(parts)[self.mesh.get_local_rank("dp") if parts > 1 else 0]

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.pipeline.num_stages

    def stage_ranks(self) -> dict[int, int]:
        """The global rank that holds each stage, among those with this rank's place on `dp` and `tp`."""
        return self.pipeline.stage_ranks()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, under their names in the whole model."""
        return self.pipeline.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers, under their names in the whole model."""
        return self.pipeline.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """This rank's stages, as distributed tensors; `full_tensor()` of one is a collective of its stage's ranks."""
        return self.pipeline.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the same layout, as `state_dict` gives it."""
        return self.pipeline.load_state_dict(state_dict, strict, assign)

    def _size(self, axis: str) -> int:
        return _size(self.mesh, axis)

    def _take_apart(self, stage: nn.Module) -> nn.Module:
        """Cut a stage over `tp`, then shard it over `dp`."""
        self._send_to_copies(stage)
        if self._size("tp") > 1:
            self._parallelize(stage)
        if self._size("dp") > 1:
            options = {**self._fsdp, "mesh": self.mesh["dp"]}
            for child in stage.children():
                if any(True for _ in child.parameters()):
                    fully_shard(child, **options)
            fully_shard(stage, **options)
        return stage

    @torch.no_grad()
    def _send_to_copies(self, stage: nn.Module) -> None:
        for axis in ("dp", "tp"):
            if self._size(axis) > 1:
                group = axis_group(self.mesh, axis)
                for tensor in (*stage.parameters(), *stage.buffers()):
                    broadcast(tensor, group=group)

    def _parallelize(self, stage: nn.Module) -> None:
        from torch.distributed.tensor.parallel import parallelize_module  # takes a second to import

        here = {key: style for key, style in self._plan.items() if _matching(stage, key)}
        if here:
            parallelize_module(stage, self.mesh["tp"], here)


def _size(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def _check(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in ("pp", "dp", "tp")]
    if "pp" not in names or unknown:
        raise CommError(
            f"the mesh has the axes {', '.join(names) or '(none with a name)'}: it has pp, and dp and tp where wanted, "
            "as make_mesh(pp=2, dp=2, tp=2)."
        )
    if _size(mesh, "tp") > 1 and not plan:
        raise CommError(
            f"tp={_size(mesh, 'tp')} without tp_plan: say which layers are cut and how, such as "
            "{'block*.up': ColwiseParallel(), 'block*.down': RowwiseParallel()}, or take dp instead."
        )
    lost = [key for key in plan if not _matching(model, key)]
    if lost:
        raise CommError(f"tp_plan[{lost[0]!r}]: no module of the model has a name like that.")


def _matching(model: nn.Module, key: str) -> bool:
    """Whether a key of a plan means any module, as torch reads it: part by part of the name."""
    wanted = key.split(".")

    def fits(parts: list[str]) -> bool:
        return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))

    return any(fits(name.split(".")) for name, _ in model.named_modules() if name)
