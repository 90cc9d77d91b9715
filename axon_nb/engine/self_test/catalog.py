"""Every capability that the self-test checks: its name, what it does, what is lost without it, and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from axon_nb.engine.self_test import checks, single_checks
from axon_nb.records.capability import Capability
from axon_nb.records.tested_versions import install_line

__all__ = ["CHECKS", "Check", "failed", "passed"]


@dataclass(frozen=True, slots=True)
class Check:
    """How one capability is tried."""

    name: str
    label: str
    lost: str
    body: Callable[..., Any]
    """Called in each process of the check with a `checks.Place`; raises when the capability does not work."""
    num_ranks: int = 2
    package: str = "torch"
    """What another version of may bring it back."""


CHECKS = (
    Check(
        "release",
        "end a collective that waits for a missing rank",
        "when a rank fails, the others wait for it until the collective times out, and the session needs a restart",
        checks.release,
    ),
    Check(
        "rebuild",
        "connect the same groups again after a failure",
        "after a failed cell the groups cannot be used, and the session needs a restart",
        checks.rebuild,
    ),
    Check(
        "repair",
        "replace a dead rank in all of its groups",
        "`%distributed repair` cannot replace a dead rank",
        checks.repair,
    ),
    Check(
        "ddp_reset",
        "train on with a DDP model after an aborted step",
        "DDP models must be built again after a failed cell",
        checks.ddp_reset,
    ),
    Check(
        "fsdp2_reset",
        "train on with an FSDP2 model after an aborted step",
        "FSDP2 models must be built again after a failed cell",
        checks.fsdp2_reset,
    ),
    Check(
        "pipeline_reset",
        "train on with a pipeline after an aborted step",
        "pipelines must be built again after a failed cell",
        checks.pipeline_reset,
    ),
    Check(
        "size_check",
        "compare sizes before data flows",
        "tensors of different sizes in one collective can crash a rank",
        checks.size_check,
    ),
    Check(
        "backend_swap",
        "put a fresh backend under an existing group, as NCCL recovery does",
        "on NCCL the groups cannot be used after a failed cell",
        checks.backend_swap,
    ),
    Check(
        "whole_steps",
        "let an optimizer finish its step before an interrupt",
        "an interrupt can tear an optimizer's step",
        single_checks.whole_steps,
        num_ranks=1,
    ),
    Check(
        "interrupts",
        "interrupt code that swallows every exception",
        "a loop that catches every exception can only be ended by replacing its rank",
        single_checks.interrupts,
        num_ranks=1,
    ),
    Check(
        "kernel_hooks",
        "run cells, interrupts and live views on an engine's kernel",
        "interrupts, live views and the output of a lost notebook may be incomplete",
        single_checks.kernel,
        num_ranks=1,
        package="ipykernel",
    ),
    Check(
        "short_tracebacks",
        "shorten long tracebacks",
        "tracebacks of deep recursions are shown in full",
        single_checks.short_tracebacks,
        num_ranks=1,
        package="ipython",
    ),
    Check(
        "sharding_views",
        "see where the parts of a sharded tensor lie",
        "`%shards` and `%memory` do not know the offsets of sharded tensors",
        single_checks.sharding_views,
        num_ranks=1,
    ),
    Check(
        "pipeline_spans",
        "record what each pipeline stage does",
        "pipelines train, but the timeline shows no stages",
        single_checks.pipeline_spans,
        num_ranks=1,
    ),
    Check(
        "mock_worlds",
        "run several ranks inside one process",
        "`World.mock` refuses to run",
        single_checks.mock_worlds,
        num_ranks=1,
    ),
    Check(
        "simulation",
        "run a training step without data",
        "`plan.memory` has only its formulas, `method='closed_form'`",
        single_checks.simulation,
        num_ranks=1,
    ),
)
"""In the order in which they run and are shown."""


def passed(check: Check) -> Capability:
    """The verdict on a check that passed."""
    return Capability(check.name, check.label, works=True, lost=check.lost)


def failed(check: Check, reason: str) -> Capability:
    """The verdict on a check that failed for `reason`."""
    fix = install_line(check.package)
    return Capability(check.name, check.label, works=False, lost=check.lost, reason=reason, fix=fix)
