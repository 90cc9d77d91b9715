"""Keeps torch.compile from compiling our own code, by a private hook: Dynamo's list of skipped code.

If a compiled model communicates, Dynamo would also try to compile the methods of recoverable groups and fail, because
their objects are opaque to it.
"""

from __future__ import annotations

from types import ModuleType

__all__ = ["missing_dynamo_hooks", "skip_axon_nb_code"]

_PACKAGES = ("axon_nb.comm", "axon_nb.engine", "axon_nb.records")


def missing_dynamo_hooks(trace_rules: ModuleType) -> list[str]:
    """Names of the hooks that this torch does not have.

    Args:
        trace_rules: The module ``torch._dynamo.trace_rules``.
    """
    return [] if hasattr(trace_rules, "add") else ["trace_rules.add"]


def skip_axon_nb_code(trace_rules: ModuleType) -> None:
    """Make Dynamo run our communication code as it is instead of compiling it.

    Args:
        trace_rules: The module ``torch._dynamo.trace_rules``, just imported.
    """
    if not missing_dynamo_hooks(trace_rules):
        for package in _PACKAGES:
            trace_rules.add(package)
