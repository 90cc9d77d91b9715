"""The long fuzz: `make fuzz FAULTS=1000 SEED=1`; one round again, alone: `make fuzz SEED=1 ONLY=38`.

A run of 1,000 faults or more writes the record, `benchmarks/results/fuzz.md`; a shorter one writes into `out/fuzz`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.faults import KINDS
from tests.fuzz.figures import figures_folder, write_figures
from tests.fuzz.rounds import Fuzz


def main() -> int:
    """Run the rounds, tell each, write the figures; 1 when a round failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="this round alone; nothing is written")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=[], help="only these kinds of faults")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--out", type=Path, help="folder for the figures, whatever the number of faults")
    options = parser.parse_args()
    numbers = range(options.faults) if options.only is None else [options.only]
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    with tempfile.TemporaryDirectory() as scratch, Fuzz(
        options.seed, Path(scratch), kinds=tuple(options.kinds)
    ) as fuzz:  # fmt: skip
        for number in numbers:
            if time.monotonic() > end:
                break
            outcome = fuzz.round(number)
            if outcome.problems or options.only is not None:
                print(f"{'FAILED' if outcome.problems else 'passed'} {outcome}", flush=True)
            else:
                fault = outcome.fault
                print(f"{number:5} {fault.kind}: {fault.detail}, {outcome.control_s:.2f} s", flush=True)
    if options.only is None:
        folder = options.out or figures_folder(len(fuzz.outcomes), all_kinds=not options.kinds)
        print(write_figures(fuzz.outcomes, seed=options.seed, restarts=fuzz.restarts, folder=folder))
    return int(any(outcome.problems for outcome in fuzz.outcomes))


if __name__ == "__main__":
    sys.exit(main())
