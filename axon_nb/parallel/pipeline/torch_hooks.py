"""Private hooks into torch's pipelines: recording their actions and reading their order.

Written for torch 2.11.0, 2.12.0 and 2.13.0. The register lists them as `parallel.pipeline_spans`; if a torch version
lacks one, pipelines still train, but record no spans.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from axon_nb.comm.device_clock import device_clock
from axon_nb.comm.spans import now
from axon_nb.errors import UsageError
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of_rank
from axon_nb.records.spans import Span, emit, suppress_spans

_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_MESSAGES = {
    "get_fwd_recv_ops": "RECV_F",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_bwd_send_ops": "SEND_B",
}
_FUNCTIONS = ("_batch_p2p", "_wait_batch_p2p")


def _schedules() -> ModuleType:
    from torch.distributed.pipelining import schedules

    return schedules


def schedule_class(schedule: PipelineSchedule) -> Any:
    """Return torch's class of a schedule."""
    return _schedules().get_schedule_class(schedule.value)


def is_prepared(schedule: Any, otherwise: bool) -> bool:
    """Whether the stages have negotiated shapes; otherwise their next step first runs one microbatch to do so.

    Args:
        schedule: torch's schedule.
        otherwise: The answer if this torch does not say.
    """
    names = ("_stage_forward_initialized", "_stages_forward_initialized")
    flags = [getattr(schedule, name) for name in names if hasattr(schedule, name)]
    return any(flags) if flags else otherwise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress torch's log of the whole schedule on every rank when a stage raises: the error itself is enough."""
    logger = logging.getLogger(_schedules().__name__)
    logger.addFilter(_below_error)
    try:
        yield
    finally:
        logger.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


class StageWatch:
    """Records the actions of one of torch's stages as spans, and counts its live microbatches.

    A microbatch is live from the start of its forward to the end of its backward, or of the weight part of it.

    Args:
        stage: torch's stage; its methods are wrapped.
        rank: This rank, in the default group.
        group: Name of the pipeline's group.
    """

    def __init__(self, stage: Any, *, rank: int, group: str) -> None:
        self.peak = 0
        """Peak number of live microbatches since it was last set to 0."""
        self._live = self._step = 0
        self._identity = (rank, group, stage.stage_index)
        self._device = torch.device(stage.device)
        # Partials of methods pickle with the stage, as `config protect` needs; closures bring all that they refer to.
        for name in _METHODS:
            setattr(stage, name, functools.partial(self._compute, stage, name))
        for name in _MESSAGES:
            setattr(stage, name, functools.partial(self._label_messages, stage, name))

    def begin_step(self, step: int) -> None:
        """Reset the counts for a new step; an aborted step leaves nothing behind.

        Args:
            step: Start of the step on this rank, in nanoseconds; identifies its actions.
        """
        _watch_messages()  # here, as a new process gets stages that another one made
        self._step = step
        self._live = self.peak = 0

    def _compute(self, stage: Any, name: str, chunk: int, *args: Any, **kwargs: Any) -> Any:
        forward, weights = name == "forward_one_chunk", name == "backward_weight_one_chunk"
        full_backward = weights or kwargs.get("full_backward", True)
        if forward:
            self._live += 1
            self.peak = max(self.peak, self._live)
        start = device_clock.moment(self._device)
        with suppress_spans("forward", "backward"):
            result = getattr(type(stage), name)(stage, chunk, *args, **kwargs)
        kind = "forward" if forward else "backward"
        action = "F" if forward else "W" if weights else "B" if full_backward else "I"
        rank, group, index = self._identity
        device_clock.emit(Span(rank, kind, action, start.ns, now(), group, 0, index, chunk, self._step), start)
        if full_backward and not forward:
            self._live -= 1
        return result

    def _label_messages(self, stage: Any, name: str, chunk: int) -> Any:
        ops = getattr(type(stage), name)(stage, chunk)
        for op in ops:
            op.axon_nb = (*self._identity, _MESSAGES[name], chunk, op.tensor.nbytes)
        return ops


class _LabelledWorks(list[Any]):
    """A list of pending communications that also describes each message."""

    messages: list[tuple[int, str, int, str, int, int]]


@functools.cache
def _watch_messages() -> None:
    """Record from now on the waits for stages' messages."""
    schedules = _schedules()
    start_batch, wait = (getattr(schedules, name) for name in _FUNCTIONS)

    @functools.wraps(start_batch)
    def watched_start(ops: list[Any], *args: Any, **kwargs: Any) -> Any:
        works = start_batch(ops, *args, **kwargs)
        messages = [op.axon_nb for op in ops if hasattr(op, "axon_nb")]
        if not messages:
            return works
        labelled = _LabelledWorks(works)
        labelled.messages = messages
        return labelled

    @functools.wraps(wait)
    def watched_wait(works: list[Any]) -> None:
        if not isinstance(works, _LabelledWorks):
            wait(works)
            return
        one_by_one = len(works) == len(works.messages)  # NCCL returns one work for several messages
        start = now()
        if not one_by_one:
            wait(works)
        for number, (rank, group, stage, action, chunk, size) in enumerate(works.messages):
            if one_by_one:
                start = now()
                with suppress_spans("wait"):
                    works[number].wait()
            emit(Span(rank, "p2p", action, start, now(), group, size, stage, chunk))

    schedules._batch_p2p, schedules._wait_batch_p2p = watched_start, watched_wait  # type: ignore[attr-defined]


class _StageStub:
    """Stands in for a stage when a schedule computes its order."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size = 0, num_ranks
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}


def actions(
    schedule: PipelineSchedule, *, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[tuple[str, int, int]]]:
    """Return what each rank computes, in torch's order: (F, B, I or W; stage; microbatch).

    I is the input part of a backward, W the weight part, B both.

    Raises:
        UsageError: this torch does not provide the order.
    """
    if not schedule.has_many_stages:
        return [_one_stage_actions(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    stubs = [
        _StageStub(index, num_stages, num_ranks)
        for index in stages_of_rank(schedule, 0, num_ranks=num_ranks, num_stages=num_stages)
    ]
    try:
        # Skip the messages and ZB1P's idle slots: they take torch most of the time and are not needed here.
        overrides = {
            "_prepare_schedule_with_comms": lambda *_, **__: None,
            "_add_bubbles_to_actions": lambda self, *_: self.pipeline_order,
        }
        orders = type("Order", (schedule_class(schedule),), overrides)(stubs, num_microbatches).pipeline_order
        return [[item for action in orders[rank] for item in _computations(action)] for rank in range(num_ranks)]
    except (AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"This torch does not provide the order of {schedule.value}: {error!r}.") from error


def _one_stage_actions(
    schedule: PipelineSchedule, rank: int, num_ranks: int, num_microbatches: int
) -> list[tuple[str, int, int]]:
    """Return the order of GPipe or 1F1B; the one in torch 2.13 for 1F1B lacks a forward of the last rank."""
    ahead = num_microbatches if schedule is PipelineSchedule.GPIPE else min(num_microbatches, num_ranks - rank)
    order = [("F", rank, number) for number in range(ahead)]
    for number in range(num_microbatches):
        order.append(("B", rank, number))
        if ahead + number < num_microbatches:
            order.append(("F", rank, ahead + number))
    return order


def _computations(action: Any) -> list[tuple[str, int, int]]:
    if action is None:
        return []
    parts = action.sub_actions or (action,)
    computations = [(str(part.computation_type.value), part.stage_index, part.microbatch_index) for part in parts]
    return [item for item in computations if item[0] in ("F", "B", "I", "W")]
