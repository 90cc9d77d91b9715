"""What was found, as text for people and issues and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Finding", "Report", "Section", "Severity"]

Severity = Literal["ok", "note", "problem"]
"""``problem``: something fails or will fail here. ``note``: worth knowing, such as what is lost or left over."""

_WIDTH = 110
_MARK: dict[Severity, str] = {"ok": "", "note": "note: ", "problem": "PROBLEM: "}
_USUAL_LABEL = 16
"""Labels up to this length are one column in all sections."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a section."""

    label: str
    """What was looked at, in a word or two."""
    value: str
    """What is there."""
    severity: Severity = "ok"
    message: str = ""
    """What follows from it, a sentence; empty when all is well."""
    fix: str = ""
    """How to mend it on this machine, an imperative; empty when all is well."""

    def __post_init__(self) -> None:
        if self.severity != "ok" and not self.fix:
            raise ValueError(f"{self.label}: a {self.severity} without a fix")


@dataclass(frozen=True, slots=True)
class Section:
    """Findings about one subject."""

    name: str
    findings: tuple[Finding, ...]
    data: Mapping[str, object] = field(default_factory=dict)
    """The same facts for programs: plain values that JSON takes, sizes in bytes, times in seconds."""


@dataclass(frozen=True, slots=True)
class Report:
    """All that was examined."""

    title: str
    sections: tuple[Section, ...]

    @property
    def status(self) -> int:
        """Exit status: 1 when there is a problem, else 0."""
        return int(self._count("problem") > 0)

    def text(self) -> str:
        """For people: what needs action first, then all facts by section."""
        lines = [f"{self.title}: {self.summary}", ""]
        for alike in self._to_mend():
            lines += [*_wrapped(alike), ""]
        labels = [len(finding.label) for finding in self._findings()]
        usual = max((length for length in labels if length <= _USUAL_LABEL), default=0)
        for section in self.sections:
            lines += [section.name, *_table(section.findings, usual), ""]
        return "\n".join(lines).rstrip()

    def json(self) -> str:
        """For programs."""
        content = {
            "title": self.title,
            "problems": self._count("problem"),
            "notes": self._count("note"),
            "sections": {
                section.name: {
                    "findings": [dataclasses.asdict(finding) for finding in section.findings],
                    "data": dict(section.data),
                }
                for section in self.sections
            },
        }
        return json.dumps(content, indent=2)

    @property
    def summary(self) -> str:
        """How many problems and notes there are, in words."""
        counts = [(self._count("problem"), "problem"), (self._count("note"), "note")]
        told = [f"{number} {word}{'s' if number > 1 else ''}" for number, word in counts if number]
        return ", ".join(told) or "no problems"

    def _to_mend(self) -> list[list[Finding]]:
        """What is not ok, problems first; those with one fix together."""
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
    """A paragraph for findings with the same fix."""
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
