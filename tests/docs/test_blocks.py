"""The code blocks of README and of the how-to pages run as written, and print what the pages show.

Blocks of `python` are cells of one kernel, blocks of `bash` run in a shell; all work in one folder for each page. A
block of `output` shows lines that must appear, in this order; `…` stands for anything within a line. What cannot run
has a comment with the reason before it: `<!-- not run: needs two GPUs -->`; what needs a package that may be missing,
its name: `<!-- needs: wandb -->`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.generated_page import ROOT
from tests.support.kernel import Kernel

PAGES = [
    "README.md",
    "docs/start/first_minutes.md",
    *sorted(f"docs/howto/{p.name}" for p in (ROOT / "docs/howto").glob("*.md")),
]
_FENCE = re.compile(
    r"(?:<!-- (?:not run: (?P<reason>.+?)|needs: (?P<package>\w+)) -->\n+)?"
    r"^```(?P<kind>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LIMIT_S = 120


@dataclass
class Block:
    """A code block, and the lines that it must show."""

    kind: str
    text: str
    reason: str = ""
    """Why it cannot run; empty: it can."""
    shown: str = ""


def blocks(text: str) -> list[Block]:
    """The blocks of a page that are code."""
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        if match["kind"] == "output":
            found[-1].shown = match["text"]
        elif match["kind"] in ("python", "bash"):
            package = match["package"]
            missing = f"needs {package}" if package and find_spec(package) is None else ""
            found.append(Block(match["kind"], match["text"].rstrip("\n"), match["reason"] or missing))
    return found


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    """A kernel for all pages; each begins without a cluster."""
    with Kernel() as kernel:
        yield kernel


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_blocks_run_as_written(name: str, kernel: Kernel, tmp_path: Path) -> None:
    found = blocks((ROOT / name).read_text(encoding="utf-8"))
    kernel.ok(f"%reset -f\n%cd -q {tmp_path}\n%load_ext axon_nb")
    try:
        for block in found:
            if not block.reason:
                check(block, run_cell(kernel, block) if block.kind == "python" else run_shell(block, tmp_path))
    finally:
        kernel.run("import axon_nb\n%load_ext axon_nb\n%distributed stop")


def run_cell(kernel: Kernel, block: Block) -> str:
    """What a cell prints, its error included; it may fail only where the page shows an error."""
    reply = kernel.run(block.text, timeout=_LIMIT_S)
    text = "\n".join(
        [reply.stdout, reply.stderr, str(reply.result or ""), *map(_shown, reply.displays), reply.traceback]
    )
    assert reply.ok or re.search(r"^\w*(Error|Interrupt)\b", block.shown, re.MULTILINE), f"{block.text}\n{text}"
    return text


def _shown(bundle: dict[str, str]) -> str:
    """The text of a display, its HTML's included."""
    return f"{bundle.get('text/plain', '')}\n{re.sub('<[^>]+>', ' ', bundle.get('text/html', ''))}"


def run_shell(block: Block, folder: Path) -> str:
    """What a shell prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", block.text],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout}"
    return done.stdout


def check(block: Block, text: str) -> None:
    """All lines that the page shows are in the text, in this order."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    rest = iter(lines)
    for line in filter(None, map(str.strip, block.shown.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))))
        assert any(pattern.search(other) for other in rest), f"{block.text}\nno {line!r} in order in:\n" + "\n".join(
            lines
        )


def test_code_blocks_are_extracted() -> None:
    page = "a\n```python\n1\n```\n\n```output\n2\n```\n<!-- not run: no GPU -->\n```bash\nls\n```\n```text\nx\n```\n"
    assert blocks(page) == [Block("python", "1", "", "2\n"), Block("bash", "ls", "no GPU")]
    page = "<!-- needs: unicorn -->\n```python\n1\n```\n<!-- needs: pytest -->\n```python\n2\n```\n"
    assert [block.reason for block in blocks(page)] == ["needs unicorn", ""]


@pytest.mark.parametrize(("shown", "text", "right"), [("a…c\nd", "x\nabc\nd", True), ("d\na", "a\nd", False)])
def test_lines_are_compared_in_order(shown: str, text: str, right: bool) -> None:
    block = Block("python", "", shown=shown)
    if right:
        check(block, text)
    else:
        with pytest.raises(AssertionError, match="in order"):
            check(block, text)
