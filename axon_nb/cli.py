"""The command `axon-nb`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from axon_nb.errors import AxonError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    Args:
        argv: Its arguments; None: those of this process.
    """
    parser = argparse.ArgumentParser(prog="axon-nb", description="Distributed PyTorch in a notebook.")
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export",
        help="write a notebook's %%distributed cells as a script for torchrun",
        description="Write the %%distributed cells of a notebook that has run, in the order of their prompts, as one "
        "script for torchrun. Example: axon-nb export digits.ipynb train.py",
    )
    export.add_argument("notebook", type=Path, help="an .ipynb file")
    export.add_argument("script", type=Path, help="the script to write, a .py file")
    export.add_argument("--live-only", action="store_true", help="leave out cells that the end does not depend on")
    export.add_argument("--force", action="store_true", help="replace files that are there")
    options = parser.parse_args(argv)
    from axon_nb.export import export_notebook

    try:
        print(export_notebook(options.notebook, options.script, live_only=options.live_only, force=options.force))
    except AxonError as error:
        print(f"axon-nb: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
