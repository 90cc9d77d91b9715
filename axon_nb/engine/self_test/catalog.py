"""Every capability that the self-test checks and every private hook: what it does, and what is lost without it.

The check itself is the function of the same name in `checks` or, for a single rank, in `runner`. Walking the register
of hooks shows which of them the installed versions lack.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from msgspec import Struct

from axon_nb.records.hooks import Capability, Hook, groups, hook, install_command, missing_hooks


class Check(Struct, frozen=True):
    """One capability, and the number of processes that try it."""

    name: str
    label: str
    lost: str
    num_ranks: int = 2
    package: str = "torch"
    """The package of which another version may restore it."""


CHECKS = (
    Check(
        "release",
        "abort a collective that waits for a missing rank",
        "when a rank fails, the others wait for it until the collective times out, and the session needs a restart",
    ),
    Check(
        "rebuild",
        "connect the same groups again after a failure",
        "after a failed cell the groups cannot be used, and the session needs a restart",
    ),
    Check(
        "shared_memory",
        "communicate through shared memory, and go on after an abort",
        "ranks on one host communicate through Gloo's sockets",
    ),
    Check(
        "repair",
        "replace a dead rank in all of its groups",
        "`%distributed repair` cannot replace a dead rank",
    ),
    Check(
        "ddp_reset",
        "continue training a DDP model after an aborted step",
        "DDP models must be recreated after a failed cell",
    ),
    Check(
        "fsdp2_reset",
        "continue training an FSDP2 model after an aborted step",
        "FSDP2 models must be recreated after a failed cell",
    ),
    Check(
        "pipeline_reset",
        "continue training a pipeline after an aborted step",
        "pipelines must be recreated after a failed cell",
    ),
    Check(
        "size_check",
        "compare sizes before data flows",
        "tensors of different sizes in one collective can crash a rank",
    ),
    Check(
        "backend_swap",
        "swap a fresh backend into an existing group, as NCCL recovery does",
        "on NCCL the groups cannot be used after a failed cell",
    ),
    Check(
        "optimizer_steps",
        "let an optimizer finish its step before an interrupt",
        "an interrupt can leave an optimizer's step half done",
        num_ranks=1,
    ),
    Check(
        "interrupts",
        "interrupt code that swallows every exception",
        "the only way to stop a loop that catches every exception is to replace its rank",
        num_ranks=1,
    ),
    Check(
        "kernel_hooks",
        "run cells, interrupts and live views on an engine's kernel",
        "interrupts, live views and output after a lost connection may be incomplete",
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
        "locate the shards of a distributed tensor",
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
        "`plan.memory` has only its formulas (`method='closed_form'`)",
        num_ranks=1,
    ),
)
"""In the order in which they run and are shown."""


def is_timeout(reason: str) -> bool:
    """Whether a check timed out: the machine was busy, or a wait never ended."""
    # The timeouts of Gloo and of the store (20 s) expire before the runner's (30 s), with messages of their own.
    return any(phrase in reason.lower() for phrase in ("timeout", "timed out", "did not arrive"))


def outcome(check: Check, reason: str = "") -> Capability:
    """Return the verdict on a check that failed for `reason`; empty: it passed."""
    fix = install_command(check.package) if reason else ""
    return Capability(check.name, check.label, works=not reason, lost=check.lost, reason=reason, fix=fix)


def walk_hooks(*, with_optional: bool = False) -> dict[str, Any]:
    """Check every hook; imports what the hooks are in, such as torch and ipykernel.

    Args:
        with_optional: Whether packages that only cells import are imported, too, if they are installed. That takes
            seconds, and some print messages.

    Returns:
        Plain JSON values: ``checked``, the names of the hooks that were checked; ``unused``, those for other versions;
        ``unchecked``, those of packages that are not loaded; ``missing``, a dictionary for each that lacks something.
    """
    verdict: dict[str, Any] = {"checked": [], "unused": [], "unchecked": [], "missing": []}
    for entry in map(hook, groups()):
        if not entry.is_used:
            verdict["unused"].append(entry.group)
            continue
        if entry.if_loaded and not (with_optional and _load(entry)):
            verdict["unchecked"].append(entry.group)
            continue
        verdict["checked"].append(entry.group)
        if names := _missing(entry):
            verdict["missing"].append(_facts(entry, names))
    return verdict


def _load(entry: Hook) -> bool:
    """Import the modules of a hook; returns whether its package is installed."""
    if importlib.util.find_spec(entry.package) is None:
        return False
    for place in (*entry.needs, *entry.objects.values()):
        module, colon, _ = place.partition(":")
        if colon:
            importlib.import_module(module)
    return True


def _missing(entry: Hook) -> list[str]:
    try:
        return missing_hooks(entry.group)
    except Exception as error:  # a check fails where it does not find what it looks at
        return [f"{entry.check}: {type(error).__name__}: {error}"]


def _facts(entry: Hook, missing: list[str]) -> dict[str, Any]:
    check = next((check for check in CHECKS if check.name == entry.capability), None)
    return {
        "group": entry.group,
        "package": entry.package,
        "missing": missing,
        "lost": entry.lost if check is None else check.lost,
        "capability": entry.capability,
        "fix": entry.fix,
        "upstream": entry.upstream,
        "files": list(entry.files),
    }
