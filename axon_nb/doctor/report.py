"""Findings as text for people and bug reports, and as JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Literal

from msgspec import Struct, field
from msgspec.structs import asdict

from axon_nb.records.units import count_of

Severity = Literal["ok", "note", "problem"]
"""``problem``: something fails or will fail here. ``note``: worth knowing, such as leftovers."""

_WIDTH = 76
_MARK: dict[Severity, str] = {"ok": "", "note": "note: ", "problem": "PROBLEM: "}
_ALIGNED_LABEL_WIDTH = 16
"""Labels up to this length are aligned over all sections."""


class Finding(Struct, frozen=True):
    """One line of a section."""

    label: str
    """What was checked, in a word or two."""
    value: str
    """What was found."""
    severity: Severity = "ok"
    message: str = ""
    """The consequence, as a sentence; empty if all is well."""
    fix: str = ""
    """How to fix it on this machine, as an imperative; empty if all is well."""

    def __post_init__(self) -> None:
        if self.severity != "ok" and not self.fix:
            raise ValueError(f"{self.label}: a {self.severity} without a fix")


class Section(Struct, frozen=True):
    """Findings about one subject."""

    name: str
    findings: tuple[Finding, ...]
    data: Mapping[str, object] = field(default_factory=dict)
    """The same facts as JSON values for programs: sizes in bytes, times in seconds."""


class Report(Struct, frozen=True):
    """Everything that was checked."""

    title: str
    sections: tuple[Section, ...]

    @property
    def status(self) -> int:
        """Exit status: 1 if there is a problem, else 0."""
        return int(self._count("problem") > 0)

    def text(self) -> str:
        """Format for people: what needs action first, then all facts by section."""
        lines = [f"{self.title}: {self.summary}", ""]
        for alike in self._action_needed():
            lines += [*_wrapped(alike), ""]
        labels = [len(finding.label) for finding in self._findings()]
        usual = max((length for length in labels if length <= _ALIGNED_LABEL_WIDTH), default=0)
        for section in self.sections:
            lines += [section.name, *_table(section.findings, usual), ""]
        return "\n".join(lines).rstrip()

    def json(self) -> str:
        """Format for programs."""
        content = {
            "title": self.title,
            "problems": self._count("problem"),
            "notes": self._count("note"),
            "sections": {
                section.name: {
                    "findings": [asdict(finding) for finding in section.findings],
                    "data": dict(section.data),
                }
                for section in self.sections
            },
        }
        return json.dumps(content, indent=2)

    @property
    def summary(self) -> str:
        """Number of problems and notes, in words."""
        counts = [(self._count("problem"), "problem"), (self._count("note"), "note")]
        parts = [count_of(*each) for each in counts if each[0]]
        return ", ".join(parts) or "no problems"

    def _action_needed(self) -> list[list[Finding]]:
        """Findings that are not ok, problems first, grouped by fix."""
        groups: dict[tuple[Severity, str], list[Finding]] = {}
        for finding in self._findings():
            groups.setdefault((finding.severity, finding.fix), []).append(finding)
        return [group for kind in ("problem", "note") for (severity, _), group in groups.items() if severity == kind]

    def _count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self._findings())

    def _findings(self) -> Iterator[Finding]:
        for section in self.sections:
            yield from section.findings


def _wrapped(alike: list[Finding]) -> list[str]:
    """Format findings with the same fix as one paragraph."""
    head = "PROBLEM  " if alike[0].severity == "problem" else "note     "
    lines: list[str] = []
    for finding in alike:
        body = f"{finding.label}: {_sentence(finding.value)} {finding.message}".rstrip()
        lines += _fill(body, " " * 9 if lines else head, " " * 9)
    return [*lines, *_fill(alike[0].fix, f"{' ' * 9}fix: ", " " * 14)]


def _fill(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."


def _table(findings: tuple[Finding, ...], usual: int) -> list[str]:
    if not findings:
        return ["  none"]
    width = max(usual, *(len(finding.label) for finding in findings))
    lines = []
    for finding in findings:
        lines += _fill(f"{_MARK[finding.severity]}{finding.value}", f"  {finding.label:<{width}}  ", " " * (width + 4))
    return lines
