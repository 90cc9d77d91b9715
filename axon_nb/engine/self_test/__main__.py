"""`python -m axon_nb.engine.self_test [--json] [--fresh] [--hooks] [--only CHECK ...]`: run the self-test, show it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import msgspec

from axon_nb.engine.self_test.catalog import CHECKS
from axon_nb.engine.self_test.verdict import current_verdict, run_and_save, run_checks


def main() -> int:
    """Run the command line; return 0 if everything works, else 1."""
    parser = argparse.ArgumentParser(prog="python -m axon_nb.engine.self_test", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--fresh", action="store_true", help="run the test even if a verdict is cached")
    parser.add_argument("--hooks", action="store_true", help="check every private hook, too")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="CHECK", help="run these checks; cache no verdict")
    options = parser.parse_args()
    if options.only:
        verdict = run_checks(options.only)
    else:
        verdict = run_and_save() if options.fresh else current_verdict(in_process=True)
    hooks = _hooks() if options.hooks else {}  # after the test, which forks this process
    if options.json:
        print(json.dumps(msgspec.to_builtins(verdict) | hooks))
    else:
        print(f"torch {verdict.torch}, Python {verdict.python}: {verdict.seconds:.1f} s")
        for capability in verdict.capabilities:
            print(f"{'works' if capability.works else 'FAILS':6} {capability.name:16} {capability.label}")
            if not capability.works:
                print(f"       {capability.reason}\n       Lost: {capability.lost}\n       Fix: {capability.fix}")
        for entry in hooks.get("hooks", {}).get("missing", ()):
            print(f"lacks {', '.join(entry['missing'])}\n       Lost: {entry['lost']}\n       Fix: {entry['fix']}")
    return int(bool(verdict.lost))


def _hooks() -> dict[str, Any]:
    try:
        from axon_nb.engine.self_test.catalog import walk_hooks

        return {"hooks": walk_hooks()}
    except Exception as error:  # the verdict is there, and is not to be lost
        return {"hooks": {"failure": f"{type(error).__name__}: {error}"}}


if __name__ == "__main__":
    sys.exit(main())
