"""Find phrases that CONTRIBUTING's rules of prose rule out, in comments, docstrings, messages, names and pages.

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
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks",
    "course",
    "docs",
    "examples",
    "magics",
    "scripts",
    "tests",
    "axon_nb",
)
SKIPPED = ("benchmarks/results/", "docs/parity.md", "docs/parity/", "scripts/prose.py")
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
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bparcels?\b": "shared block",
    r"\bstand-ins?\b": "a fake, a replacement",
    r"\bfaults that were tried\b": "injected faults",
    r"\bstrikes with\b": "injects",
    # Parts of names, joined by underscores.
    r"(?<![a-z])(?:way_back|parcels?|stand_ins?|told|mended|anew)_|_(?:way_back|parcels?|stand_ins?|told|mended|anew)"
    r"(?![a-z])|\bstand_ins?\b|\bway_back\b": "the field's word",
}
_RULES = [(re.compile(pattern, re.IGNORECASE), advice) for pattern, advice in PHRASES.items()]
_CORRECTIONS = re.compile(r"(?m)^\| instead of \|.*(?:\n\|.*)*")
_FIRST_CELL = re.compile(r"(?m)^\|[^|\n]*\|")


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
        # In a table of what to write instead, the first column holds what is wrong.
        yield 1, _CORRECTIONS.sub(lambda table: _FIRST_CELL.sub("|", table.group()), text)
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
            elif token.type in _STRINGS or (token.type == tokenize.NAME and "_" in token.string):
                yield token.start[0], token.string
        yield from comments


_STRINGS = {tokenize.STRING, *([tokenize.FSTRING_MIDDLE] if sys.version_info >= (3, 12) else [])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
