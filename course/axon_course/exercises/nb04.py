"""The exercises of notebook 04: data parallelism, from scratch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from axon_course.comparisons import difference
from axon_course.definitions import Exercise, Mistake, Property
from axon_course.exercises.samples import SHARE
from axon_course.trials import Trial
from axon_nb.comm.calls import CallCounts, calls

_TOLERANCE = 1e-12
_PER_RANK = 2
"""Samples of each rank."""
_BUCKET = 128
"""Bytes of a bucket: a few parameters of the small model."""

Gradients = list[torch.Tensor | None]


class _Net(nn.Module):
    """A small network in float64, with a layer that a rank may skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.skipped = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
        """Return the loss."""
        hidden = self.first(x).tanh()
        hidden = hidden if skip else self.skipped(hidden).tanh()
        return torch.as_tensor(self.last(hidden).square().mean())


def _net(trial: Trial, text: str) -> tuple[_Net, torch.Tensor]:
    """Return a model, and the batch of all ranks."""
    generator = trial.generator(text)
    net = _Net().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return net, torch.rand(trial.ranks * _PER_RANK, 4, generator=generator, dtype=torch.float64)


def _expected(net: _Net, batch: torch.Tensor, skipping: int | None) -> list[torch.Tensor]:
    """Return the gradients that one process gets on the whole batch."""
    shares = batch.split(_PER_RANK)
    net.zero_grad()
    losses = [net(share, skip=rank == skipping) for rank, share in enumerate(shares)]
    torch.stack(losses).mean().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    return gradients


def _differ(net: _Net, found: list[Gradients], expected: list[torch.Tensor]) -> str | None:
    names = [name for name, _ in net.named_parameters()]
    for rank, gradients in enumerate(found):
        for name, got, right in zip(names, gradients, expected, strict=True):
            if got is None:
                return f"rank {rank} has no gradient of {name}"
            if words := difference(got, right, tolerance=_TOLERANCE):
                return f"gradient of {name}: rank {rank} {words}"
    return None


# ---- 4.1 -------------------------------------------------------------------------------------------------------------


def _averaged(
    answer: Any, net: _Net, batch: torch.Tensor, skipping: int | None
) -> tuple[Gradients, list[tuple[str, int]], bool]:
    """Return the gradients, the operations with their number of calls, and whether the weights are as before."""
    rank = dist.get_rank()
    net(batch.split(_PER_RANK)[rank], skip=rank == skipping).backward()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with calls() as counted:
        answer(net)
    kept = all(torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    return [parameter.grad for parameter in net.parameters()], [(row[0], row[2]) for row in counted.rows], kept


def _average(trial: Trial, skipping: int | None, text: str) -> tuple[_Net, list[Gradients], list[torch.Tensor]]:
    net, batch = _net(trial, text)
    found = [rank[0] for rank in trial.run(_averaged, net, batch, skipping)]
    return net, found, _expected(net, batch, skipping)


def _equals_one_process(trial: Trial) -> str | None:
    return _differ(*_average(trial, None, "average"))


def _one_without_gradient(trial: Trial) -> str | None:
    words = _differ(*_average(trial, 1, "skipping"))
    return f"rank 1 has not used a layer: {words}" if words else None


def _one_call(trial: Trial) -> str | None:
    net, batch = _net(trial, "calls")
    for rank, (_, rows, _) in enumerate(trial.run(_averaged, net, batch, None)):
        if sum(calls for _, calls in rows) != 1:
            made = ", ".join(f"{calls} of {name}" for name, calls in rows) or "none"
            return f"rank {rank} made {made}; one call for all gradients is enough"
    return None


def _weights_stay(trial: Trial) -> str | None:
    net, batch = _net(trial, "weights")
    kept = [found[2] for found in trial.run(_averaged, net, batch, None)]
    return None if all(kept) else f"rank {kept.index(False)}: the weights have changed, not only the gradients"


def _is_sum(trial: Trial) -> bool:
    net, found, expected = _average(trial, None, "sum")
    return _differ(net, found, [gradient * trial.ranks for gradient in expected]) is None


def _is_local(trial: Trial) -> bool:
    net, batch = _net(trial, "local")
    found = trial.run(_averaged, net, batch, None)
    return not any(rows for _, rows, _ in found)


_AVERAGE = Exercise(
    id="4.1",
    title="Average the gradients",
    answer="average_gradients",
    properties=(
        Property("equals one process on the whole batch", _equals_one_process),
        Property("a rank that has not used a layer", _one_without_gradient),
        Property("one call for all gradients", _one_call),
        Property("the weights stay as they are", _weights_stay),
    ),
    mistakes=(
        Mistake("These are the sums over ranks: with four ranks, the step is four times too long.", _is_sum),
        Mistake("Nothing has travelled: every rank still has its own gradients.", _is_local),
        Mistake(
            "A rank leaves out the parameters without a gradient, so its buffer is shorter than that of the others.",
            lambda trial: "skipped" in str(_failure(trial)) or "passed" in str(_failure(trial)),
        ),
    ),
    hints=(
        "First make it right with one `all_reduce` per parameter. Then think of a suitcase.",
        "Copy all gradients into one long tensor, call `all_reduce` once, divide, and copy the parts back.",
        (
            "A gradient may be None: put zeros in its place, for every parameter on every rank. "
            "`torch.cat([g.flatten() for g in gradients])` packs, `flat.split([g.numel() for g in gradients])` unpacks."
        ),
    ),
)


def _failure(trial: Trial) -> Exception | str:
    try:
        return _one_without_gradient(trial) or ""
    except Exception as error:
        return error


# ---- 4.2 -------------------------------------------------------------------------------------------------------------


def _overlapped(answer: Any, net: _Net, batch: torch.Tensor, steps: int) -> tuple[Gradients, int, int, int]:
    """Return the gradients, and calls in the last step: before the last gradient, in backward, in all."""
    rank = dist.get_rank()
    averaging = answer(net, _BUCKET)
    before_last = 0
    for _ in range(steps):
        net.zero_grad()
        with calls() as counted:
            first = net.first.weight

            def note(_: torch.Tensor, counted: CallCounts = counted) -> None:
                nonlocal before_last
                before_last = counted.num_calls

            handle = first.register_hook(note)
            net(batch.split(_PER_RANK)[rank], skip=False).backward()
            handle.remove()
            in_backward = counted.num_calls
            averaging.finish()
    return [parameter.grad for parameter in net.parameters()], before_last, in_backward, counted.num_calls


def _overlap(trial: Trial, steps: int, text: str) -> tuple[_Net, list[Any], list[torch.Tensor]]:
    net, batch = _net(trial, text)
    return net, trial.run(_overlapped, net, batch, steps), _expected(net, batch, None)


def _overlap_is_right(trial: Trial) -> str | None:
    net, found, expected = _overlap(trial, 1, "overlap")
    return _differ(net, [rank[0] for rank in found], expected)


def _second_step(trial: Trial) -> str | None:
    net, found, expected = _overlap(trial, 2, "twice")
    words = _differ(net, [rank[0] for rank in found], expected)
    return f"in the second step, {words}" if words else None


def _few_calls(trial: Trial) -> str | None:
    net, found, _ = _overlap(trial, 1, "few")
    limit = sum(parameter.nbytes for parameter in net.parameters()) // _BUCKET + 1
    for rank, (*_, number) in enumerate(found):
        if number > limit:
            return f"rank {rank} made {number} calls; buckets of {_BUCKET} bytes need at most {limit}"
    return None


def _begins_early(trial: Trial) -> str | None:
    _, found, _ = _overlap(trial, 1, "early")
    for rank, (_, early, in_backward, number) in enumerate(found):
        if early < 1:
            when = "after backward" if not in_backward else "with the last gradient"
            return f"rank {rank} made the first of {number} calls {when}; a full bucket need not wait"
    return None


def _overlap_is_sum(trial: Trial) -> bool:
    net, found, expected = _overlap(trial, 1, "sum")
    return _differ(net, [rank[0] for rank in found], [gradient * trial.ranks for gradient in expected]) is None


def _calls_per_parameter(trial: Trial) -> bool:
    net, found, _ = _overlap(trial, 1, "per parameter")
    return all(rank[3] == len(list(net.parameters())) for rank in found)


def _all_at_the_end(trial: Trial) -> bool:
    return all(rank[2] == 0 and rank[3] > 0 for rank in _overlap(trial, 1, "end")[1])


def _loses_the_rest(trial: Trial) -> bool:
    net, found, expected = _overlap(trial, 1, "rest")
    right = [
        [difference(got, value, tolerance=_TOLERANCE) is None for got, value in zip(rank[0], expected, strict=True)]
        for rank in found
    ]
    return all(marks[-1] and not marks[0] for marks in right) and len(list(net.parameters())) > 2


_OVERLAP = Exercise(
    id="4.2",
    title="Communicate while backward still runs",
    answer="Overlapped",
    properties=(
        Property("equals one process on the whole batch", _overlap_is_right),
        Property("also in the second step", _second_step),
        Property("no more calls than buckets", _few_calls),
        Property("the first begins before the last gradient", _begins_early),
    ),
    mistakes=(
        Mistake("These are the sums over ranks, not yet divided by the number of ranks.", _overlap_is_sum),
        Mistake(
            "Every parameter travels alone: fill a bucket first, and send it when it is full.", _calls_per_parameter
        ),
        Mistake("All calls come after backward, so nothing of them is hidden behind computing.", _all_at_the_end),
        Mistake(
            "The last bucket is not full, and so it never leaves: the gradients that come last stay as they were.",
            _loses_the_rest,
        ),
    ),
    hints=(
        "`parameter.register_post_accumulate_grad_hook(function)` calls `function(parameter)` when it is ready.",
        (
            "In the hook, put the parameter into the current bucket. If the bucket is full, pack its gradients, begin "
            "`all_reduce` with `async_op=True`, remember what it returned, and start an empty bucket."
        ),
        (
            "`finish` sends the bucket that is left, then for each: `work.wait()`, divide, copy the parts "
            "back into the gradients. Empty both lists, for the next step."
        ),
    ),
)


EXERCISES = (_AVERAGE, _OVERLAP, SHARE)
