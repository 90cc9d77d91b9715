"""Pipeline schedules: order of computation, stages per rank, live microbatches, ideal timeline; and torch's actions.

Private hooks into torch's pipelines record their actions and read their order. Written for torch 2.11.0, 2.12.0 and
2.13.0. The register lists them as `parallel.pipeline_spans`; if a torch version lacks one, pipelines still train, but
record no spans.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from axon_nb.comm.spans import device_clock, now
from axon_nb.errors import UsageError
from axon_nb.records.spans import Span, emit, suppress_spans
from axon_nb.records.training.steps import Order, play
from axon_nb.torch_api import torch_api

_METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
_MESSAGES = {
    "get_fwd_recv_ops": "RECV_F",
    "get_fwd_send_ops": "SEND_F",
    "get_bwd_recv_ops": "RECV_B",
    "get_bwd_send_ops": "SEND_B",
}
_FUNCTIONS = ("_batch_p2p", "_wait_batch_p2p")
_OF_SHARDS = re.compile(r"PP:(\d+)(UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)")
"""What torch calls the actions of stages with FSDP2 that gather parameters, free them, and reduce gradients."""


class PipelineSchedule(enum.Enum):
    """Order of forwards and backwards, as implemented by torch."""

    GPIPE = "GPipe"
    """All forwards, then all backwards (Huang et al., 2019)."""
    ONE_F_ONE_B = "1F1B"
    """Each backward as early as possible, so few activations are kept (Narayanan et al., PipeDream-Flush, 2021)."""
    INTERLEAVED_1F1B = "Interleaved1F1B"
    """1F1B with several stages per rank: smaller bubble, more messages (Narayanan et al., Megatron-LM, 2021)."""
    LOOPED_BFS = "LoopedBFS"
    """Several stages per rank; all microbatches through one stage before the next (Lamy-Poirier, 2022)."""
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    """Several stages per rank; weight gradients are deferred into the bubble (Qi et al., ZB1P, 2023)."""
    ZBV_ZERO_BUBBLE = "ZBVZeroBubble"
    """Two stages per rank in a V, down and up again; weight gradients deferred (Qi et al., ZB-V, 2023)."""
    DUAL_PIPE_V = "DualPipeV"
    """Two stages per rank in a V, forwards and backwards of different microbatches paired (DeepSeek-V3, 2024)."""

    @classmethod
    def of(cls, value: PipelineSchedule | str) -> PipelineSchedule:
        """Return the schedule itself, or the one with this name in any case.

        Raises:
            UsageError: no schedule has this name.
        """
        if isinstance(value, cls):
            return value
        wanted = str(value).lower().replace("_", "").replace("-", "")
        for member in cls:
            if wanted in (member.value.lower(), member.name.lower().replace("_", ""), *_ALIASES.get(member, ())):
                return member
        names = ", ".join(repr(member.value) for member in cls)
        raise UsageError(f"schedule must be one of {names}, or a PipelineSchedule; got {value!r}.")

    @property
    def has_many_stages(self) -> bool:
        """Whether each rank holds several stages."""
        return self not in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B)

    @property
    def is_v(self) -> bool:
        """Whether stages go down the ranks and up again, so that rank 0 has the first and the last one."""
        return self in (PipelineSchedule.ZBV_ZERO_BUBBLE, PipelineSchedule.DUAL_PIPE_V)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return self.is_v or self is PipelineSchedule.INTERLEAVED_ZERO_BUBBLE


_ALIASES = {
    PipelineSchedule.ONE_F_ONE_B: ("onefonebschedule",),
    PipelineSchedule.INTERLEAVED_1F1B: ("interleavedonefoneb",),
}


def default_num_stages(schedule: PipelineSchedule, num_ranks: int) -> int:
    """Return the number of ranks, or twice that if the schedule needs several stages per rank."""
    return num_ranks * (2 if schedule.has_many_stages else 1)


def stages_of_rank(schedule: PipelineSchedule, rank: int, *, num_ranks: int, num_stages: int) -> list[int]:
    """Return the stages that a rank of the pipeline's group holds, in ascending order."""
    if schedule.is_v:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, num_ranks))


def check_counts(schedule: PipelineSchedule, *, num_ranks: int, num_stages: int, num_microbatches: int) -> None:
    """Check that the schedule can run with these numbers.

    Raises:
        UsageError: it cannot; the message names the rule and numbers that fit.
    """
    _check_stages(schedule, num_ranks, num_stages)
    what = f"num_microbatches={num_microbatches} with {schedule.value}"
    if num_microbatches < 1:
        raise UsageError(f"num_microbatches must be at least 1; got {num_microbatches}.")
    if schedule in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.DUAL_PIPE_V) and num_microbatches < num_stages:
        instead = "GPipe" if schedule is PipelineSchedule.ONE_F_ONE_B else "ZBVZeroBubble"
        raise UsageError(
            f"{schedule.value} needs at least as many microbatches as stages ({num_stages}); got {num_microbatches}. "
            f"Use num_microbatches={num_stages} or schedule={instead!r}."
        )
    if schedule in (PipelineSchedule.INTERLEAVED_1F1B, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE):
        rounds = _rounds(num_microbatches, num_ranks)
        if num_microbatches % rounds:
            near = [m for m in (num_microbatches - 1, num_microbatches + 1) if m % _rounds(m, num_ranks) == 0]
            fits = near or [num_microbatches // num_ranks * num_ranks]
            raise UsageError(
                f"{what} on {num_ranks} ranks: num_microbatches must be divisible by the number of rounds, "
                f"{num_microbatches} // {num_ranks} = {rounds}. Use {' or '.join(map(str, fits))}."
            )


def _rounds(num_microbatches: int, num_ranks: int) -> int:
    return max(1, num_microbatches // num_ranks)


def _check_stages(schedule: PipelineSchedule, num_ranks: int, num_stages: int) -> None:
    what = f"{num_stages} stage{'s' * (num_stages != 1)} on {num_ranks} rank{'s' * (num_ranks != 1)}"
    if not schedule.has_many_stages and num_stages != num_ranks:
        more = num_stages > num_ranks and num_stages % num_ranks == 0
        raise UsageError(
            f"{what}: {schedule.value} needs one stage per rank"
            + (f"; for {num_stages // num_ranks} per rank, use Interleaved1F1B." if more else f", so {num_ranks}.")
        )
    if schedule.is_v and num_stages != 2 * num_ranks:
        raise UsageError(f"{what}: {schedule.value} needs two stages per rank, so {2 * num_ranks}.")
    if num_stages < num_ranks or num_stages % num_ranks:
        raise UsageError(f"{what}: the number of stages must be a multiple of the number of ranks.")


@dataclass(frozen=True, slots=True)
class PipelineMemoryStats:
    """Live activations of a pipeline, in microbatches of one stage.

    A microbatch is live in a stage from the start of its forward to the end of its backward, or of the weight part of
    its backward if the schedule defers that. The peaks follow from torch's order of computation. In addition, torch
    keeps two buffers per microbatch through all steps: for a stage's input and for the gradient of its output.
    """

    schedule: PipelineSchedule
    num_ranks: int
    num_stages: int
    num_microbatches: int
    peak_per_stage: tuple[int, ...]
    """Peak number of live microbatches of each stage."""
    peak_per_rank: tuple[int, ...]
    """Peak number of live microbatches on each rank, over all its stages."""

    @property
    def peak_activations(self) -> int:
        """Peak of the busiest rank."""
        return max(self.peak_per_rank)

    def peak_bytes(self, microbatch_bytes: int) -> tuple[int, ...]:
        """Return the peak bytes of activations on each rank, given the bytes per microbatch and stage."""
        return tuple(peak * microbatch_bytes for peak in self.peak_per_rank)

    @classmethod
    def of(
        cls,
        schedule: PipelineSchedule | str,
        *,
        num_ranks: int,
        num_microbatches: int,
        num_stages: int | None = None,
    ) -> PipelineMemoryStats:
        """Compute the peaks of a schedule.

        Args:
            schedule: The schedule, or its name.
            num_ranks: Number of ranks of the pipeline.
            num_microbatches: Microbatches per batch.
            num_stages: Stages on all ranks. None: one per rank, or two if the schedule needs several.

        Raises:
            UsageError: the schedule cannot run with these numbers.
        """
        kind = PipelineSchedule.of(schedule)
        stages = default_num_stages(kind, num_ranks) if num_stages is None else num_stages
        counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
        check_counts(kind, **counts)
        per_stage, per_rank = peak_live_microbatches(actions(kind, **counts), num_stages=stages)
        return cls(kind, num_ranks, stages, num_microbatches, per_stage, per_rank)

    @staticmethod
    def gpipe_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return GPipe's peak: all microbatches, in every stage."""
        return _peak(PipelineSchedule.GPIPE, num_stages, num_microbatches)

    @staticmethod
    def one_f_one_b_peak_activations(num_stages: int, num_microbatches: int) -> int:
        """Return 1F1B's peak: as many microbatches as stages, in the first stage."""
        return _peak(PipelineSchedule.ONE_F_ONE_B, num_stages, num_microbatches)


def peak_live_microbatches(orders: Sequence[Order], *, num_stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Compute the peak number of live microbatches per stage and per rank from the order of computation."""
    per_stage, per_rank = [0] * num_stages, []
    for order in orders:
        live, total, peak = [0] * num_stages, 0, 0
        for action, stage, _ in order:
            change = 1 if action == "F" else 0 if action == "I" else -1
            live[stage] += change
            total += change
            per_stage[stage] = max(per_stage[stage], live[stage])
            peak = max(peak, total)
        per_rank.append(peak)
    return tuple(per_stage), tuple(per_rank)


def _peak(schedule: PipelineSchedule, num_stages: int, num_microbatches: int) -> int:
    stats = PipelineMemoryStats.of(schedule, num_ranks=num_stages, num_microbatches=num_microbatches)
    return stats.peak_activations


def ideal_timeline(
    schedule: PipelineSchedule | str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_stages: int | None = None,
    forward_s: float = 0.01,
    backward_s: float = 0.02,
) -> list[Span]:
    """Return the spans of one step if all stages took equally long and messages took no time.

    For unequal stages and messages that take time, see `axon_nb.plan.schedule`.

    Args:
        schedule: The schedule, or its name.
        num_ranks: Number of ranks of the pipeline, numbered from 0.
        num_microbatches: Microbatches per batch.
        num_stages: Stages on all ranks. None: one per rank, or two if the schedule needs several.
        forward_s: Seconds per forward of one microbatch in one stage.
        backward_s: Seconds per backward; half of that each for inputs and weights if computed separately.

    Returns:
        Spans starting at 0 ns, rank by rank. With GPipe, 1F1B, Interleaved1F1B and LoopedBFS, and v stages per rank,
        their `bubble_fraction` is (P - 1) / (v M + P - 1) (Narayanan et al., 2021).

    Raises:
        UsageError: the schedule cannot run with these numbers.
    """
    kind = PipelineSchedule.of(schedule)
    stages = default_num_stages(kind, num_ranks) if num_stages is None else num_stages
    counts = {"num_ranks": num_ranks, "num_stages": stages, "num_microbatches": num_microbatches}
    check_counts(kind, **counts)
    lengths = {"F": forward_s, "B": backward_s, "I": backward_s / 2, "W": backward_s / 2}
    return play(actions(kind, **counts), lengths)


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
    flags = [getattr(schedule, name) for name in torch_api().schedule_flags if hasattr(schedule, name)]
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
        is_alone: Whether it is its rank's only stage: then torch reduces gradients outside of its list of actions.
    """

    def __init__(self, stage: Any, *, rank: int, group: str, is_alone: bool) -> None:
        self.peak = 0
        """Peak number of live microbatches since it was last set to 0."""
        self._live = self._step = 0
        self._identity = (rank, group, stage.stage_index)
        self._device = torch.device(stage.device)
        self._is_sharded = isinstance(stage.submod, FSDPModule)
        # Partials of methods pickle with the stage, as `config protect` needs; closures bring all that they refer to.
        for name in _METHODS:
            setattr(stage, name, functools.partial(self._compute, stage, name))
        for name in _MESSAGES:
            setattr(stage, name, functools.partial(self._label_messages, stage, name))
        if self._is_sharded and is_alone:
            stage.perform_reduce_grad = functools.partial(self._reduce, stage)

    def begin_step(self, step: int) -> None:
        """Reset the counts for a new step; an aborted step leaves nothing behind.

        Args:
            step: Start of the step on this rank, in nanoseconds; identifies its actions.
        """
        rank, _, index = self._identity
        ranks = _watch_functions()  # here, as a new process gets stages that another one made
        ranks.pop(index, None)
        if self._is_sharded:
            ranks[index] = rank
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

    def _reduce(self, stage: Any, *args: Any, **kwargs: Any) -> None:
        start, (rank, _, index) = now(), self._identity
        type(stage).perform_reduce_grad(stage, *args, **kwargs)
        emit(Span(rank, "collective", "REDUCE_GRAD", start, now(), stage=index))

    def _label_messages(self, stage: Any, name: str, chunk: int) -> Any:
        ops = getattr(type(stage), name)(stage, chunk)
        for op in ops:
            op.axon_nb = (*self._identity, _MESSAGES[name], chunk, op.tensor.nbytes)
        return ops


class _LabelledWorks(list[Any]):
    """A list of pending communications that also describes each message."""

    messages: list[tuple[int, str, int, str, int, int]]


@functools.cache
def _watch_functions() -> dict[int, int]:
    """Record from now on the waits for stages' messages, and when parameters of stages are gathered and freed.

    Returns:
        This process's rank, by each stage whose parameters are sharded; to be filled by the caller.
    """
    ranks: dict[int, int] = {}
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

    class WatchedAction(torch.profiler.record_function):
        """The name of an action in a profile; around each that torch takes from a list."""

        def __enter__(self) -> Any:
            self.start = now()
            return super().__enter__()  # type: ignore[no-untyped-call]

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            found = _OF_SHARDS.fullmatch(self.name)
            if found is not None and (rank := ranks.get(stage := int(found[1]))) is not None:
                emit(Span(rank, "collective", found[2], self.start, now(), stage=stage))

    schedules._batch_p2p, schedules._wait_batch_p2p = watched_start, watched_wait  # type: ignore[attr-defined]
    schedules.record_function = WatchedAction  # type: ignore[attr-defined]
    return ranks


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
