"""Exercise 5.1: Adam, shared among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from axon_course.comparisons import difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.memory import live_storages
from axon_course.trials import Trial

_TOLERANCE = 1e-9
_STEPS = 5
_LR = 0.01
_TINY = 1e-7
"""A scale of gradients at which Adam's eps counts."""


def _model() -> nn.Sequential:
    """Tensors of 35, 5, 15 and 3 numbers, which 4 ranks do not divide."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(torch.sin(torch.arange(weight.numel()) + number).view_as(weight))
    return model


def _train(optimizer: Any, model: nn.Module, batches: list[torch.Tensor], scale: float) -> torch.Tensor:
    for batch in batches:
        model.zero_grad()
        (model(batch).square().mean() * scale).backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


def _trained_on_rank(answer: Any, batches: list[torch.Tensor], scale: float) -> torch.Tensor:
    model = _model()
    mine = [batch.chunk(dist.get_world_size())[dist.get_rank()] for batch in batches]
    return _train(answer(model.parameters(), lr=_LR), model, mine, scale)


def _batches(trial: Trial, steps: int) -> list[torch.Tensor]:
    return list(torch.rand(steps, 2 * trial.ranks, 7, generator=trial.generator("zero"), dtype=torch.float64))


def _compare_training(trial: Trial, scale: float, steps: int = _STEPS) -> tuple[list[Any], torch.Tensor]:
    batches = _batches(trial, steps)
    model = _model()
    expected = _train(torch.optim.Adam(model.parameters(), lr=_LR), model, batches, scale)
    return trial.run(_trained_on_rank, batches, scale), expected


def _farthest(trial: Trial, scale: float, steps: int, case: str) -> str | None:
    found, expected = _compare_training(trial, scale, steps)
    for rank, weights in enumerate(found):
        if (off := float((weights - expected).abs().max())) > _TOLERANCE:
            return f"{case}: on rank {rank} a weight is off by {off:.2g}"
    return None


def _equals_adam(trial: Trial) -> str | None:
    return _farthest(trial, 1.0, 1, "after 1 step") or _farthest(trial, 1.0, _STEPS, f"after {_STEPS} steps")


def _small_gradients(trial: Trial) -> str | None:
    return _farthest(trial, _TINY, _STEPS, f"gradients near {_TINY:g}")


def _kept_on_rank(answer: Any) -> tuple[Any, ...]:
    model = _model()
    optimizer = answer(model.parameters(), lr=_LR)
    _train(optimizer, model, [torch.ones(2, 7, dtype=torch.float64)], 1.0)
    return optimizer, model


def _kept(trial: Trial) -> tuple[int, int]:
    """Bytes that all ranks keep beside weights and gradients, and those of the weights of one rank."""
    before = live_storages()
    held = trial.run(_kept_on_rank)
    ours = [tensor for _, model in held for weight in model.parameters() for tensor in (weight, weight.grad)]
    known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in ours if tensor is not None}
    more = {key: size for key, size in live_storages().items() if key not in before and key not in known}
    return sum(more.values()), sum(weight.nbytes for weight in held[0][1].parameters())


def _is_shared(trial: Trial) -> str | None:
    kept, weights = _kept(trial)
    allowed = 3 * weights + 256 * trial.ranks  # moments and a copy of the own part, with what fills the last pieces
    if kept <= allowed:
        return None
    return (
        f"besides weights and gradients, {trial.ranks} ranks together keep {kept / weights:.1f} times the bytes of the "
        "model; two moments, shared, and one copy of the own part are 3"
    )


def _keeps_all_moments(trial: Trial) -> bool:
    kept, weights = _kept(trial)
    return kept >= 2 * trial.ranks * weights


def _adds_gradients(trial: Trial) -> bool:
    found, _ = _compare_training(trial, _TINY)
    _, expected = _compare_training(trial, _TINY * trial.ranks)
    return all(difference(weights, expected, tolerance=_TOLERANCE) is None for weights in found)


def _steps_with_own_gradients(trial: Trial) -> bool:
    """Whether each weight is as one rank alone would step it, and not as all together would."""
    found, right = _compare_training(trial, _TINY, 1)
    (batch,) = _batches(trial, 1)
    alone = []
    for mine in batch.chunk(trial.ranks):
        model = _model()
        alone.append(_train(torch.optim.Adam(model.parameters(), lr=_LR), model, [mine], _TINY))
    close = (torch.stack(alone) - found[0]).abs() <= _TOLERANCE
    return bool(close.any(dim=0).all()) and difference(found[0], right, tolerance=_TOLERANCE) is not None


def _ranks_differ(trial: Trial) -> bool:
    found, _ = _compare_training(trial, 1.0)
    return any(not torch.allclose(weights, found[0]) for weights in found)


SHARED_ADAM = Exercise(
    id="5.1",
    title="Adam, shared",
    answer="ZeroAdam",
    properties=(
        Property("equals Adam in one process", _equals_adam),
        Property("also with tiny gradients", _small_gradients),
        Property("the moments are shared", _is_shared, mock_only=True),
    ),
    mistakes=(
        Mistake(
            "Every rank still keeps both moments of every weight. Which weights does a rank step itself?",
            _keeps_all_moments,
        ),
        Mistake(
            "The gradients are added up, not averaged. Adam divides by their size, which nearly hides it; tiny "
            "gradients show it.",
            _adds_gradients,
        ),
        Mistake(
            "The ranks end with different weights: what a rank has stepped must reach the others.",
            _ranks_differ,
        ),
        Mistake(
            "Each part was stepped with the gradients of its owner alone: the others' samples do not count.",
            _steps_with_own_gradients,
        ),
    ),
    hints=(
        (
            "Three things happen in a step: gradients are averaged, each rank steps what it owns, and all get the"
            " result. Which of the three need the other ranks?"
        ),
        (
            "Give `torch.optim.Adam` only the weights that this rank owns: then it has only their moments. The "
            "simplest cut is by whole tensors: tensor i belongs to rank i % world_size."
        ),
        (
            "In `step`: for each weight, `dist.all_reduce(weight.grad)` and divide by the number of ranks; step the "
            "own Adam; then `dist.broadcast(weight.data, src=owner)` for each weight."
        ),
    ),
)
