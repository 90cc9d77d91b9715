"""Shared by pipeline tests: a model, batches, and training in one process and as a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from axon_nb.comm import World
from axon_nb.parallel import Pipeline
from axon_nb.records import Span
from axon_nb.records import spans as trace
from tests.support.training.models import blocks, loss_of

CASES = [
    # schedule, ranks, stages, microbatches
    ("GPipe", 2, 2, 3),
    ("GPipe", 4, 4, 6),
    ("1F1B", 2, 2, 3),
    ("1F1B", 4, 4, 7),
    ("Interleaved1F1B", 2, 4, 6),
    ("Interleaved1F1B", 2, 6, 3),
    ("Interleaved1F1B", 4, 8, 10),
    ("LoopedBFS", 2, 4, 3),
    ("LoopedBFS", 4, 8, 5),
    ("InterleavedZeroBubble", 2, 4, 6),
    ("InterleavedZeroBubble", 4, 8, 8),
    ("ZBVZeroBubble", 2, 4, 5),
    ("ZBVZeroBubble", 4, 8, 10),
    ("DualPipeV", 2, 4, 6),
    ("DualPipeV", 4, 8, 11),
]
"""Every schedule on 2 and 4 ranks, with different numbers of microbatches and stages."""

RATE = 0.1


def whole(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The model: 8 blocks."""
    return blocks(8).to(dtype)


def batches(steps: int, rows: int, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of each step."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(2, rows, 8, generator=generator, dtype=torch.float64).to(dtype) for _ in range(steps)]
    return [(both[0], both[1]) for both in made]


@dataclass
class Trained:
    """Results of a training run; for a rank of a pipeline, its part."""

    losses: list[float] = field(default_factory=list)
    output: torch.Tensor | None = None
    """Output of a forward after the last step."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Of the last step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    """Of the last step."""
    peaks: dict[int, int] = field(default_factory=dict)


def in_one_process(steps: int, rows: int, dtype: torch.dtype = torch.float64) -> Trained:
    """The same training without a pipeline."""
    model, reported = whole(dtype), Trained()
    for x, y in batches(steps, rows, dtype):
        model.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        reported.losses.append(loss.item())
        _apply(model)
    reported.output = model(x).detach()
    return _finished(reported, model)


def train(
    world: World, schedule: str, num_stages: int, num_microbatches: int, *, steps: int, dtype: torch.dtype
) -> Trained:
    """Train as one rank of a pipeline."""
    pipe = Pipeline.split(
        whole(dtype),
        group=world,
        num_stages=num_stages,
        schedule=schedule,
        num_microbatches=num_microbatches,
        loss=loss_of,
    )
    reported = Trained()
    for x, y in batches(steps, 2 * num_microbatches, dtype):
        pipe.zero_grad()
        before = trace.ring.position
        losses = pipe.step(x if pipe.is_first else None, y if pipe.is_last else None)
        assert (losses is not None) == pipe.is_last
        assert losses is None or losses.shape == (num_microbatches,)
        reported.spans = [span for span in trace.ring.since(before)[0] if span.stage in pipe.stage_indices]
        reported.peaks = pipe.peak_activations()
        reported.losses.append(pipe.mean_loss(losses))
        _apply(pipe)
    reported.output = pipe(x)
    return _finished(reported, pipe)


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge the parts of all ranks; no name may be on two."""
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names))
    return {name: value for part in parts for name, value in part.items()}


def _apply(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(RATE * parameter.grad)


def _finished(reported: Trained, model: Any) -> Trained:
    reported.gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    reported.weights = {name: value.detach() for name, value in model.named_parameters()}
    return reported
