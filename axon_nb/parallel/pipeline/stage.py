"""Pipeline stages as defined by the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend
from axon_nb.errors import UsageError

__all__ = ["PipelineStage", "check_no_shared_parameters", "stage_device"]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A module and its device: `Pipeline([PipelineStage(first, "cuda:0"), PipelineStage(second, "cuda:1")])`."""

    module: nn.Module | Callable[[], nn.Module]
    """The module, or a function without arguments that creates it; only called on the rank that holds the stage."""
    device: torch.device | str | None = None
    """None: where its parameters are."""

    def make(self) -> nn.Module:
        """Return the module, creating it if necessary."""
        return self.module if isinstance(self.module, nn.Module) else self.module()


def stage_device(given: torch.device | str | None, stage: nn.Module, group: ProcessGroup) -> torch.device:
    """Return a stage's device: the given one, or that of its parameters; with NCCL, this rank's GPU."""
    if given is not None:
        return torch.device(given)
    parameter = next(stage.parameters(), None)
    if group.backend is Backend.NCCL and (parameter is None or not parameter.is_cuda):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if parameter is None else parameter.device


def check_no_shared_parameters(stages: Sequence[PipelineStage]) -> None:
    """Check that no two stages share a parameter: each rank would train its own copy.

    Raises:
        UsageError: two stages share a parameter.
    """
    owner: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        if not isinstance(stage.module, nn.Module):
            continue
        for name, parameter in stage.module.named_parameters():
            first, first_name = owner.setdefault(id(parameter), (index, name))
            if first != index:
                raise UsageError(
                    f"{name} of stage {index} is also {first_name} of stage {first}. Stages cannot share parameters, "
                    "as each rank would train its own copy."
                )
