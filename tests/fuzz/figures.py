"""What a run of rounds comes to: a table and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import machine, median, percentile
from tests.fuzz.rounds import Outcome

RECORD = Path("benchmarks/results")
RECORD_FAULTS = 1000
SCRATCH = Path("out/fuzz")

_LEGEND = (
    "4 ranks with DDP, FSDP2, tensor parallel and two pipelines alive throughout; time from the fault (the last "
    "interrupt) to the end of the cell, with groups rebuilt. A step apart: some ranks had ended a step of an "
    "object in which another failed."
)


def _row(kind: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    times = [outcome.control_s for outcome in outcomes]
    return {
        "kind": kind,
        "faults": len(outcomes),
        "median_s": median(times),
        "p95_s": percentile(times, 95),
        "max_s": max(times),
        "steps_apart": sum(outcome.apart for outcome in outcomes),
        "failures": sum(bool(outcome.problems) for outcome in outcomes),
    }


def figures_folder(num_faults: int, *, all_kinds: bool) -> Path:
    """Return where a run's figures go: to the record if it had 1,000 faults of all kinds, else where git ignores them.

    Args:
        num_faults: How many rounds ran.
        all_kinds: Whether the run drew from all kinds of faults.
    """
    return RECORD if num_faults >= RECORD_FAULTS and all_kinds else SCRATCH


def write_figures(outcomes: Sequence[Outcome], *, seed: int, restarts: int, folder: Path) -> str:
    """Write fuzz.md and fuzz.json into `folder`; returns the table.

    Args:
        outcomes: Of all rounds, not empty.
        seed: Of the run.
        restarts: How often the cluster was restarted, planned or after a failed round.
        folder: Where to.
    """
    kinds = Counter(outcome.fault.kind for outcome in outcomes)
    rows = [_row(kind, [o for o in outcomes if o.fault.kind == kind]) for kind in sorted(kinds)]
    rows.append(_row("all", outcomes))
    facts = machine()
    lines = [
        "| fault | count | median to control | p95 | max | ranks a step apart | failures |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r['kind']} | {r['faults']} | {r['median_s']:.2f} s | {r['p95_s']:.2f} s | {r['max_s']:.2f} s "
            f"| {r['steps_apart']} | {r['failures']} |"
            for r in rows
        ),
        "",
        _LEGEND,
        "",
        f"Seed {seed}; the cluster was restarted {restarts} times on the way.",
        "",
        "Measured on " + ", ".join(f"{key} {value}" for key, value in facts.items()) + ".",
        "",
    ]
    failures = [str(outcome) for outcome in outcomes if outcome.problems]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fuzz.md").write_text("\n".join(lines))
    record = {"machine": facts, "seed": seed, "restarts": restarts, "rows": rows, "failures": failures}
    (folder / "fuzz.json").write_text(json.dumps(record, indent=1))
    return "\n".join(lines)
