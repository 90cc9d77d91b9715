"""Find phrases that CONTRIBUTING's rules of prose rule out, in comments, docstrings, messages and pages.

    python scripts/prose.py                    # all places that are checked
    python scripts/prose.py axon_nb/engine     # these files or folders

It finds the habits that can be recognized; whether a sentence is good is for its author and its reader to say.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CHECKED = (
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs",
    "examples",
    "scripts",
    "axon_nb/comm",
    "axon_nb/compat",
    "axon_nb/doctor",
    "axon_nb/export",
    "axon_nb/host",
    "axon_nb/parallel",
    "axon_nb/plan",
    "axon_nb/records",
    "axon_nb/torch_api",
    "axon_nb/widgets",
)
SKIPPED = ("docs/parity.md", "docs/parity/", "scripts/prose.py")
SUFFIXES = {".py", ".md", ".js", ".mjs", ".css"}

# What is wrong, and what to write instead.
PHRASES: dict[str, str] = {
    r"\banew\b": "again, or re-",
    r"\bafresh\b": "again, or new",
    r"\b(?:is|are|was|were|be|been) told\b(?! apart)": "reported, or the actor: 'the cell reports …'",
    r"\bto be told\b": "reported",
    r"\b(?:tells|telling|told) (?:of|about|that|it|what|which|the|so)\b": "reports, says, shows",
    r"(?<!there )\b(?:is|are|was|were) no (?!\w+er\b|more\b|such|different|worse|one\b|way\b|need\b)": "is not a …",
    r"\b(?:takes|took|taken|take) up\b": "reconnects, continues, accepts",
    r"\bunder way\b": "in progress, running",
    r"\b(?:as|than|what|who|which) has it\b": "says",
    r"\ball the same\b": "anyway",
    r"\bof its own accord\b": "by itself",
    r"\bhas not been tried\b": "is untested",
    r"\bgets? rid of\b": "frees, removes",
    r"\bgives? up its\b": "releases its",
    r"\bbring(?:s)? the same\b": "pass the same",
    r"\bonce (?:a|an|each) (?:second|step|rank|cell|minute|hour)\b": "once per …",
    r"\b(?:times|spans|frames|updates|lines|bytes|steps|[kMG]i?B) a (?:second|minute|rank|step|cell)\b": "per …",
    r"\bin the middle\b": "median",
    r"\bwhere that is possible\b": "if possible",
    r"\bcomes to an end\b": "ends",
    r"\bhad better\b": "should",
    r"\b(?:lives|live) on(?= with|[.,;])": "survives",
    r"\bthe like\b": "similar",
    r"\bwithout a word\b": "silently",
    r"\bby itself alone\b": "alone",
    r"\bmere(?:ly)?\b": "only",
    r"\bthereby\b|\bthereof\b|\btherein\b|\bwhereby\b|\bhereby\b": "a plain word",
    r"\bcan(?:not)? be had\b": "available",
    r"\b(?:is|are) to be (?:had|done|seen)\b": "say who does it",
}
_RULES = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in PHRASES.items()]


def main(arguments: list[str]) -> int:
    """Print each finding; return 1 if there are any."""
    findings = 0
    for path in files(arguments or list(CHECKED)):
        for line, text in passages(path):
            for rule, advice in _RULES:
                for match in rule.finditer(text):
                    number = line + text.count("\n", 0, match.start())
                    found = " ".join(match.group().split())
                    print(f"{path.relative_to(ROOT)}:{number}: {found!r}: write {advice}")
                    findings += 1
    if findings:
        print(f"{findings} phrases to rewrite (CONTRIBUTING.md, Prose)", file=sys.stderr)
    return int(bool(findings))


def files(places: list[str]) -> Iterator[Path]:
    """Yield the files of these places that hold prose."""
    for place in places:
        root = (ROOT / place).resolve()
        if not root.exists():
            raise SystemExit(f"{place} does not exist")
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            relative = path.relative_to(ROOT).as_posix()
            if path.suffix in SUFFIXES and not relative.startswith(SKIPPED) and "/node_modules/" not in relative:
                yield path


def passages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the parts of a file that are prose, each with its first line's number."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, text
    elif path.suffix != ".py":
        # Comments, and strings: sentences that the page shows.
        for match in re.finditer(r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"|`[^`]*`", text, re.DOTALL):
            yield text.count("\n", 0, match.start()) + 1, match.group()
    else:
        comments: list[tuple[int, str]] = []
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                if comments and comments[-1][0] + comments[-1][1].count("\n") + 1 == token.start[0]:
                    comments[-1] = (comments[-1][0], comments[-1][1] + "\n" + token.string)
                else:
                    comments.append((token.start[0], token.string))
            elif token.type in _STRINGS:
                yield token.start[0], token.string
        yield from comments


_STRINGS = {tokenize.STRING, *([tokenize.FSTRING_MIDDLE] if sys.version_info >= (3, 12) else [])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
