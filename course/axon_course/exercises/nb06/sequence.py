"""Exercise 6.3: some positions on each rank between the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.memory import PeakBytes, SavedBytes
from axon_course.replays import Replay, replay_curve
from axon_course.trials import Trial
from axon_nb.comm.calls import calls
from axon_nb.records.units import format_bytes

_TOLERANCE = 1e-9
_HIDDEN, _PER_RANK = 32, 4
"""Features, and positions of a rank."""
_NAMES = ("x", "up", "down")
_CUT_ALONG = (0, 0, 1)


@dataclass(frozen=True)
class _Computed:
    """What a rank has computed."""

    output: Any
    gradients: list[torch.Tensor | None]
    """Of its positions, and of its parts of the weights."""
    forward: list[str]
    """Operations."""
    forward_sent: int
    """Bytes."""
    backward_sent: int
    kept: int
    """Bytes that forward has kept for backward."""
    alive: list[int]
    """Bytes of the tensors that it has made, after each operation."""


def _on_rank(answer: Any, tensors: list[torch.Tensor], probe: torch.Tensor | None) -> _Computed:
    n, rank = dist.get_world_size(), dist.get_rank()
    parts = [tensor.chunk(n, dim)[rank] for tensor, dim in zip(tensors, _CUT_ALONG, strict=True)]
    leaves = [part.clone().requires_grad_() for part in parts]
    with calls() as forward, SavedBytes(leaves[1:]) as saved, PeakBytes() as memory:
        output = answer(*leaves)
    kept = saved.bytes
    with calls() as backward, memory:
        if probe is not None:
            torch.autograd.backward(output, probe.chunk(n)[rank])
    output = output.detach() if isinstance(output, torch.Tensor) else output
    operations = [row.operation for row in forward.rows]
    return _Computed(
        output, [leaf.grad for leaf in leaves], operations, forward.sent, backward.sent, kept, memory.history
    )


@dataclass(frozen=True)
class _Case:
    """Whole tensors, and what one process computes from them."""

    tensors: list[torch.Tensor]
    """x, up and down."""
    probe: torch.Tensor
    """Gradient of the output."""
    output: torch.Tensor
    gradients: list[torch.Tensor]


def _case(trial: Trial) -> _Case:
    generator = trial.generator("sequence")
    positions, inner = _PER_RANK * trial.ranks, 4 * _HIDDEN
    shapes = ((positions, _HIDDEN), (inner, _HIDDEN), (_HIDDEN, inner), (positions, _HIDDEN))
    x, up, down, probe = (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 for shape in shapes)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, up, down)]
    hidden = functional.gelu(functional.layer_norm(leaves[0], (_HIDDEN,)) @ leaves[1].T)
    output = leaves[0] + hidden @ leaves[2].T
    output.backward(probe)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return _Case([x, up, down], probe, output.detach(), gradients)


def _forward(trial: Trial) -> tuple[_Case, list[_Computed]]:
    case = _case(trial)
    return case, trial.run(_on_rank, case.tensors, None)


def _step(trial: Trial) -> tuple[_Case, list[_Computed]]:
    case = _case(trial)
    return case, trial.run(_on_rank, case.tensors, case.probe)


def _output_equals(trial: Trial) -> str | None:
    case, found = _forward(trial)
    expected = list(case.output.chunk(trial.ranks))
    return first_difference([rank.output for rank in found], expected, "output", tolerance=_TOLERANCE)


def _gradients_differ(trial: Trial, *indices: int) -> str | None:
    case, found = _step(trial)
    for index in indices:
        expected = list(case.gradients[index].chunk(trial.ranks, _CUT_ALONG[index]))
        got = [rank.gradients[index] for rank in found]
        if sentence := first_difference(got, expected, f"gradient of {_NAMES[index]}", tolerance=_TOLERANCE):
            return sentence
    return None


def _sum_bytes(trial: Trial) -> int:
    """What a rank sends in an all_reduce of the whole activation."""
    positions = _PER_RANK * trial.ranks
    return 2 * (trial.ranks - 1) * positions * _HIDDEN * 8 // trial.ranks


def _same_bytes(trial: Trial) -> str | None:
    allowed = _sum_bytes(trial)
    for rank, computed in enumerate(_step(trial)[1]):
        for direction, sent, limit in (
            ("forward", computed.forward_sent, allowed),
            ("backward", computed.backward_sent, allowed * 3 // 2),
        ):
            if sent > limit:
                return (
                    f"{direction}: rank {rank} sent {format_bytes(sent)}; the sum that this replaces sends "
                    f"{format_bytes(allowed)}"
                )
    return None


def _kept(trial: Trial) -> float:
    """The most that a rank keeps for backward, in bytes of its input."""
    return max(rank.kept for rank in _forward(trial)[1]) / (_PER_RANK * _HIDDEN * 8)


def _keeps_less(trial: Trial) -> str | None:
    kept, allowed = _kept(trial), trial.ranks + 9.5
    if kept <= allowed:
        return None
    return f"a rank keeps {kept:.1f} times its input for backward; with norms on its positions only, {allowed:.1f}"


def _gradient_of_x_alone_is_wrong(trial: Trial) -> bool:
    return _gradients_differ(trial, 1, 2) is None and _gradients_differ(trial, 0) is not None


def _memory(trial: Trial) -> Replay:
    return replay_curve(
        "What your forward, and backward after it, kept alive on rank 0",
        [held / (_PER_RANK * _HIDDEN * 8) for held in _step(trial)[1][0].alive],
        unit="inputs of a rank",
        start="the first operation",
        end="the last",
    )


SEQUENCE = Exercise(
    id="6.3",
    title="Each rank its positions",
    answer="sequence_mlp",
    properties=(
        Property("the output, for the rank's positions", _output_equals),
        Property("gradients of the weights", lambda trial: _gradients_differ(trial, 1, 2)),
        Property("gradient of the input", lambda trial: _gradients_differ(trial, 0)),
        Property("no more bytes than a sum", _same_bytes),
        Property("the rank keeps less", _keeps_less, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "Nothing has travelled: a rank has some features for some positions, and no whole sum for any of them.",
            lambda trial: not any(rank.forward for rank in _forward(trial)[1]),
        ),
        Mistake(
            "A sum for all, and then most of it is thrown away: there is a move that adds up and shares out.",
            lambda trial: all("all_reduce" in rank.forward for rank in _forward(trial)[1]),
        ),
        Mistake(
            "Each rank has used all positions, so each has a part of the gradient of every position. Picking out the "
            "rank's positions is not enough.",
            _gradient_of_x_alone_is_wrong,
        ),
        Mistake(
            "The norm comes after the gathering, so every rank does it, and keeps its input, for all positions.",
            lambda trial: _kept(trial) > trial.ranks + 9.5,
        ),
    ),
    hints=(
        (
            "Take the layers of 6.1, and replace each meeting: `Enter` must now gather positions, `Leave` must add up "
            "and share out. Which of the seven moves are these, and what is the mirror of each?"
        ),
        (
            "`Gather`: forward all_gather, backward reduce_scatter. `ScatterSum`: forward reduce_scatter, backward "
            "all_gather. The norm and the residual need only the rank's positions."
        ),
        (
            "`dist.all_gather(parts, mine)` and `dist.reduce_scatter(mine, parts)` take lists with a tensor for each "
            "rank; `torch.cat(parts)` and `whole.chunk(n)` go from one to the other. Then: norm, gather, up, GELU, "
            "down, scatter, add x."
        ),
    ),
    score=Score("kept for backward, in inputs of a rank", 1, lambda trial: round(_kept(trial), 1), _memory),
)
