"""Run the tests in two parallel pytest processes, as they wait more than they compute. Used by `scripts/test`."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile

FIRST = ("tests/kernel", "tests/fuzz", "tests/plan")


def main(options: list[str]) -> int:
    """Show one half live and the other when it finishes; return the worse exit status."""
    pytest = [sys.executable, "-m", "pytest", *options]
    rest = [f"--ignore={folder}" for folder in FIRST]
    with tempfile.TemporaryFile("w+") as log:
        halves = [
            subprocess.Popen([*pytest, *FIRST, "-p", "no:cacheprovider"], stdout=log, stderr=subprocess.STDOUT),
            subprocess.Popen([*pytest, *rest]),
        ]
        try:
            statuses = [half.wait() for half in halves]
        except KeyboardInterrupt:  # the terminal has interrupted both processes
            statuses = [half.wait() for half in halves] + [128 + signal.SIGINT]
        log.seek(0)
        print(log.read(), end="", flush=True)
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
