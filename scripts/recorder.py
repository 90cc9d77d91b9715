"""Record what the commands print and show, on two ranks of a real kernel; compare two such records.

`python -m scripts.recorder FILE` writes one, outside the repository; `python -m scripts.recorder --compare A B` prints
each step whose record differs. A refactoring leaves them equal, or its commit names the differences that are meant.
Times, ids, paths, addresses and numbers of bytes are normalised.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axon_nb.cli import _COMMANDS as PROGRAM_COMMANDS
from axon_nb.magics.arguments import EXAMPLES
from tests.support.kernel import Kernel
from tests.support.records.cell_reply import Reply

_TRAIN = """%%distributed
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
loss = ddp(torch.ones(3, 4)).square().mean()
loss.backward(); optimizer.step(); optimizer.zero_grad()
print(f"loss {loss.item():.4f}")"""
_SCRIPT = """import torch
import torch.distributed as dist
dist.init_process_group()
total = torch.ones(2)
dist.all_reduce(total)
print("total", total.tolist())
dist.destroy_process_group()
"""
_CELLS = """
%d | %d status | %d no_such_command | %d strat | %d help | %d help no-cluster | %d start -n 0
%d start -n 2 --backend tcp | %d start -n 2 --hosts nowhere | %d start -n 2 --name recorded | %d start -n 2 | %d
%d status | %d config | %d config undo_memory=32MiB threads=1 | %d config undo_memory=many
%d config undo_memroy=1MiB | %%distributed¶print('hello from', rank, 'of', world_size) | %%distributed¶rank * 10
%%distributed --ranks 1 --out result¶x = torch.full((2,), float(rank)); x | print(repr(result)); result
%%rank 0¶print(device) | %%rank 7¶1 | %%distributed --rnaks 0¶1 | %%distributed --quiet¶print('not shown')
%%distributed¶raise ValueError(f'bad value {rank}') | %%distributed --ranks 1¶1 / 0 | %%distributed¶x = (
%%distributed --timeout 1¶import time; time.sleep(60) | %%distributed¶if rank == 0: dist.all_reduce(torch.ones(2))
%%distributed¶y = torch.ones(2) * rank; dist.all_reduce(y); print(y.tolist())
%%distributed¶dist.all_reduce(torch.ones(2 + rank)) | %%distributed --time¶sum(range(1000)) | TRAIN | %d vars
%d diff x | %d diff y | %d diff missing | %d stacks | %d explain | %d sync model optimizer | %d seed 0 --per-rank
%d seed many | %d slow | %d slow --ranks 1 --factor 2 | %d slow --ranks 1 | %d slow off | %%distributed¶count = 1
%%distributed¶count += 1; print(count) | %d undo | %d undo 0 | %%distributed --try¶count = 100; print(count)
%%distributed --ranks 0¶print(count) | %%distributed --branch lr=0.1,0.5¶axon_nb.log(loss=lr * 2); print(lr)
%%distributed --branch lr=0.1,0.5 --keep best:loss¶axon_nb.log(loss=lr * 2)
%%distributed --compare¶model(torch.ones(2, 4)).sum().item()
%%distributed --compare model¶ddp(torch.ones(2, 4)).sum().backward()
data = list(range(6)); big = __import__('numpy').arange(4.0)¶%push data big | %push missing | %scatter data
%pull data --as everyone¶print(everyone) | %pull data --ranks 0 | %pull data¶%pull missing
%gather data --as joined¶print(joined) | %pull data[0] | %shards model optimizer | %shards missing
%memory model optimizer | %watch | %timeline --save timeline.json | %timeline --save page.html
%timeline --cell 99 | %inside missing
%%plan -n 4¶ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))¶ddp(torch.ones(8)).sum().backward()
%d auto | %d auto on --ranks 0 | print('auto', rank) | %d auto off | %d run train.py | %d run missing.py
%d import train.py --force | %d export exported.py --force | print(open('exported.py').read()) | %d debug
%d cancel | %%distributed --noblock --out later¶rank + 1 | later.wait(); print(later)
%d attach | %d save saved | %d load saved | %d load missing
%d config protect=on | TRAIN | %%distributed --ranks 1¶import os, signal; os.kill(os.getpid(), signal.SIGKILL)
%d status | %d repair | %d repair --ranks 9 | %d config protect=off | %d resize 1 | %d resize 2 | %d rename digits
%d rename a/b | %d config share=on
"""
"""Separated by ` | ` and lines; `%d` is `%distributed`, ¶ a new line, and TRAIN the cell above."""
_PROGRAMS = """
status digits --json | status digits | explain digits --json | stacks digits --json | vars digits --json
logs digits --json | interrupt digits --json | run 1+1 --cluster digits --json | pull count --cluster digits --json
diff y --cluster digits --json | repair --cluster digits --json | import train.py --force | help no-cluster
plan 125m --ranks 2 --card h100 --top 2 | stauts
"""
_END = ("%distributed restart", "%distributed stop", "%distributed stop")
_SUBS = (
    (r"\x1b\[[0-9;]*m", ""),
    (r'src=\\?"data:[^"]*"', 'src="PICTURE"'),
    (r"(?m)^([01]) +\d+ +(?=cpu|idle)", r"\1 NUMBER "),
    (r"slowest: rank \d", "slowest: rank N"),
    (r"(/[\w.+~-]+){2,}/?", "/PATH"),
    (r"\b\d+(\.\d+)?(e-?\d+)? ?([KMGT]i?B|bytes|B)(/s)?\b", "BYTES"),
    (r"\b\d+(\.\d+)? ?(ms|µs|us|ns|s|min|h|seconds?|minutes?)\b", "TIME"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?\S*", "DATE"),
    (r"\b\d\d:\d\d(:\d\d)?\b", "CLOCK"),
    (r"0x[0-9a-f]+", "0xADDRESS"),
    (r"\b[0-9a-f]{8}-[0-9a-f-]{20,}\b|\b[0-9a-f]{12,}\b|\b[0-9a-f]*\d[0-9a-f]*-[0-9a-f]{6,}\b", "ID"),
    (r"\b(pid|process|PID)[ =]\d+", r"\1 NUMBER"),
    (r"(\d+\.\d+){2,}", "VERSION"),
    (r"\d+\.\d+ ?%", "SHARE"),
    (r'("?\b\w*(_s|_bytes|_at|pid|seconds|port|bytes|time|memory|start|end|rss|since)"?: )-?[\d.e+-]+', r"\1NUMBER"),
    (r"(?<![\w.])-?\d+\.\d+(e-?\d+)?|\b\d{4,}\b", "NUMBER"),
    (r"[ \t]+", " "),
)
_LONG = 40_000
_DIFF_HEAD = ("---", "+++", "@@")
_PICTURE = "axon-picture"
_VIEWS = {"%memory": "memory of", "%shards": "shards", "%watch": "Job on"}
"""What the picture of a live view has in its title."""


def main() -> int:
    """Record, or compare two records; returns 1 if they differ."""
    parser = argparse.ArgumentParser(prog="python -m scripts.recorder", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--compare", action="store_true", help="print what differs between two records")
    options = parser.parse_args()
    if options.compare:
        first, second = (json.loads(file.read_text(encoding="utf-8")) for file in options.files)
        return compare(first, second)
    with tempfile.TemporaryDirectory() as folder:
        found = record(Path(folder))
    options.files[0].write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
    print(f"{len(found)} steps in {options.files[0]}")
    return 0


def record(folder: Path) -> dict[str, Any]:
    """Run all steps in a folder; return the record of each by number and text."""
    (folder / "train.py").write_text(_SCRIPT, encoding="utf-8")
    magics = {f"{one} --help" if one.startswith("%") else f"%distributed {one} --help" for one in EXAMPLES}
    bad = {text.replace("--help", "--no-such") for text in magics}
    steps: dict[str, Any] = {}

    def keep(text: str, found: Any) -> None:
        steps[f"{len(steps):03} {text}"] = found

    with Kernel(cwd=folder) as kernel:
        kernel.load_and_warm_up()
        for text in sorted(magics | bad):
            keep(text, shown(kernel.run(f"{text}\n1" if text.startswith("%%") else text)))
        for part in parts_of(_CELLS):
            text = _TRAIN if part == "TRAIN" else re.sub(r"^%d\b", "%distributed", part).replace("¶", "\n")
            keep(text, shown(kernel.run(text), _VIEWS.get(text.split()[0], "")))
        for text in [*parts_of(_PROGRAMS), *(f"{name} --help" for name in sorted(PROGRAM_COMMANDS))]:
            keep(f"axon-nb {text}", program(kernel, folder, text.split(" ")))
        for text in _END:
            keep(text, shown(kernel.run(text)))
    return steps


def parts_of(text: str) -> list[str]:
    """Return the steps that a text lists."""
    return [part for line in text.strip().splitlines() for part in line.split(" | ")]


def program(kernel: Kernel, folder: Path, words: list[str]) -> dict[str, Any]:
    """Run `axon-nb` beside the kernel; return its exit status and what it printed."""
    command = [sys.executable, "-m", "axon_nb.cli", *words]
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": path}
    done = subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return {"status": done.returncode, "stdout": lines_of(done.stdout), "stderr": lines_of(done.stderr)}


def shown(reply: Reply, title: str = "") -> dict[str, Any]:
    """Return what a cell showed, as lines without what differs from run to run.

    Args:
        reply: Of the kernel.
        title: What is in the titles of its own pictures; a live view of an earlier cell may redraw its own meanwhile.
    """
    streams = {"stdout": reply.stdout, "stderr": reply.stderr, "result": reply.result, "traceback": reply.traceback}
    found: dict[str, Any] = {name: lines_of(text) for name, text in streams.items() if text}
    others = [data for data in reply.displays if _PICTURE in str(data) and not (title and title in str(data))]
    found["displays"] = [shown_data(data) for data in reply.displays if data not in others]
    found["status"] = reply.status
    found["kinds"] = sorted({kind for _, kind, _ in reply.arrivals} - {"comm_msg", "update_display_data"})
    return found


def shown_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bundle of displayed data: texts and HTML normalised, of others which kinds and keys there are."""
    return {kind: lines_of(value) if isinstance(value, str) else keys_of(value) for kind, value in data.items()}


def keys_of(value: Any) -> Any:
    """Return plain data with the types of its values in their place."""
    if isinstance(value, dict):
        return {lines_of(str(key))[0] if key else key: keys_of(one) for key, one in value.items()}
    if isinstance(value, list):
        return [keys_of(value[0])] if value else []
    return type(value).__name__


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without ids, times, paths and numbers that differ from run to run."""
    for pattern, placeholder in _SUBS:
        text = re.sub(pattern, placeholder, text[:_LONG])
    lines = [line.strip() for line in re.sub(r">\s*<", ">\n<", text).splitlines() if line.strip()]
    return [line for _, run in itertools.groupby(lines, lambda one: one.startswith("[rank")) for line in _sorted(run)]


def _sorted(lines: Iterable[str]) -> list[str]:
    found = list(lines)
    return sorted(found) if found[0].startswith("[rank") else found


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    """Print the steps whose records differ, with the lines."""
    differing = [step for step in sorted(first.keys() | second.keys()) if first.get(step) != second.get(step)]
    for step in differing:
        print(f"== {step}")
        print("\n".join(_changes(first.get(step), second.get(step))))
    print(f"{len(differing)} of {len(first)} steps differ")
    return int(bool(differing))


def _changes(before: Any, after: Any) -> Iterable[str]:
    old, new = (json.dumps(one, indent=1, sort_keys=True).splitlines() for one in (before, after))
    return [line for line in difflib.unified_diff(old, new, n=1, lineterm="") if not line.startswith(_DIFF_HEAD)]


if __name__ == "__main__":
    sys.exit(main())
