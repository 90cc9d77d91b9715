"""The stages of a pipeline, as they are given by the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from axon_nb.comm.group import ProcessGroup
from axon_nb.comm.kinds import Backend
from axon_nb.errors import UsageError

__all__ = ["PipelineStage", "check_apart", "device_of"]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """A module and where it computes: `Pipeline([PipelineStage(first, "cuda:0"), PipelineStage(second, "cuda:1")])`."""

    module: nn.Module | Callable[[], nn.Module]
    """The module, or a function without arguments that makes it; only the rank that holds the stage calls it."""
    device: torch.device | str | None = None
    """None: where its parameters are."""

    def make(self) -> nn.Module:
        """The module."""
        return self.module if isinstance(self.module, nn.Module) else self.module()


def device_of(given: torch.device | str | None, stage: nn.Module, group: ProcessGroup) -> torch.device:
    """Where a stage computes: as given, or where its parameters are; with NCCL, this rank's GPU."""
    if given is not None:
        return torch.device(given)
    parameter = next(stage.parameters(), None)
    if group.backend is Backend.NCCL and (parameter is None or not parameter.is_cuda):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if parameter is None else parameter.device


def check_apart(stages: Sequence[PipelineStage]) -> None:
    """Whether each parameter is in one stage only; in two it would be trained as two.

    Raises:
        UsageError: one is not.
    """
    owner: dict[int, tuple[int, str]] = {}
    for index, stage in enumerate(stages):
        if not isinstance(stage.module, nn.Module):
            continue
        for name, parameter in stage.module.named_parameters():
            first, first_name = owner.setdefault(id(parameter), (index, name))
            if first != index:
                raise UsageError(
                    f"{name} of stage {index} is {first_name} of stage {first}: each rank would train a copy of its "
                    "own, so stages have parameters of their own."
                )
