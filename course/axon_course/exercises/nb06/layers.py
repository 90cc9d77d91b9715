"""Exercise 6.1: two linear layers, spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from axon_course.comparisons import first_difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.trials import Trial
from axon_nb.comm.calls import calls

_TOLERANCE = 1e-9
_ROWS, _HIDDEN = 3, 5
_NAMES = ("up", "up_bias", "down", "down_bias")
_CUT_ALONG = (0, 0, 1, None)
"""The dimension along which each of them is cut; None: every rank has the whole."""

Ops = list[tuple[str, int]]
"""Operations, with their numbers of calls."""


@dataclass(frozen=True)
class _Computed:
    """What a rank has computed."""

    output: Any
    gradients: list[torch.Tensor | None]
    """Of the input, and of its parts of the weights."""
    forward: Ops
    backward: Ops


def _part(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    return tensor if dim is None else tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def _on_rank(answer: Any, x: torch.Tensor, weights: list[torch.Tensor], probe: torch.Tensor | None) -> _Computed:
    parts = [_part(weight, dim) for weight, dim in zip(weights, _CUT_ALONG, strict=True)]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *parts)]
    with calls() as forward:
        output = answer(*leaves)
    with calls() as backward:
        if probe is not None:
            torch.autograd.backward(output, probe)
    output = output.detach() if isinstance(output, torch.Tensor) else output
    made = [[(row.operation, row.calls) for row in counted.rows] for counted in (forward, backward)]
    return _Computed(output, [leaf.grad for leaf in leaves], made[0], made[1])


@dataclass(frozen=True)
class _Case:
    """Whole tensors, and what one process computes from them."""

    x: torch.Tensor
    weights: list[torch.Tensor]
    probe: torch.Tensor
    """Gradient of the output."""
    output: torch.Tensor
    gradients: list[torch.Tensor]


def _case(trial: Trial) -> _Case:
    generator = trial.generator("layers")
    inner = 2 * trial.ranks
    shapes = ((_ROWS, _HIDDEN), (inner, _HIDDEN), (inner,), (_HIDDEN, inner), (_HIDDEN,), (_ROWS, _HIDDEN))
    x, up, up_bias, down, down_bias, probe = (
        torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5 for shape in shapes
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (x, up, up_bias, down, down_bias)]
    hidden = functional.gelu(functional.linear(leaves[0], leaves[1], leaves[2]))
    output = functional.linear(hidden, leaves[3], leaves[4])
    output.backward(probe)
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return _Case(x, [up, up_bias, down, down_bias], probe, output.detach(), gradients)


def _forward(trial: Trial) -> tuple[_Case, list[_Computed]]:
    case = _case(trial)
    return case, trial.run(_on_rank, case.x, case.weights, None)


def _step(trial: Trial) -> tuple[_Case, list[_Computed]]:
    case = _case(trial)
    return case, trial.run(_on_rank, case.x, case.weights, case.probe)


def _output_equals(trial: Trial) -> str | None:
    case, found = _forward(trial)
    expected = [case.output] * trial.ranks
    return first_difference([rank.output for rank in found], expected, "output", tolerance=_TOLERANCE)


def _weight_gradients(trial: Trial) -> str | None:
    return next(filter(None, (_gradient_differs(trial, index) for index in range(len(_NAMES)))), None)


def _gradient_differs(trial: Trial, index: int, factor: int = 1) -> str | None:
    case, found = _step(trial)
    name, dim = _NAMES[index], _CUT_ALONG[index]
    whole = case.gradients[1 + index] * factor
    expected = [whole] * trial.ranks if dim is None else list(whole.chunk(trial.ranks, dim))
    got = [rank.gradients[1 + index] for rank in found]
    return first_difference(got, expected, f"gradient of {name}", tolerance=_TOLERANCE)


def _input_gradient(trial: Trial) -> str | None:
    case, found = _step(trial)
    got, expected = [rank.gradients[0] for rank in found], [case.gradients[0]] * trial.ranks
    return first_difference(got, expected, "gradient of x", tolerance=_TOLERANCE)


def _one_call_each(trial: Trial) -> str | None:
    _, found = _step(trial)
    for rank, computed in enumerate(found):
        for direction, ops in (("forward", computed.forward), ("backward", computed.backward)):
            if sum(number for _, number in ops) != 1:
                made = ", ".join(f"{number} of {name}" for name, number in ops) or "none"
                return f"{direction}: rank {rank} made {made}; one call is enough"
    return None


def _adds_every_bias(trial: Trial) -> bool:
    case, found = _forward(trial)
    wrong = case.output + (trial.ranks - 1) * case.weights[3]
    return first_difference([rank.output for rank in found], [wrong] * trial.ranks, "", tolerance=_TOLERANCE) is None


def _never_adds_up(trial: Trial) -> bool:
    return not any(rank.forward for rank in _forward(trial)[1])


def _own_input_gradient(trial: Trial) -> bool:
    case, found = _step(trial)
    parts = [rank.gradients[0] for rank in found]
    total = torch.stack([part for part in parts if part is not None]).sum(0)
    return first_difference([total], [case.gradients[0]], "", tolerance=_TOLERANCE) is None


def _calls_between(trial: Trial) -> bool:
    return all(sum(number for _, number in rank.forward) > 1 for rank in _forward(trial)[1])


LAYERS = Exercise(
    id="6.1",
    title="Two layers, one sum",
    answer="split_mlp",
    properties=(
        Property("the output is that of whole layers", _output_equals),
        Property("gradients of weights and biases", _weight_gradients),
        Property("gradient of the input", _input_gradient),
        Property("one call forward, one backward", _one_call_each),
    ),
    mistakes=(
        Mistake("Every rank has added `down_bias`, and the sum has it once for each of them.", _adds_every_bias),
        Mistake("Each rank has only its part of every sum. Who adds them up?", _never_adds_up),
        Mistake(
            "These gradients are added up over ranks, but they were right before: if one part of a sum changes, the "
            "sum changes by just as much.",
            lambda trial: _gradient_differs(trial, 0, trial.ranks) is None,
        ),
        Mistake(
            "The gradient of x is only what came through this rank's features. x has gone to all ranks, so all of them "
            "have a part of its gradient.",
            _own_input_gradient,
        ),
        Mistake(
            "Something travels between the two layers. A rank can go on with just the features that it has.",
            _calls_between,
        ),
    ),
    hints=(
        (
            "Write the forward first, for one rank: its features of `up`, then its part of each sum of `down`. Where "
            "must the ranks meet? And what must not be added more than once?"
        ),
        (
            "Backward is the mirror of forward. Where forward adds up over ranks, backward passes the gradient on as "
            "it is. Where forward hands the same x to all ranks, backward adds their gradients up."
        ),
        (
            "`Enter`: forward returns `x.view_as(x)`, backward an all_reduce of a copy of the gradient. `Leave`: "
            "the other way round. Then enter, up, GELU, down without a bias, leave, and add `down_bias`."
        ),
    ),
)
