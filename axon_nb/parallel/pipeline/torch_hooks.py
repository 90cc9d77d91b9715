"""What is private of torch's pipelines, all of it: watching their actions, and reading their orders.

Read from the sources of torch 2.11.0, 2.12.0 and 2.13.0. `missing()` names what a torch does not have; a pipeline
then trains as ever and records no spans.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from axon_nb.comm.errors import CommError
from axon_nb.comm.spans import now
from axon_nb.parallel.pipeline.schedule import PipelineSchedule, stages_of
from axon_nb.records.span import Span
from axon_nb.records.trace import emit, suppress_spans

__all__ = ["StageWatch", "actions", "is_prepared", "missing", "quiet", "schedule_class"]

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


def missing() -> list[str]:
    """Names of the hooks that this torch does not have."""
    from torch.distributed.pipelining import PipelineStage

    names = [f"schedules.{name}" for name in _FUNCTIONS if not hasattr(_schedules(), name)]
    return names + [f"PipelineStage.{name}" for name in (*_METHODS, *_MESSAGES) if not hasattr(PipelineStage, name)]


def schedule_class(schedule: PipelineSchedule) -> Any:
    """The class of a schedule."""
    return _schedules().get_schedule_class(schedule.value)


def is_prepared(schedule: Any, otherwise: bool) -> bool:
    """Whether the stages have agreed on shapes; they run one microbatch for that in their next step otherwise.

    Args:
        schedule: torch's.
        otherwise: The answer where this torch does not tell.
    """
    names = ("_stage_forward_initialized", "_stages_forward_initialized")
    told = [getattr(schedule, name) for name in names if hasattr(schedule, name)]
    return any(told) if told else otherwise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it torch does not log the whole schedule, on every rank, when a stage raises: the error itself says it."""
    logger = logging.getLogger(_schedules().__name__)
    logger.addFilter(_below_error)
    try:
        yield
    finally:
        logger.removeFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


class StageWatch:
    """Records what one of torch's stages does as spans, and how many microbatches are live in it.

    A microbatch is live from the beginning of its forward to the end of its backward, or of its part for weights.
    On GPUs times are those of the host, which launches work and runs ahead of it.

    Args:
        stage: torch's stage; from now on it is watched.
        rank: This rank, in the default group.
        group: Name of the pipeline's group.
    """

    def __init__(self, stage: Any, *, rank: int, group: str) -> None:
        self.peak = 0
        """Most live microbatches since it was last set to 0."""
        self._live = self._step = 0
        self._place = (rank, group, stage.stage_index)
        for name in _METHODS:
            setattr(stage, name, self._computing(name, getattr(stage, name)))
        for name, action in _MESSAGES.items():
            setattr(stage, name, self._moving(action, getattr(stage, name)))
        _watch_messages()

    def begin_step(self, step: int) -> None:
        """Nothing is live: a step that was aborted leaves nothing behind.

        Args:
            step: When this rank began it, in nanoseconds: its actions are known by that.
        """
        self._step = step
        self._live = self.peak = 0

    def _computing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        rank, group, stage = self._place
        forward, weights = name == "forward_one_chunk", name == "backward_weight_one_chunk"

        @functools.wraps(call)
        def watched(chunk: int, *args: Any, **kwargs: Any) -> Any:
            whole = weights or kwargs.get("full_backward", True)
            if forward:
                self._live += 1
                self.peak = max(self.peak, self._live)
            start = now()
            with suppress_spans("forward", "backward"):
                result = call(chunk, *args, **kwargs)
            kind, action = ("forward", "F") if forward else ("backward", "W" if weights else "B" if whole else "I")
            emit(Span(rank, kind, action, start, now(), group, 0, stage, chunk, self._step))
            if whole and not forward:
                self._live -= 1
            return result

        return watched

    def _moving(self, action: str, call: Callable[..., Any]) -> Callable[..., Any]:
        place = self._place

        @functools.wraps(call)
        def watched(chunk: int) -> Any:
            ops = call(chunk)
            for op in ops:
                op.axon_nb = (*place, action, chunk, op.tensor.nbytes)
            return ops

        return watched


class _Works(list[Any]):
    """Communications that have begun, and what each is."""

    messages: list[tuple[int, str, int, str, int, int]]


@functools.cache
def _watch_messages() -> None:
    """From now on waiting for a stage's messages is recorded."""
    schedules = _schedules()
    begin, wait = (getattr(schedules, name) for name in _FUNCTIONS)

    @functools.wraps(begin)
    def watched_begin(ops: list[Any], *args: Any, **kwargs: Any) -> Any:
        works = begin(ops, *args, **kwargs)
        messages = [op.axon_nb for op in ops if hasattr(op, "axon_nb")]
        if not messages:
            return works
        named = _Works(works)
        named.messages = messages
        return named

    @functools.wraps(wait)
    def watched_wait(works: list[Any]) -> None:
        if not isinstance(works, _Works):
            wait(works)
            return
        one_by_one = len(works) == len(works.messages)  # NCCL makes one work of several messages
        start = now()
        if not one_by_one:
            wait(works)
        for number, (rank, group, stage, action, chunk, size) in enumerate(works.messages):
            if one_by_one:
                start = now()
                with suppress_spans("wait"):
                    works[number].wait()
            emit(Span(rank, "p2p", action, start, now(), group, size, stage, chunk))

    schedules._batch_p2p, schedules._wait_batch_p2p = watched_begin, watched_wait  # type: ignore[attr-defined]


class _Place:
    """What a schedule asks of a stage to work out its order."""

    def __init__(self, index: int, num_stages: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size = 0, num_ranks
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}


def actions(
    schedule: PipelineSchedule, *, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[tuple[str, int, int]]]:
    """What each rank computes, in torch's order: (F, B, I or W; stage; microbatch).

    I is the part of a backward for the inputs, W the part for the weights, B both.

    Raises:
        CommError: this torch does not tell.
    """
    if not schedule.has_many_stages:
        return [_one_stage_actions(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    places = [
        _Place(index, num_stages, num_ranks)
        for index in stages_of(schedule, 0, num_ranks=num_ranks, num_stages=num_stages)
    ]
    try:
        # Without the messages between them, and the idle places of ZB1P, which take torch most of the time and are not
        # asked for.
        unsent = {
            "_prepare_schedule_with_comms": lambda *_, **__: None,
            "_add_bubbles_to_actions": lambda self, *_: self.pipeline_order,
        }
        orders = type("Order", (schedule_class(schedule),), unsent)(places, num_microbatches).pipeline_order
        return [[item for action in orders[rank] for item in _computations(action)] for rank in range(num_ranks)]
    except (AttributeError, KeyError, TypeError) as error:
        raise CommError(f"this torch does not tell the order of {schedule.value}: {error!r}.") from error


def _one_stage_actions(
    schedule: PipelineSchedule, rank: int, num_ranks: int, num_microbatches: int
) -> list[tuple[str, int, int]]:
    """As GPipe and 1F1B run; what torch 2.13 has as the order of 1F1B leaves out a forward of the last rank."""
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
    found = [(str(part.computation_type.value), part.stage_index, part.microbatch_index) for part in parts]
    return [item for item in found if item[0] in ("F", "B", "I", "W")]
