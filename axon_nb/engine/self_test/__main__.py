"""`python -m axon_nb.engine.self_test [--json] [--fresh]`: run the self-test and show its verdict."""

from __future__ import annotations

import argparse
import json
import sys

from axon_nb.engine.self_test.verdict import current_verdict, run_and_save


def main() -> int:
    """Run the command line; return 0 if everything works, else 1."""
    parser = argparse.ArgumentParser(prog="python -m axon_nb.engine.self_test", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fresh", action="store_true", help="run the test even if a verdict is cached")
    options = parser.parse_args()
    verdict = run_and_save() if options.fresh else current_verdict(in_process=True)
    if options.json:
        print(json.dumps(verdict.to_json()))
    else:
        print(f"torch {verdict.torch}, Python {verdict.python}: {verdict.seconds:.1f} s")
        for capability in verdict.capabilities:
            print(f"{'works' if capability.works else 'FAILS':6} {capability.name:16} {capability.label}")
            if not capability.works:
                print(f"       {capability.reason}\n       Lost: {capability.lost}\n       Fix: {capability.fix}")
    return int(bool(verdict.lost))


if __name__ == "__main__":
    sys.exit(main())
