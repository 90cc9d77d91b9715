"""The long fuzz: `make fuzz FAULTS=1000 SEED=1`; one round again, alone: `make fuzz SEED=1 ONLY=38`.

A run of 1,000 faults or more writes the record, `benchmarks/results/fuzz.md`; a shorter one writes into `out/fuzz`, as
does one on two hosts, `make fuzz HOSTS=1 FAULTS=300`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.cluster.launch.hosts.ssh_server import why_no_ssh
from tests.fuzz.figures import figures_folder, write_figures
from tests.fuzz.hosts.rounds import HOST_KINDS, KINDS_OF_TWO_HOSTS, fuzz_on_two_hosts
from tests.fuzz.rounds import Fuzz


def main() -> int:
    """Run the rounds, tell each, write the figures; 1 when a round failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", action="store_true", help="two hosts, and their faults, too; needs root and sshd")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--only", type=int, help="this round alone; nothing is written")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS_OF_TWO_HOSTS), default=[], help="only these kinds")
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--out", type=Path, help="folder for the figures, whatever the number of faults")
    options = parser.parse_args()
    if options.hosts and (reason := why_no_ssh()):
        parser.error(f"--hosts {reason}")
    if not options.hosts and (kinds := {*options.kinds} & {*HOST_KINDS}):
        parser.error(f"these kinds need --hosts: {', '.join(sorted(kinds))}")
    last = options.first + options.faults
    numbers = range(options.first, last) if options.only is None else [options.only]
    end = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
    make = fuzz_on_two_hosts if options.hosts else Fuzz
    with tempfile.TemporaryDirectory(prefix="axz-") as scratch, make(
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
        recorded = not options.kinds and not options.hosts
        folder = options.out or figures_folder(len(fuzz.outcomes), all_kinds=recorded)
        print(write_figures(fuzz.outcomes, seed=options.seed, restarts=fuzz.restarts, folder=folder))
    return int(any(outcome.problems for outcome in fuzz.outcomes))


if __name__ == "__main__":
    sys.exit(main())
