"""Every capability that the self-test checks: what it does, and what is lost without it.

The check itself is the function of the same name in `checks` or, with one rank, in `single_checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from axon_nb.records.compatibility import Capability, install_command

__all__ = ["CHECKS", "OUT_OF_TIME", "Check", "failed", "is_timeout", "passed"]

OUT_OF_TIME = "not done after"


@dataclass(frozen=True, slots=True)
class Check:
    """One capability, and how many processes try it."""

    name: str
    label: str
    lost: str
    num_ranks: int = 2
    package: str = "torch"
    """What another version of may bring it back."""


CHECKS = (
    Check(
        "release",
        "end a collective that waits for a missing rank",
        "when a rank fails, the others wait for it until the collective times out, and the session needs a restart",
    ),
    Check(
        "rebuild",
        "connect the same groups again after a failure",
        "after a failed cell the groups cannot be used, and the session needs a restart",
    ),
    Check(
        "repair",
        "replace a dead rank in all of its groups",
        "`%distributed repair` cannot replace a dead rank",
    ),
    Check(
        "ddp_reset",
        "train on with a DDP model after an aborted step",
        "DDP models must be built again after a failed cell",
    ),
    Check(
        "fsdp2_reset",
        "train on with an FSDP2 model after an aborted step",
        "FSDP2 models must be built again after a failed cell",
    ),
    Check(
        "pipeline_reset",
        "train on with a pipeline after an aborted step",
        "pipelines must be built again after a failed cell",
    ),
    Check(
        "size_check",
        "compare sizes before data flows",
        "tensors of different sizes in one collective can crash a rank",
    ),
    Check(
        "backend_swap",
        "put a fresh backend under an existing group, as NCCL recovery does",
        "on NCCL the groups cannot be used after a failed cell",
    ),
    Check(
        "whole_steps",
        "let an optimizer finish its step before an interrupt",
        "an interrupt can tear an optimizer's step",
        num_ranks=1,
    ),
    Check(
        "interrupts",
        "interrupt code that swallows every exception",
        "a loop that catches every exception can only be ended by replacing its rank",
        num_ranks=1,
    ),
    Check(
        "kernel_hooks",
        "run cells, interrupts and live views on an engine's kernel",
        "interrupts, live views and the output of a lost notebook may be incomplete",
        num_ranks=1,
        package="ipykernel",
    ),
    Check(
        "short_tracebacks",
        "shorten long tracebacks",
        "tracebacks of deep recursions are shown in full",
        num_ranks=1,
        package="ipython",
    ),
    Check(
        "sharding_views",
        "see where the parts of a sharded tensor lie",
        "`%shards` and `%memory` do not know the offsets of sharded tensors",
        num_ranks=1,
    ),
    Check(
        "pipeline_spans",
        "record what each pipeline stage does",
        "pipelines train, but the timeline shows no stages",
        num_ranks=1,
    ),
    Check(
        "mock_worlds",
        "run several ranks inside one process",
        "`World.mock` refuses to run",
        num_ranks=1,
    ),
    Check(
        "simulation",
        "run a training step without data",
        "`plan.memory` has only its formulas, `method='closed_form'`",
        num_ranks=1,
    ),
)
"""In the order in which they run and are shown."""


def is_timeout(reason: str) -> bool:
    """Whether a check failed because it took too long, as on a busy machine, or as a wait that nothing ends."""
    # The limits of Gloo and of the store, 20 s, come before ours of 30 s, and in words of their own.
    return reason.startswith(OUT_OF_TIME) or any(words in reason.lower() for words in ("timeout", "timed out"))


def passed(check: Check) -> Capability:
    """The verdict on a check that passed."""
    return Capability(check.name, check.label, works=True, lost=check.lost)


def failed(check: Check, reason: str) -> Capability:
    """The verdict on a check that failed for `reason`."""
    fix = install_command(check.package)
    return Capability(check.name, check.label, works=False, lost=check.lost, reason=reason, fix=fix)
