"""What `%timeline --advise` says of planted costs: whether it names the cause first, and how right its gain is.

Run `python -m benchmarks.advice [--only WORD]` in the project's folder. Each program runs as planted, and
with the change applied, in turn. Computing is sleep, and links are slow on purpose, so ranks do not share cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import axon_nb
from axon_nb.cluster.cluster import Cluster
from axon_nb.widgets.timeline.content import StepAdvice, step_advice
from benchmarks.advice_programs import BALANCED, DEFINE, PLANTED, Planted
from benchmarks.report import machine

ROUNDS = 3
TOLERANCE = 0.05


@dataclass(frozen=True)
class Outcome:
    """What was said of a program, and what the change gained."""

    name: str
    cause: str
    first: str
    """The cause that the advice named first, in most rounds; empty: none."""
    said: float
    gained: float

    @property
    def is_first(self) -> bool:
        return self.first == self.cause

    @property
    def is_right(self) -> bool:
        return self.is_first and abs(self.said - self.gained) <= TOLERANCE

    def cells(self) -> list[str]:
        return [
            self.name, self.cause or "none", self.first or "none", f"{self.said:.0%}", f"{self.gained:.0%}",
            f"{(self.said - self.gained) * 100:+.0f}",
        ]  # fmt: skip


def run(cluster: Cluster, code: str) -> tuple[float, StepAdvice | None]:
    """Return the seconds of a step, and the advice."""
    cluster.spans.collect(watch_s=60)
    begin = cluster.spans.store.end
    values = cluster.run(code, quiet=True).values
    cluster.spans.collect()
    return statistics.fmean(values.values()), step_advice(cluster.spans.store.table(begin))


def measure(cluster: Cluster, planted: Planted) -> Outcome:
    """Run a program as planted and changed, in turn."""
    before, after, firsts, said = [], [], [], []
    for _ in range(ROUNDS):
        cluster.state.set_slowness(planted.slowness)
        seconds, found = run(cluster, planted.code)
        before.append(seconds)
        causes = {one.cause: one.gain for one in reversed(found.advice)} if found is not None else {}
        firsts.append(found.advice[0].cause if found is not None and found.advice else "")
        said.append(causes.get(planted.cause, 0.0))
        if planted.changed:
            after.append(run(cluster, planted.changed)[0])
    gained = 1 - statistics.median(after) / statistics.median(before) if after else 0.0
    return Outcome(planted.name, planted.cause, statistics.mode(firsts), statistics.median(said), gained)


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines of the report."""
    planted = [one for one in outcomes if one.cause]
    yield "| program | cause | named first | said | gained | points |"
    yield "|---|---|---|---|---|---|"
    for one in outcomes:
        yield f"| {' | '.join(one.cells())} |"
    yield ""
    right, first = (sum(map(test, planted)) for test in (lambda one: one.is_right, lambda one: one.is_first))
    yield f"Of {len(planted)} causes, {first} are named first, and {right} gains are within 5 points of what was said."
    yield ""
    yield f"Each is the median of {ROUNDS} rounds of 8 steps on 2 ranks. Measured on {_facts()}."


def _facts() -> str:
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def main() -> None:
    """Measure all programs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name or cause contains this; writes no files")
    options = parser.parse_args()
    chosen = [one for one in (*PLANTED, *BALANCED) if options.only in one.name + one.cause]
    outcomes = []
    with axon_nb.start(2, devices="cpu", name="advice") as cluster:
        cluster.run(DEFINE, quiet=True)
        for planted in chosen:
            outcomes.append(measure(cluster, planted))
            print("  ".join(outcomes[-1].cells()), flush=True)
    text = "\n".join(table(outcomes))
    print(text)
    results = Path(__file__).parent / "results"
    if not options.only:
        (results / "advice.md").write_text(text + "\n")
        facts = [
            dict(zip(("name", "cause", "first", "said", "gained", "points"), one.cells(), strict=True))
            for one in outcomes
        ]
        (results / "advice.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
