"""Exercise 3.3: compute again instead of keeping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from axon_course.definitions import Exercise, Mistake, Property, Score
from axon_course.memory import PeakBytes, SavedBytes
from axon_course.replays import Replay, replay_curve
from axon_course.trials import Trial
from axon_nb.parallel.models import Block

_LAYERS = 16
_ROWS, _WIDTH = 512, 8
"""Of what a layer gets: its weights are much smaller."""
_BUDGET = 12
"""Tensors, each as large as a layer's output."""


class _Layer(nn.Module):
    """A layer that keeps one tensor for backward, and counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the shape of `x`."""
        self.runs += 1
        return torch.as_tensor(self.linear(x).tanh())


@dataclass(frozen=True)
class _Trained:
    """What a forward and a backward have done."""

    output: torch.Tensor
    gradients: list[torch.Tensor | None]
    """Of the input, then of all weights."""
    runs: list[int]
    """Of each layer."""
    kept: float
    """After forward, in outputs of a layer."""
    alive: list[float]
    """After each operation, in outputs of a layer."""

    @property
    def peak(self) -> float:
        """The most that was alive at a time, in outputs of a layer."""
        return max(self.alive, default=0.0)


def _plain(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _train(answer: Any, layers: list[nn.Module], x: torch.Tensor) -> _Trained:
    x = x.detach().clone().requires_grad_()
    weights = [weight for layer in layers for weight in layer.parameters()]
    with PeakBytes() as peak:
        with SavedBytes([x, *weights]) as saved:
            output = answer(layers, x)
        kept = saved.bytes
        torch.autograd.backward(output, torch.ones_like(output))
    gradients = [None if tensor.grad is None else tensor.grad.clone() for tensor in (x, *weights)]
    runs = [getattr(layer, "runs", 0) for layer in layers]
    return _Trained(output.detach(), gradients, runs, kept / x.nbytes, [held / x.nbytes for held in peak.history])


def _layers(trial: Trial, number: int) -> tuple[list[nn.Module], torch.Tensor]:
    generator = trial.generator(f"layers {number}")
    layers: list[nn.Module] = [_Layer() for _ in range(number)]
    _randomize(layers, generator)
    return layers, torch.rand(_ROWS, _WIDTH, generator=generator, dtype=torch.float64)


def _blocks(trial: Trial) -> tuple[list[nn.Module], torch.Tensor]:
    generator = trial.generator("blocks")
    blocks: list[nn.Module] = [Block(16, 2) for _ in range(5)]
    _randomize(blocks, generator)
    return blocks, torch.rand(2, 8, 16, generator=generator)


def _randomize(layers: list[nn.Module], generator: torch.Generator) -> None:
    with torch.no_grad():
        for weight in (weight for layer in layers for weight in layer.parameters()):
            weight.copy_(torch.rand(weight.shape, generator=generator, dtype=weight.dtype) - 0.5)


def _trained(trial: Trial, layers: list[nn.Module], x: torch.Tensor) -> _Trained:
    result: _Trained = trial.run(_train, layers, x, ranks=1)[0]
    return result


def _deep(trial: Trial) -> _Trained:
    return _trained(trial, *_layers(trial, _LAYERS))


def _equal(trial: Trial, layers: list[nn.Module], x: torch.Tensor, case: str) -> str | None:
    found, right = _trained(trial, layers, x), _train(_plain, layers, x)
    if not torch.equal(found.output, right.output):
        return f"{case}: the output differs"
    weights = ((index, name) for index, layer in enumerate(layers) for name, _ in layer.named_parameters())
    names = ["x", *(f"layer {index}'s {name}" for index, name in weights)]
    for name, got, expected in zip(names, found.gradients, right.gradients, strict=True):
        if got is None:
            return f"{case}: {name} has no gradient"
        if expected is None or not torch.equal(got, expected):
            return f"{case}: the gradient of {name} differs"
    return None


def _few_layers(trial: Trial) -> str | None:
    return _equal(trial, *_layers(trial, 1), "one layer") or _equal(trial, *_layers(trial, 2), "two layers")


def _any_number(trial: Trial) -> str | None:
    sentences = (_equal(trial, *_layers(trial, number), f"{number} layers") for number in (7, _LAYERS))
    return next(filter(None, sentences), None)


def _gpt(trial: Trial) -> str | None:
    return _equal(trial, *_blocks(trial), "five blocks of a GPT")


def _twice(trial: Trial) -> str | None:
    runs = _deep(trial).runs
    most = max(runs)
    return None if most <= 2 else f"layer {runs.index(most)} of {_LAYERS} ran {most} times; twice is enough"


def _fits(trial: Trial) -> str | None:
    peak = _deep(trial).peak
    if peak <= _BUDGET:
        return None
    return f"{_LAYERS} layers: at the worst moment there were {peak:.1f} tensors; there is room for {_BUDGET}"


def _misses_gradients(trial: Trial) -> bool:
    return _deep(trial).gradients[1] is None and max(_deep(trial).runs) <= 1


def _recomputes_the_last(trial: Trial) -> bool:
    runs = _deep(trial).runs
    return runs[0] == 1 and runs[-1] > 2


def _memory(trial: Trial) -> Replay:
    return replay_curve(
        f"What your forward, and backward after it, kept alive: {_LAYERS} layers",
        _deep(trial).alive,
        unit="outputs of a layer",
        start="the first operation",
        end="the last",
    )


RECOMPUTING = Exercise(
    id="3.3",
    title="Compute again instead of keeping",
    answer="lean_forward",
    properties=(
        Property("few layers", _few_layers, mock_only=True),
        Property("any number of layers", _any_number, mock_only=True),
        Property("blocks of a GPT", _gpt, mock_only=True),
        Property("no layer runs more than twice", _twice, mock_only=True),
        Property("it fits the budget", _fits, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "No gradient can get through: without a graph, backward does not know what to compute again.",
            _misses_gradients,
        ),
        Mistake(
            "Backward computed the last group again and again. A function made in a loop looks up the loop's variable "
            "when it runs, and by then the loop is over.",
            _recomputes_the_last,
        ),
        Mistake(
            "Every layer runs once only, so everything is kept.",
            lambda trial: max(_deep(trial).runs) == 1,
        ),
        Mistake(
            "Backward begins by computing all layers again, and keeps all of it. Nothing was saved.",
            lambda trial: _deep(trial).kept < 1.5 and max(_deep(trial).runs) == 2,
        ),
        Mistake(
            "This keeps the input of every layer, and that is all that a layer keeps anyway. Nothing was saved.",
            lambda trial: _deep(trial).kept > _LAYERS - 2 and max(_deep(trial).runs) == 2,
        ),
    ),
    hints=(
        "Keep the input of some layers only. What must be computed again, and kept, when backward comes to a layer?",
        (
            "Take layers in groups: keep the input of each group. In backward, one group at a time is computed again. "
            "With 16 layers, how large should a group be, so that groups plus layers in a group are few?"
        ),
        (
            "`checkpoint(run, group, x, use_reentrant=False)` for each group of about sqrt(n) layers, where "
            "`run(group, x)` applies the layers of the group one after the other."
        ),
    ),
    score=Score("peak, in outputs of a layer", 9.2, lambda trial: round(_deep(trial).peak, 1), _memory),
)
