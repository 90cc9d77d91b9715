"""Measurements with their targets, as a Markdown table and as JSON."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("torch", "ipyparallel", "ipykernel", "ipython", "jupyter_client")


@dataclass(frozen=True)
class Row:
    """One measurement."""

    measure: str
    ours: float
    unit: str
    peer: str = ""
    """Name of the peer behind `peer_value`; empty for an absolute target."""
    peer_value: float | None = None
    limit: float | None = None
    """Largest ratio (without a peer: largest value) that meets the target."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Our value divided by the peer's."""
        return self.ours / self.peer_value if self.peer_value else None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        if self.limit is None:
            return None
        return (self.ours if self.ratio is None else self.ratio) <= self.limit

    def cells(self) -> list[str]:
        """Format as a table row."""
        peer = "" if self.peer_value is None else f"{self.peer} {self.peer_value:.3g} {self.unit}"
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        target = (
            "" if self.limit is None else f"<= {self.limit:.3g}" + ("" if self.ratio is not None else f" {self.unit}")
        )
        return [
            self.measure,
            f"{self.ours:.3g} {self.unit}",
            peer,
            ratio,
            target,
            {None: "", True: "yes", False: "no"}[self.met],
        ]


def median(values: Sequence[float]) -> float:
    """Median of the values."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def machine() -> dict[str, str]:
    """Describe the machine and the versions."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    facts = {
        "date": dt.datetime.now(tz=dt.UTC).strftime("%Y-%m-%d"),
        "cpu": f"{len(os.sched_getaffinity(0))} cores of {model}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
    }
    return facts | {name: version(name) for name in PACKAGES}


def write(name: str, rows: Sequence[Row], folder: Path) -> str:
    """Write `name`.md and `name`.json into `folder` and return the table."""
    facts = machine()
    head = ["measure", "axon_nb", "peer", "ratio", "target", "met"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row.cells())} |" for row in rows]
    notes = [f"- {row.measure}: {row.note}" for row in rows if row.note]
    text = "\n".join(
        [*lines, "", *notes, "", "Measured on " + ", ".join(f"{k} {v}" for k, v in facts.items()) + ".", ""]
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)
    records = [asdict(row) | {"ratio": row.ratio, "met": row.met} for row in rows]
    (folder / f"{name}.json").write_text(json.dumps({"machine": facts, "rows": records}, indent=1))
    return text
