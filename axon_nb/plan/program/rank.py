"""Runs a program as one rank of a world without other ranks, on tensors without data."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from axon_nb.errors import UsageError
from axon_nb.plan.errors import PlanError
from axon_nb.plan.footprint.fake_world import GLOO_COPIES, NO_VALUES, fake_tensors, fake_world
from axon_nb.plan.hardware.rates import Rates
from axon_nb.plan.program.environment import set_variables
from axon_nb.plan.program.record import RankRecord
from axon_nb.plan.program.recorder import ProgramLog
from axon_nb.plan.program.streams import Recording
from axon_nb.plan.tracing.fake_tensors import WithoutCuda, is_cuda, without_tracebacks
from axon_nb.records.stacks import library_of

_NO_SHAPES = "PipeliningMetadataError"


@dataclass(frozen=True)
class Program:
    """What to run."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    is_gpu: bool
    """Whether ranks are GPUs; False: CPU ranks with Gloo."""
    ranks_per_host: int
    rates: Rates | None
    memory: float | None
    """Bytes of memory per rank; None: unlimited."""
    item: float | None
    """What tensors answer when their value is read; None: reading raises."""


class _OnDevice(WithoutCuda):
    """Moves to CUDA are ignored, except from the meta device: there, memory is allocated."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if is_cuda(kwargs.get("device")) and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            kwargs["device"] = "cpu"
        return super().__torch_function__(func, types, args, kwargs)


def run_rank(program: Program, recording: Recording, rank: int) -> RankRecord:
    """Run the program as one rank.

    Args:
        program: The program.
        recording: The recording of `on_fake_rank`, inside of which this is called.
        rank: The rank in its world.

    Raises:
        PlanError: it failed, or needs a value; the message names the line.
    """
    size = program.world_size
    copying = None if program.is_gpu else GLOO_COPIES
    log = ProgramLog(program.rates, copying, program.item, rank=rank, pipeline_steps=recording.pipeline_steps)
    set_variables(rank, size, program.ranks_per_host)
    with (
        fake_world(rank, size),
        without_tracebacks(),
        fake_tensors(),
        log,
        _OnDevice(),
    ):
        recording.log = log
        try:
            held = program.function(*program.args)  # what it returns stays allocated until the end
        except Exception as error:
            raise PlanError(_explained(error, rank)) from error
        finally:
            recording.log = None
        record = log.finish(program.memory)
        del held
    return record


def _explained(error: BaseException, rank: int) -> str:
    place = _place_of(error.__traceback__)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NO_VALUES):
            return (
                f"{place} reads a tensor's value ({_question(cause)}), but a plan's tensors have none: give item=, the "
                "number that .item() answers, or leave the line out of the plan."
            )
        if type(cause).__name__ == _NO_SHAPES:
            return (
                f"{place}: a PipelineStage does not know its shapes, which a plan's ranks cannot exchange: give it "
                "input_args= and output_args=."
            )
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, UsageError):
        return f"{place}, rank {rank}: {error}"
    return f"{place} failed on rank {rank}: {type(error).__name__}: {error}"


def _question(error: BaseException) -> str:
    name = str(error.args[0]) if error.args else type(error).__name__
    return ".item()" if "_local_scalar_dense" in name else name.removesuffix(".default")


def _place_of(trace: TracebackType | None) -> str:
    frames = [frame for frame in traceback.extract_tb(trace) if not library_of(frame.filename)]
    return f"Line {frames[-1].lineno} of {frames[-1].filename}" if frames else "The program"
