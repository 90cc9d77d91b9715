"""torch's own rebuilding of groups (`dist._reconfigure`, torch 2.14 and later) against ours, on Gloo.

Run `python -m benchmarks.reconfigure [--quick]` in the project's folder, once per torch: a run replaces the results
for its version. The arms alternate in the same processes, so that machine noise affects all equally.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.pairs import interval
from benchmarks.report import machine, median
from tests.support.agents import serve

__all__ = ["main"]

_CODE = "import sys; from benchmarks.reconfigure_ranks import run_rank; run_rank(*sys.argv[1:])"
_TIMEOUT_S = 240.0
_HEAD = ("measure", "replaced (ours)", "reconfigured in our wrapper", "ratio", "torch's own group")
Ranks = dict[int, Any]


def on_ranks(place: str, body: str, size: int, **arguments: Any) -> Ranks:
    """Run `body` of the module `place` on `size` ranks; return results by rank, without ranks that died or hung."""
    served = serve(entry="", controller=[], owner="benchmarks.reconfigure")
    root = Path(__file__).resolve().parents[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(size):
            values = [place, body, str(rank), str(size), str(served.run_dir.store_socket), folder]
            command = [sys.executable, "-c", _CODE, *values, json.dumps(arguments)]
            with (Path(folder) / f"{rank}.err").open("w") as errors:
                env = {**os.environ, "PYTHONPATH": str(root)}
                processes.append(subprocess.Popen(command, env=env, cwd=root, stderr=errors))
        end = time.monotonic() + _TIMEOUT_S
        for process in processes:
            try:
                process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        found = {}
        for rank in range(size):
            written = Path(folder) / f"{rank}.json"
            if written.exists():
                found[rank] = json.loads(written.read_text())
            else:
                print(f"{body}: rank {rank}: {(Path(folder) / f'{rank}.err').read_text()[-800:]}", file=sys.stderr)
    served.end()
    return found


def slowest(found: Ranks, pick: Callable[[Any], Sequence[float]]) -> list[float]:
    """The slowest rank's milliseconds in each round."""
    return [max(values) * 1e3 for values in zip(*(pick(result) for result in found.values()), strict=True)]


def timed_row(measure: str, arms: Mapping[str, Sequence[float]]) -> list[str]:
    """A row of medians with their ranges, and the median of the rounds' ratios with its 95 % interval."""
    cells = {arm: f"{median(v):.1f} ms ({min(v):.1f} to {max(v):.1f})" for arm, v in arms.items()}
    ratios = [inside / ours for inside, ours in zip(arms["inside"], arms["ours"], strict=True)]
    low, high = interval(ratios)
    ratio = f"{median(ratios):.2f} [{low:.2f}, {high:.2f}]"
    return [measure, cells["ours"], cells["inside"], ratio, cells.get("own", "")]


def leak_rows(found: Ranks, rounds: int) -> list[list[str]]:
    """Growth on the rank that grew most."""
    rows = []
    for what in ("threads", "descriptors", "MiB"):
        gained = {arm: max(r[arm][1][what] - r[arm][0][what] for r in found.values()) for arm in found[0]}
        cells = [f"{gained[arm]:+.{1 if what == 'MiB' else 0}f}" for arm in ("ours", "inside", "own")]
        name = f"{what} gained by a rank in {rounds - 1} rebuilds of one group, {len(found)} ranks"
        rows.append([name, cells[0], cells[1], "", cells[2]])
    return rows


def measured(rounds: int, rebuilds: int) -> list[list[str]]:
    """Build the table's rows."""
    rows = []
    place = "benchmarks.reconfigure_ranks"
    for size in (2, 4):
        found = on_ranks(place, "speed", size, rounds=rounds)
        arms = {arm: slowest(found, lambda r, arm=arm: r[arm]) for arm in found[0]}  # type: ignore[misc]
        rows.append(timed_row(f"rebuilding one aborted group, {size} ranks, {rounds} times", arms))
    found = on_ranks("benchmarks.reconfigure_faults", "many", 4, rounds=rounds)
    arms = {arm: slowest(found, lambda r, arm=arm: r[arm]) for arm in found[0]}  # type: ignore[misc]
    rows.append(timed_row(f"five groups, four not on all ranks, 4 ranks, {rounds} times", arms))
    for size in (2, 4):
        found = on_ranks(place, "blocked", size, rounds=rounds)
        for name in found[0]:
            arms = {
                arm: slowest(found, lambda r, arm=arm, name=name: r[name][arm])  # type: ignore[misc]
                for arm in found[0][name]
            }
            rows.append(timed_row(f"abort in {name} to a correct sum, {size} ranks, {rounds} times", arms))
    for size in (2, 4):
        rows += leak_rows(on_ranks(place, "leaks", size, rounds=rebuilds + 1), rebuilds + 1)
    return rows


def faults(rounds: int) -> dict[str, Ranks]:
    """Each rank's outcome of each fault."""
    place = "benchmarks.reconfigure_faults"
    runs: dict[str, tuple[str, int, dict[str, Any]]] = {
        "a rank comes 5 s late": ("late", 4, {"seconds": 5}),
        "abort after 1 s, a rank never arrives": ("absent", 4, {"where": "store"}),
        "abort after 1 s, a rank never connects": ("absent", 4, {"where": "connecting"}),
        "limit of 2 s, a rank never arrives": ("timed_out", 4, {"seconds": 2}),
        "an abort closes connections late": ("late_close", 4, {}),
        "a rank is killed and replaced": ("killed", 5, {}),
        "aborts at random while rebuilding, ours": ("aborts_at_random", 4, {"arm": "ours", "rounds": 2 * rounds}),
        "aborts at random while rebuilding, reconfigured": (
            "aborts_at_random", 4, {"arm": "inside", "rounds": 2 * rounds},
        ),
        "shrink to 3 ranks and grow to 4": ("resized", 4, {}),
        "torch alone, one collective stuck": ("stuck", 4, {"count": 1}),
        "torch alone, three collectives stuck": ("stuck", 4, {"count": 3}),
    }  # fmt: skip
    return {name: on_ranks(place, body, size, **values) for name, (body, size, values) in runs.items()}


def write(folder: Path, version: str, result: dict[str, Any]) -> str:
    """Save this version's results beside those of others; return the text."""
    path = folder / "reconfigure.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    results[version] = result
    results = dict(sorted(results.items()))
    path.write_text(json.dumps(results, indent=1))
    lines = []
    for name, found in results.items():
        lines += [f"## torch {name}", "", f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
        lines += [f"| {' | '.join(row)} |" for row in found["rows"]]
        lines += ["", "| fault | what the ranks saw |", "|---|---|"]
        lines += [f"| {fault} | {_in_words(said)} |" for fault, said in found["faults"].items()]
        facts = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        lines += ["", f"Measured on {facts}; other jobs were running on the machine.", ""]
    text = "\n".join(lines)
    (folder / "reconfigure.md").write_text(text)
    return text


def _in_words(said: Ranks) -> str:
    """Describe the ranks' outcomes, merging equal ones."""
    same: dict[str, list[str]] = {}
    for rank, outcome in said.items():
        same.setdefault(_rounded(outcome), []).append(str(rank))
    return "<br>".join(f"rank {', '.join(ranks)}: {outcome}" for outcome, ranks in same.items())


def _rounded(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_rounded(item)}" for key, item in value.items())
    if isinstance(value, list):
        return f"({', '.join(_rounded(item) for item in value)})"
    if isinstance(value, float):
        return f"{value:.2f}"
    return str(value).replace("|", "/")


def main() -> None:
    """Run all measurements, print the tables and write them to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, as a smoke test")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    version = torch.__version__.split("+")[0]
    if tuple(int(number) for number in version.split(".")[:2]) < (2, 14):
        parser.error(f"torch {version} has no `_reconfigure`; use 2.14 or later")
    rounds, rebuilds = (3, 5) if options.quick else (20, 100)
    result = {"machine": machine(), "rows": measured(rounds, rebuilds), "faults": faults(rounds)}
    print(write(options.out, version, result))


if __name__ == "__main__":
    main()
