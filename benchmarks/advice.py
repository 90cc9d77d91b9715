"""What `%timeline --advise` says of planted costs: whether it names the cause first, and how right its gain is.

Run `python -m benchmarks.advice [--only WORD] [--prove]` in the project's folder. Each program runs as planted, and
with the change applied, in turn. Computing is sleep, and links are slow on purpose, so ranks do not share cores.
With `--prove`, causal delays measure the gain, too.
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
from axon_nb.cluster.proof import PAIRS, Proof, prove, why_unprovable
from axon_nb.widgets.timeline.advice import StepAdvice, step_advice
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
    proof: Proof | None = None
    """What delays measured; None: nothing."""

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

    def proof_cells(self) -> list[str]:
        proof = self.proof
        if proof is None:
            return [self.name, self.cause, f"{self.said:.0%}", "none", f"{self.gained:.0%}", ""]
        proven, points = f"{proof.gain:.0%} ± {proof.margin * 100:.0f}", (proof.gain - self.gained) * 100
        return [self.name, self.cause, f"{proof.said:.0%}", proven, f"{self.gained:.0%}", f"{points:+.0f}"]


def run(cluster: Cluster, code: str) -> tuple[float, StepAdvice | None]:
    """Return the seconds of a step, and the advice."""
    cluster.spans.collect(watch_s=60)
    begin = cluster.spans.store.end
    values = cluster.run(code, quiet=True).values
    cluster.spans.collect()
    return statistics.fmean(values.values()), step_advice(cluster.spans.store.table(begin))


def measure(cluster: Cluster, planted: Planted, *, proves: bool) -> Outcome:
    """Run a program as planted and changed, in turn; then prove the advice on its cause, if asked."""
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
    advice = next((one for one in found.advice if one.cause == planted.cause), None) if found is not None else None
    proof = None
    if proves and advice is not None and found is not None and not why_unprovable(found.recording, advice):
        proof = prove(cluster, planted.code, recording=found.recording, advice=advice)
    return Outcome(planted.name, planted.cause, statistics.mode(firsts), statistics.median(said), gained, proof)


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


def proof_table(outcomes: list[Outcome]) -> Iterator[str]:
    """Yield the lines of the report on proofs."""
    proofs = [(one, one.proof) for one in outcomes if one.proof is not None]
    yield "| program | cause | said | proven | gained | points |"
    yield "|---|---|---|---|---|---|"
    for one in outcomes:
        yield f"| {' | '.join(one.proof_cells())} |"
    near = sum(abs(proof.gain - one.gained) <= TOLERANCE for one, proof in proofs)
    yield ""
    yield f"Of {len(proofs)} proofs, {near} are within 5 points of what the change gained."
    yield ""
    yield f"Proven by {PAIRS} pairs of runs on 2 ranks; gained: the median of {ROUNDS} rounds. Measured on {_facts()}."


def _facts() -> str:
    return ", ".join(f"{name} {value}" for name, value in machine().items())


def main() -> None:
    """Measure all programs and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name or cause contains this; writes no files")
    parser.add_argument("--prove", action="store_true", help="measure gains by causal delays, too")
    options = parser.parse_args()
    programs = PLANTED if options.prove else (*PLANTED, *BALANCED)
    chosen = [one for one in programs if options.only in one.name + one.cause]
    outcomes = []
    with axon_nb.start(2, devices="cpu", name="advice") as cluster:
        cluster.run(DEFINE, quiet=True)
        for planted in chosen:
            outcomes.append(measure(cluster, planted, proves=options.prove))
            print("  ".join(outcomes[-1].proof_cells() if options.prove else outcomes[-1].cells()), flush=True)
    text = "\n".join(proof_table(outcomes) if options.prove else table(outcomes))
    print(text)
    results = Path(__file__).parent / "results"
    if options.prove and not options.only:
        (results / "advice_proofs.md").write_text(text + "\n")
    elif not options.only:
        (results / "advice.md").write_text(text + "\n")
        facts = [
            dict(zip(("name", "cause", "first", "said", "gained", "points"), one.cells(), strict=True))
            for one in outcomes
        ]
        (results / "advice.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
