"""The stages that one rank of a pipeline holds, under their names in the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from axon_nb.comm.group import ProcessGroup
from axon_nb.errors import UsageError
from axon_nb.parallel.clip import clip_grad_norm
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of_rank
from axon_nb.parallel.pipeline.stages import PipelineStage, Section, stage_device


class HeldStages(nn.Module):
    """Holds this rank's stages; the others are dropped.

    Args:
        stages: All stages, in order.
        group: The ranks of the pipeline.
        schedule: Determines which stages a rank holds.
        device: Device of stages that specify none.
        wrap: Called with each of this rank's stages; returns the module that computes.

    Raises:
        UsageError: a stage is in DDP, and the schedule computes its gradients without DDP's hooks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        group: ProcessGroup,
        schedule: PipelineSchedule,
        *,
        device: torch.device | str | None,
        wrap: Callable[[nn.Module], nn.Module] | None,
    ) -> None:
        super().__init__()
        self._group = group
        self.schedule = schedule
        self.num_stages = len(stages)
        self.module = nn.Module()
        """This rank's part of the model."""
        self._devices: dict[int, torch.device] = {}
        self._stage_modules: dict[int, nn.Module] = {}
        for index in self._stages_on(group.rank()):
            stage = stages[index].make()
            self._devices[index] = stage_device(stages[index].device or device, stage, group)
            stage.to(self._devices[index])
            for name, child in stage.named_children() if isinstance(stage, Section) else [(str(index), stage)]:
                self.module.add_module(name, child)
            self._stage_modules[index] = stage if wrap is None else wrap(stage)
            if schedule.splits_backward and isinstance(self._stage_modules[index], DistributedDataParallel):
                raise UsageError(
                    f"{schedule.value} computes weight gradients without the hooks in which DDP averages; use "
                    "fully_shard instead of DDP, or a schedule with undivided backwards, such as Interleaved1F1B."
                )

    @property
    def group(self) -> ProcessGroup:
        """The ranks of the pipeline."""
        return self._group

    @property
    def stage_indices(self) -> tuple[int, ...]:
        """Indices of this rank's stages."""
        return tuple(self._stage_modules)

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, and needs the inputs."""
        return 0 in self._stage_modules

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and needs the targets."""
        return self.num_stages - 1 in self._stage_modules

    @property
    def last_rank(self) -> int:
        """The group rank with the last stage; rank 0 if the stages form a V."""
        return self._rank_of(self.num_stages - 1)

    def stage_ranks(self) -> dict[int, int]:
        """Return the global rank of each stage."""
        return {stage: self._group.ranks[self._rank_of(stage)] for stage in range(self.num_stages)}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters by their names in the whole model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers by their names in the whole model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return this rank's part of the whole model's state."""
        state: dict[str, Any] = self.module.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a state, which may be that of the whole model."""
        expected = self.module.state_dict()
        part = {name: value for name, value in state_dict.items() if name in expected}
        return self.module.load_state_dict(part, strict=strict, assign=assign)

    def clip_grad_norm(self, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Clip by the norm over the gradients of all stages, like `axon_nb.parallel.clip_grad_norm`. Collective."""
        return clip_grad_norm(
            self.module,
            max_norm,
            norm_type=norm_type,
            groups=self._group,
            error_if_nonfinite=error_if_nonfinite,
        )

    def _stages_on(self, rank: int) -> list[int]:
        return stages_of_rank(self.schedule, rank, num_ranks=self._group.size(), num_stages=self.num_stages)

    def _rank_of(self, stage: int) -> int:
        return next(rank for rank in range(self._group.size()) if stage in self._stages_on(rank))
