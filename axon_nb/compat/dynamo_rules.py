"""torch.compile leaves our own code alone. A private hook into torch: what Dynamo skips is a list of its own.

Where a compiled model communicates, Dynamo would compile the methods of recoverable groups with it, and fails: their
objects are opaque to it.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["leave_alone", "missing_dynamo_hooks"]

_PACKAGES = ("axon_nb.comm", "axon_nb.engine", "axon_nb.records")


def missing_dynamo_hooks(trace_rules: ModuleType) -> list[str]:
    """Names of the hooks that this torch does not have.

    Args:
        trace_rules: The module ``torch._dynamo.trace_rules``.
    """
    return [] if hasattr(trace_rules, "add") else ["trace_rules.add"]


def leave_alone(trace_rules: ModuleType) -> None:
    """Have Dynamo run what is below ranks as it is, instead of compiling it.

    Args:
        trace_rules: The module ``torch._dynamo.trace_rules``, just imported.
    """
    if not missing_dynamo_hooks(trace_rules):
        for package in _PACKAGES:
            trace_rules.add(package)
