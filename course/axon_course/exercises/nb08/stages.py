"""Stages that take a fixed time, and an engine that runs them in an order of the learner's."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_nb.comm.group import resolve
from axon_nb.comm.spans import now
from axon_nb.records.spans import Span, emit, suppress_spans


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Sleeper(nn.Module):
    """A stage that sleeps instead of computing.

    Args:
        seconds: How long it takes for one sample: so long for its forward, and for each half of its backward, the
            gradient of the input and that of the weights.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.shift = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as it is."""
        seconds = self.seconds * len(x)
        slept: torch.Tensor = _Sleep.apply(x + self.shift, seconds, seconds)  # type: ignore[no-untyped-call]
        weighted: torch.Tensor = slept * _Sleep.apply(self.scale, 0.0, seconds)  # type: ignore[no-untyped-call]
        return weighted


def run_order(
    order: Iterable[tuple[str, int]], stage: nn.Module, batch: torch.Tensor, targets: torch.Tensor
) -> list[Span]:
    """Run one step of a pipeline in a given order, and add up the gradients of this rank's stage.

    Rank r holds stage r. ``("F", 3)`` receives microbatch 3 from the rank before, computes, and sends the output on;
    ``("B", 3)`` receives the output's gradient from the rank after, runs backward, and sends the input's gradient back.
    Sends do not wait.

    Args:
        order: What this rank does; each microbatch once forward and once backward.
        stage: This rank's stage; its output has the shape of its input.
        batch: Input of the first stage, samples along dim 0; the others use only its shape.
        targets: What the last stage's output should be; the loss is the mean squared error over the batch.

    Returns:
        A span per action, which `%timeline` shows, too.
    """
    actions = list(order)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    count = len({microbatch for _, microbatch in actions})
    inputs, wanted = batch.chunk(count), targets.chunk(count)
    group, step = resolve(None).torch_group.group_name, now()
    live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    sent: list[tuple[Any, torch.Tensor]] = []  # the tensors must live until they have been sent
    spans = []
    for action, m in actions:
        forward = action == "F"
        source = rank - 1 if forward else rank + 1
        received = None
        if 0 <= source <= last:
            received = torch.empty_like(inputs[m])
            dist.recv(received, source, tag=m)
        begin = now()
        if forward:
            x = (inputs[m] if received is None else received).detach().requires_grad_(rank > 0)
            with suppress_spans("forward"):
                y = stage(x)
                live[m] = x, y if rank < last else nn.functional.mse_loss(y, wanted[m]) / count
            to_send, target = y, rank + 1
        else:
            x, y = live.pop(m)
            with suppress_spans("backward"):
                y.backward(received)
            to_send, target = x.grad, rank - 1
        kind = "forward" if forward else "backward"
        spans.append(Span(rank, kind, action, begin, now(), group, 0, rank, m, step))
        emit(spans[-1])
        if 0 <= target <= last and to_send is not None:
            message = to_send.detach().contiguous()
            sent.append((dist.isend(message, target, tag=m), message))
    for work, _ in sent:
        work.wait()
    return spans
