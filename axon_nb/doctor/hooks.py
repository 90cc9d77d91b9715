"""Private parts of other packages that axon_nb relies on: which of them are missing here, and what is lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

from axon_nb.doctor.children import Answer
from axon_nb.doctor.report import Finding, Section
from axon_nb.records.hooks import hook

_NAME = "private hooks"


def private_hooks(answer: Answer) -> Section:
    """Report hooks that the installed versions lack.

    Those that a check of the self-test tries are not counted as problems again: its verdict decides whether anything is
    lost.

    Args:
        answer: Result of the child `versions.SELF_TEST`, which walks the register after the self-test.
    """
    facts = answer.content.get("hooks")
    if not isinstance(facts, dict) or "missing" not in facts:
        why = facts.get("failure", "") if isinstance(facts, dict) else answer.failure
        return Section(_NAME, (Finding("all", f"not checked: {why or 'the self-test did not list them'}"),), {})
    missing = [_missing(entry) for entry in facts["missing"]]
    packages = Counter(hook(group).package for group in facts["checked"])
    lacking = {entry["group"] for entry in facts["missing"]}
    there = f"{len(facts['checked']) - len(lacking)} of {len(facts['checked'])} found"
    listed = ", ".join(f"{package} {count}" for package, count in packages.items())
    findings = [*missing, Finding("found" if missing else "all", f"{there} ({listed})")]
    if facts["unchecked"]:
        unloaded = ", ".join(dict.fromkeys(hook(group).package for group in facts["unchecked"]))
        value = f"{len(facts['unchecked'])}, in packages that only cells load: {unloaded}"
        findings.append(Finding("unchecked", value))
    return Section(_NAME, tuple(findings), facts)


def _missing(entry: dict[str, Any]) -> Finding:
    label, value = str(entry["group"]), f"{entry['package']} lacks {', '.join(entry['missing'])}"
    if entry["capability"]:
        return Finding(label, f"{value}; the self-test tries it ({entry['capability']})")
    return Finding(label, value, "problem", f"Lost: {entry['lost']}.", str(entry["fix"]))
