"""Walks the register of private hooks: which of them the installed versions lack, and what is lost without them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from axon_nb.engine.self_test.catalog import CHECKS
from axon_nb.records.hooks import Hook, groups, hook, missing_hooks


def walk(*, with_optional: bool = False) -> dict[str, Any]:
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
