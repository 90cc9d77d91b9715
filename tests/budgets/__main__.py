"""Print what an empty cell and a start cost now, and their budgets: `python -m tests.budgets`, on an idle machine."""

from __future__ import annotations

import argparse
import os
import tempfile

from tests.budgets.measurement import Cluster, Costs, environment, open_cluster
from tests.budgets.table import PATH, Budgets

ROUNDS, WINDOWS = 3, 8


def measure(cluster: Cluster) -> Costs:
    """Measure several times and return the largest numbers: a budget must not be luck."""
    costs = cluster.start_costs()
    cluster.warm_up()
    for _ in range(ROUNDS):
        for kind, measured in {**(cluster.system_calls(WINDOWS) or {}), **cluster.cell_costs(WINDOWS)}.items():
            known = costs.setdefault(kind, {})
            known |= {name: max(number, known.get(name, 0)) for name, number in measured.items()}
    return costs


def main() -> None:
    """Measure, print, and with --update rewrite the file."""
    parser = argparse.ArgumentParser(prog="python -m tests.budgets", description=__doc__)
    parser.add_argument("--update", action="store_true", help="lower the numbers in tests/budgets.toml to these")
    parser.add_argument("--functions", action="store_true", help="list the functions that an empty cell calls")
    options = parser.parse_args()
    budgets = Budgets.read(PATH.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="axb-") as folder:
        os.environ["JUPYTER_RUNTIME_DIR"] = folder
        with open_cluster() as cluster:
            costs = measure(cluster)
            functions = cluster.functions
    for kind, measured in costs.items():
        for name, number in measured.items():
            print(f"{kind:22} {name:36} {number:8g}   budget {budgets.limits[kind].get(name, 0):g}")
    for process, calls in functions.items() if options.functions else ():
        for function, number in sorted(calls.items(), key=lambda item: -item[1]):
            print(f"{process:10} {number:6g} {function}")
    if options.update:
        PATH.write_text(budgets.lowered(costs, environment()).text(), encoding="utf-8")


if __name__ == "__main__":
    main()
