"""What the ranks of our pipelines tell each other: whether all can go on, and the tensors between stages.

A fake rank hears nothing. Rank 0 runs first and has the first stage, so it knows the inputs: it finds all tensors
between stages by passing one microbatch through copies of them, unrecorded. The other ranks get what it found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule

from axon_nb.comm.collectives.direct import all_gather_single
from axon_nb.comm.group import ProcessGroup
from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline import batch
from axon_nb.parallel.pipeline.held_stages import HeldStages
from axon_nb.parallel.pipeline.pipeline import Pipeline
from axon_nb.plan.program.record import Boundary, PipelineStep, TensorFact
from axon_nb.plan.program.streams import Recording

_Swap = Callable[[Any, str, Any], None]


class PipelineAnswers:
    """Answers what our pipelines ask other ranks.

    Args:
        recording: Of the running rank.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._stages: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
        """All stages of a pipeline, before any is wrapped."""
        self._boundaries: tuple[Boundary, ...] | None = None
        """Of the pipeline whose step runs."""

    def install(self, swap: _Swap, swap_everywhere: Callable[[Any, Any], None]) -> None:
        """Replace what asks other ranks.

        Args:
            swap: Sets an attribute until the plan ends.
            swap_everywhere: Replaces a function under its name in all modules.
        """
        hold, step, make = HeldStages.__init__, Pipeline.step, Pipeline._make_runner

        def held(pipe: Any, stages: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            with self._recording.current.paused():
                kept = [
                    copy.deepcopy(stage.module) if isinstance(stage.module, nn.Module) else stage.module
                    for stage in stages
                ]
            hold(pipe, stages, *args, **kwargs)
            self._stages[pipe] = kept

        def stepped(pipe: Any, x: Any = None, target: Any = None, loss: Any = None) -> Any:
            self._boundaries = self._found(pipe, x)
            return step(pipe, x, target, loss)

        def made(pipe: Any) -> Any:
            plain = pipelining.PipelineStage
            pipelining.PipelineStage = self._stage_maker(plain)  # type: ignore[misc, assignment]
            try:
                return make(pipe)
            finally:
                pipelining.PipelineStage = plain  # type: ignore[misc]

        swap(HeldStages, "__init__", held)
        swap(Pipeline, "step", stepped)
        swap(Pipeline, "_make_runner", made)
        swap_everywhere(batch.agree, self._agree)

    def _found(self, pipe: Any, x: Any) -> tuple[Boundary, ...] | None:
        """The tensors of one microbatch between stages, those of the model's input first."""
        log = self._recording.current
        if log.rank:
            return log.pipeline_step.boundaries
        if not (pipe.is_first and isinstance(batch.as_args(x)[0], torch.Tensor)):
            return None
        value = tuple(arg[: max(1, len(arg) // pipe.num_microbatches)] for arg in batch.as_args(x))
        found = [tuple(map(_fact, value))]
        dtype = _output_dtype(pipe)
        with log.paused(), torch.enable_grad():
            for stage in self._stages[pipe]:
                output = (stage if isinstance(stage, nn.Module) else stage())(*value)
                parts = tuple(output) if isinstance(output, (tuple, list)) else (output,)
                value = tuple(one.to(dtype) if dtype and one.is_floating_point() else one for one in parts)
                found.append(tuple(map(_fact, value)))
        return tuple(found)

    def _stage_maker(self, plain: Any) -> Callable[..., Any]:
        def stage(module: nn.Module, index: int, *args: Any, **kwargs: Any) -> Any:
            if self._boundaries is not None:
                given, made = (tuple(map(_meta, facts)) for facts in self._boundaries[index : index + 2])
                kwargs |= {"input_args": given, "output_args": made}
            return plain(module, index, *args, **kwargs)

        return stage

    def _agree(self, group: ProcessGroup, problem: str | None, *numbers: int) -> list[list[int]]:
        """As `agree`, with the other ranks' numbers as far as they matter: all have equally many samples."""
        if problem is not None:
            raise UsageError(f"{problem} (on rank {group.ranks[group.rank()]}).")
        own = torch.empty(1 + len(numbers), dtype=torch.int64)
        all_gather_single(own.new_empty(group.size() * len(own)), own, group=group.torch_group)
        log = self._recording.current
        changed, *rows = numbers
        if log.rank:
            changed = int(bool(changed) or log.pipeline_step.is_changed)
        log.end_agreement(PipelineStep(bool(changed), self._boundaries))
        return [[changed, *(count or max(rows, default=0) for count in rows)]] * group.size()


def _output_dtype(pipe: Pipeline) -> torch.dtype | None:
    """The dtype of what stages return, if FSDP changes it."""
    for module in pipe.modules():
        if isinstance(module, FSDPModule):
            policy: Any = module._get_fsdp_state()._mp_policy
            found: torch.dtype | None = policy.output_dtype or policy.param_dtype
            return found
    return None


def _fact(tensor: torch.Tensor) -> TensorFact:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad


def _meta(fact: TensorFact) -> torch.Tensor:
    shape, dtype, requires_grad = fact
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta", requires_grad=requires_grad)
