"""`plan.search`: which layouts of a world fit, and which of them is the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from axon_nb.errors import UsageError
from axon_nb.plan.communication_call import traffic_of
from axon_nb.plan.communication_layout import Layout
from axon_nb.plan.links import Link
from axon_nb.plan.search_memory import MemoryEstimate, estimated_memory
from axon_nb.plan.search_plan import Candidate, SearchPlan
from axon_nb.plan.step_time_call import predicted
from axon_nb.plan.step_time_model import Given
from axon_nb.plan.step_time_trace import ModelTrace, trace_model
from axon_nb.plan.step_time_work import Rates, as_rates

__all__ = ["search"]

_GIB = 1024.0**3


def search(
    model: Any,
    gpus: int,
    memory: float,
    *,
    rates: Rates | float | Any,
    links: Link | str | Mapping[str, Link | str] | Any,
    batch: int,
    seq: int | None = None,
    inputs: Any = None,
    target: Any = None,
    loss: Callable[..., torch.Tensor] | None = None,
    optimizer: Callable[..., Optimizer] | str = "AdamW",
    strategies: Sequence[str] = ("ddp", "shard_grad_op", "full_shard"),
    largest_tp: int = 8,
    overlap: float = 1.0,
    estimate: MemoryEstimate = estimated_memory,
) -> SearchPlan:
    """Layouts (dp, tp, pp, strategy, microbatches, recomputing) of some GPUs, those that fit and the fastest first.

        plan.search(GPTConfig(hidden=4096, heads=32, blocks=32, context=2048, vocab=50304), 64, 80, batch=128,
                    rates=400e12, links={"pp": "ib-ndr", "dp": "ib-ndr", "tp": "nvlink4"})

    Args:
        model: As in `communication`; a pipeline is looked at where the model is a Sequential, and ``tp`` as
            `parallelize` cuts it by itself.
        gpus: Number of ranks; all are used.
        memory: GiB that each has.
        rates: As in `step_time`.
        links: As in `communication`, of the axes ``dp``, ``tp`` and ``pp``.
        batch: Samples of a step over all ranks; the data axis divides it.
        seq: Tokens of a sample.
        inputs: What the model is called with, described so that ``"batch"`` stands for a rank's samples; not needed
            with a GPTConfig.
        target: The same, for the loss.
        loss: From output and target, or from the output alone.
        optimizer: Made from parameters, or the name of one of torch's.
        strategies: Of the data axis.
        largest_tp: Ranks along ``tp`` at most, such as those of a node.
        overlap: As in `step_time`.
        estimate: Bytes by part that the fullest rank of a layout needs.

    Raises:
        UsageError: the numbers make no sense, or the model cannot be traced.
    """
    if gpus < 1 or gpus != int(gpus) or not memory > 0 or batch < 1:
        raise UsageError(f"gpus={gpus}, memory={memory} GiB, batch={batch}: each is above 0, GPUs and batch whole.")
    subject: dict[str, Any] = {"inputs": inputs, "target": target, "loss": loss, "seq": seq}
    traces: dict[int, ModelTrace] = {}
    found = []
    for mesh, strategy, microbatches, recompute in _layouts(gpus, batch, strategies, largest_tp):
        options = {**subject, "batch": batch // mesh["dp"], "mesh": mesh, "strategy": strategy}
        if microbatches is not None:
            options["microbatches"] = microbatches
        plain = Candidate(mesh["dp"], mesh["tp"], mesh["pp"], strategy, microbatches or 1, recompute)
        try:
            if traces and mesh["dp"] not in traces:
                traces[mesh["dp"]] = _other_batch(
                    next(iter(traces.values())), Given(model, batch=batch // mesh["dp"], **subject)
                )
            layout = Layout.of(model, None, options, optimizer, recompute=recompute, known=traces.get(mesh["dp"]))
        except UsageError as error:
            if not traces and mesh == {"pp": 1, "dp": gpus, "tp": 1}:
                raise
            found.append(plain.rejected(str(error)))
            continue
        if not layout.trace.called:
            raise UsageError("how long a step takes depends on the batch: give inputs=, described by shapes.")
        traces[mesh["dp"]] = layout.trace
        if mesh["tp"] > 1 and not layout.styles:
            found.append(plain.rejected("tp cuts nothing of this model"))
            continue
        need = estimate(layout)
        step = predicted(layout, traffic_of(layout, links), as_rates(rates), overlap)
        found.append(plain.judged(need, step.total_s, memory * _GIB))
    if not found:
        raise UsageError(f"batch={batch} on {gpus} GPUs: no data axis divides it; take a multiple of {gpus}.")
    title = f"{gpus} GPUs of {memory:g} GiB, {batch} samples a step"
    return SearchPlan(title, tuple(sorted(found, key=lambda one: (not one.fits, one.reason != "", one.rank_key))))


def _other_batch(known: ModelTrace, given: Given) -> ModelTrace:
    """The trace of another batch; what the optimizer does is the same."""
    trace = trace_model(given)
    trace.grad_uses = known.grad_uses
    trace.work |= {phase: work for phase, work in known.work.items() if phase == "optimizer"}
    return trace


def _layouts(
    gpus: int, batch: int, strategies: Sequence[str], largest_tp: int
) -> Iterator[tuple[dict[str, int], str, int | None, bool]]:
    for tp in (n for n in range(1, min(gpus, largest_tp) + 1) if gpus % n == 0):
        for pp in (n for n in range(1, gpus // tp + 1) if gpus // tp % n == 0):
            dp = gpus // tp // pp
            if batch % dp:
                continue
            counts = [m for m in (pp, 2 * pp, 4 * pp, 8 * pp) if batch // dp % m == 0] if pp > 1 else [None]
            # One data rank shards nothing; a pipeline keeps parameters whole in a step, so full_shard is shard_grad_op.
            chosen = strategies if pp == 1 else [name for name in strategies if name != "full_shard"]
            for strategy in chosen if dp > 1 else list(chosen)[:1]:
                for count in counts:
                    for recompute in (False, True):
                        yield {"pp": pp, "dp": dp, "tp": tp}, strategy, count, recompute
